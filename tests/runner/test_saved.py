"""A run's saved config: an override changes the values that referred to it, and a config from somebody else can refer to nothing but itself."""

import json
import re
from pathlib import Path

import pytest

from samewise.runner.config import compose, project
from samewise.runner.config.saved import config_in
from samewise.runner.config.tree import at
from samewise.runner.errors import ConfigError

FOLDERS = ["recipe=classification", "model=resnet18_small", "dataset=image_folder", "dataset.root=here", "dataset.num_classes=4"]


def saved(folder: Path, *overrides: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(compose.dump(compose.compose([*FOLDERS, *overrides], project=project.find(folder))))
    return file


def with_references(file: Path, references: object) -> Path:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(f"# references: {json.dumps(references)}" if line.startswith("# references:") else line for line in lines) + "\n")
    return file


@pytest.mark.parametrize("experiment", ["audio_classification_spoken_digits", "gan_digits", "retinanet_bccd", "wavernn_spoken_digits"])
def test_a_saved_config_is_read_as_it_was(experiment: str, tmp_path: Path) -> None:
    composed = compose.compose([f"experiment={experiment}"], project=project.find(tmp_path))
    text = compose.dump(composed)
    again = compose.parse(text)
    assert again.whole == composed.whole
    assert again.fingerprint == composed.fingerprint
    assert compose.dump(again) == text


def test_an_override_also_changes_the_values_that_referred_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = config_in(saved(tmp_path), ["dataset.root=there", "dataset.num_classes=7"]).whole
    assert [at(whole, path) for path in ("dataset.root", "dataset.train.root", "dataset.valid.root")] == ["there"] * 3
    assert [at(whole, path) for path in ("dataset.valid.num_classes", "model.num_classes", "recipe.num_classes")] == [7] * 3
    assert capsys.readouterr().err == ""


def test_a_key_that_the_run_lacks_is_added_with_a_plus(tmp_path: Path) -> None:
    added = config_in(saved(tmp_path), ["+recipe.test_time_augmentation=flip", "seed=3"])
    assert (at(added.whole, "recipe.test_time_augmentation"), at(added.whole, "seed")) == ("flip", 3)
    either = config_in(saved(tmp_path), ["++recipe.test_time_augmentation=flip", "++seed=3"])
    assert (either.whole, either.label.replace("+", "")) == (added.whole, added.label.replace("+", ""))
    for override, said in (
        ("recipe.test_time_augmentation=flip", "no such key"),
        ("precision=bfloat16", "is a group of the run's config; only values can be overridden; hint: its keys are dtype, tf32"),
        ("+seed=3", "already exists; hint: write it without the +"),
        ("+loader.nothing=1", "nothing"),
        ("++loader.nothing=1", "nothing"),
        ("optimizer={nothing: 1}", "has no such keys yet"),
        ("initialise={rules: {a: {match: bias, bias: zeros}}}", "has no such keys yet"),
        ("+nothing.at_all=1", "nothing"),
        *((f"recipe.top_k.{element}=2", "set the whole list: 'recipe.top_k=[...]'") for element in ("7", "x")),
        ("+transforms.train.sample.9.p=1", "set the whole list: 'transforms.train.sample=[...]'"),
        ("~seed", "cannot be removed"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            config_in(saved(tmp_path), [override])


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "${oc.${name}env:SECRET}", "${${name}:SECRET}"])
def test_no_other_reference_is_followed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "here")
    file = with_references(saved(tmp_path), {"dataset.train.root": text})
    whole = config_in(file, ["dataset.root=there"]).whole
    assert at(whole, "dataset.train.root") == "here"


@pytest.mark.parametrize(
    "references",
    [
        {"dataset.train.root": "${dataset.train.root}"},
        {"dataset.train.root": "${dataset.valid.root}", "dataset.valid.root": "${dataset.train.root}"},
        {"dataset.train.root": "${nothing.here}"},
        {"dataset": "${model}", "dataset.num_classes": "${seed}"},
    ],
)
def test_a_wrong_reference_changes_nothing(references: dict[str, str], tmp_path: Path) -> None:
    file = saved(tmp_path)
    before = config_in(file).whole
    assert config_in(with_references(file, references)).whole == before
