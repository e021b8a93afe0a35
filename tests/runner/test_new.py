"""An experiment file from a run, and a run's own config trained again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import samewise as sw
from samewise.runner.commands.init import make
from samewise.runner.config import project
from samewise.runner.config.compose import compose

Run = Callable[..., Any]
SMALL = ["max_steps=1", "model.width=4", "seed=3", "callbacks=none", "tracking=none", "evaluate.pictures=false", "dataset.valid.length=8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sw.Trained]:
    """A run of one step in a new project."""
    folder, path = tmp_path_factory.mktemp("new") / "lab", list(sys.path)
    make(folder, "new_lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield sw.train(*SMALL)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "new_lab"]:
        del sys.modules[name]


def read_experiment(name: str) -> Any:
    return yaml.safe_load(Path(f"configs/experiment/{name}.yaml").read_text())


def test_an_experiment_from_a_run_keeps_its_fingerprint_and_lists_only_overrides(trained: sw.Trained, samewise: Run) -> None:
    done = samewise("new", "again", "--from", trained.folder.name)
    assert done.returncode == 0, done.stderr
    assert compose(["experiment=again"], project=project.find()).fingerprint[:12] == trained.folder.name
    said = read_experiment("again")
    assert said["defaults"] == ["first", {"override /callbacks": "none"}, "_self_"]
    rest = {"seed": 3, "max_steps": 1, "model": {"width": 4}, "dataset": {"valid": {"length": 8}}, "evaluate": {"pictures": False}}
    assert {key: value for key, value in said.items() if key != "defaults"} == rest
    assert "again" in samewise("list", "experiment").stdout
    both = samewise("new", "third", "--from", "first")
    assert "first is an experiment, which is taken, and the name of 1 run" in both.stderr
    assert f"--from {Path('runs') / 'first' / trained.folder.name} takes the settings of the run" in both.stderr


@pytest.mark.parametrize(
    ("source", "overrides", "values"),
    [
        ("first", ["dataset.image_size=48"], {"dataset": {"image_size": 48}}),
        ("resnet18_digits", ["model=resnet34_small", "optimizer.lr=0.5", "seed=4"], {"optimizer": {"lr": 0.5}, "seed": 4}),
        ("resnet18_digits", ["optimizer=adamw", "optimizer.lr=0.5", "recipe.num_classes=12", "device=cpu"], None),
        ("gan_digits", ["optimizer.generator.lr=0.5", "run_root=elsewhere", "device=cpu"], {"optimizer": {"generator": {"lr": 0.5}}}),
        ("resnet18_digits", ["callbacks=[default,ema]", "debug=tiny"], None),
        ("first", ["evaluate.monitor=valid/score", "evaluate.mode=max", "seed=4"], {"evaluate": {"monitor": "valid/score", "mode": "max"}, "seed": 4}),
    ],
)
def test_an_experiment_from_another_with_overrides_has_the_same_fingerprint(
    trained: sw.Trained, samewise: Run, request: pytest.FixtureRequest, source: str, overrides: list[str], values: Any
) -> None:
    name = f"from_{source}_{len(overrides)}"
    done = samewise("new", name, "--from", source, *overrides)
    assert done.returncode == 0, done.stderr
    here = project.find()
    assert compose([f"experiment={name}"], project=here).fingerprint == compose([f"experiment={source}", *overrides], project=here).fingerprint
    if values is not None:
        assert {key: value for key, value in read_experiment(name).items() if key != "defaults"} == values


def test_experiments_in_folders_are_found_and_names_that_cannot_be_chosen_are_refused(trained: sw.Trained, samewise: Run) -> None:
    assert samewise("new", "sub/nested", "--from", "resnet18_digits", "seed=4").returncode == 0
    assert samewise("new", "next", "--from", "sub/nested", "max_steps=3").returncode == 0
    assert "already exists" in samewise("new", "sub/nested", "--from", "resnet18_digits").stderr
    Path("configs/experiment/sub/nested.yaml").rename("configs/experiment/ünï.yaml")
    assert samewise("new", "plain", "--from", "ünï", "max_steps=4").returncode == 0
    Path("configs/experiment/ünï.yaml").rename("configs/experiment/sub/nested.yaml")
    for name in ("123", "1e3", "null", "True"):
        done = samewise("new", name, "--from", "resnet18_digits")
        assert (done.returncode, "NAME: is not a valid name for an experiment" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_config_of_a_run_can_be_trained_again(trained: sw.Trained, samewise: Run) -> None:
    config = trained.folder / "config.yaml"
    done = samewise("train", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "already finished" in done.stdout
    fresh = json.loads(samewise("train", "--config", config, "--fresh", "--json").stdout)
    assert fresh["weights_sha256"] == trained.weights_sha256
    assert sorted(path.name for path in trained.folder.parent.iterdir()) == [trained.folder.name, f"{trained.folder.name}-2"]
    other = json.loads(samewise("train", "--config", config, "seed=4", "--json").stdout)
    assert other["weights_sha256"] != trained.weights_sha256
    assert "does not exist" in samewise("train", "--config", "nowhere.yaml").stderr
    assert "cannot be used with a sweep" in samewise("train", "--config", config, "seed=1,2").stderr


def test_a_config_made_by_somebody_else_is_refused(trained: sw.Trained, samewise: Run, tmp_path: Path) -> None:
    received = tmp_path / "config.yaml"
    received.write_text((trained.folder / "config.yaml").read_text().replace("seed: 3", "seed: 5"))
    for command in (["train", "--config", received], ["new", "received", "--from", tmp_path]):
        done = samewise(*command)
        assert done.returncode == 2
        assert "--trust" in done.stderr
    assert not Path("configs/experiment/received.yaml").exists()
    assert len(list(trained.folder.parent.iterdir())) < 4
