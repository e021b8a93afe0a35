"""Which part of the validation split is evaluated, and when: `evaluate.limit`, and a run of zero steps."""

from __future__ import annotations

import json

import hydra
import pytest
import torch
import torch.nn.functional as F

from samewise import load
from samewise.recipes.models.resnet import resnet18_small

TINY = [
    "experiment=resnet18_digits",
    "debug=tiny",
    "model.width=4",
    "tracking=none",
    "evaluate.pictures=false",
    "callbacks=[progress]",
    "evaluate.batch_size=16",
]


def train(samewise, root, *overrides):
    done = samewise("train", *TINY, *overrides, f"run_root={root}")
    assert done.returncode == 0, done.stderr
    return done, next(root.glob("*/*/summary.json")).parent


@pytest.mark.slow
def test_a_run_of_zero_steps_evaluates_and_saves_the_initial_model(samewise, tmp_path) -> None:
    done, folder = train(samewise, tmp_path, "max_steps=0")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["status"], summary["metrics"]["best"]["step"]) == (0, "finished", 0)
    assert {"valid/loss", "valid/accuracy"} <= summary["metrics"]["final"].keys()
    assert torch.load(folder / "checkpoints/step-00000000/state.pt", weights_only=True)["metrics"] == summary["metrics"]["final"]
    assert "0 steps of 16" in done.stderr
    assert "ms per step" not in done.stdout
    again = samewise("eval", folder, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["metrics"] == summary["metrics"]["final"]
    assert "already finished" in samewise("train", *TINY, "max_steps=0", f"run_root={tmp_path}").stdout
    assert samewise("verify", folder).returncode in (0, 2)  # having no step to compare is reported and does not crash


def test_a_run_is_evaluated_without_the_weights_file_it_started_from(samewise, tmp_path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(resnet18_small(width=4, in_channels=3).state_dict(), file)
    _, folder = train(samewise, tmp_path, "max_steps=0", f"initialise.weights={file}", "initialise.exclude=[fc.*]", "param_groups=head_only")
    file.unlink()
    again = samewise("eval", folder, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["metrics"] == json.loads((folder / "summary.json").read_text())["metrics"]["final"]


@pytest.mark.slow
def test_evaluating_the_best_says_that_its_checkpoint_was_not_kept(samewise, tmp_path, capfd) -> None:
    _, folder = train(samewise, tmp_path, "max_steps=2", "checkpoint.every_steps=1", "checkpoint.keep_best=0", "checkpoint.keep_last=1")
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"]["best"]["step"] = 1
    (folder / "summary.json").write_text(json.dumps(summary))
    again = samewise("eval", folder)
    assert f"{folder}, step 2, " in again.stdout
    said = f"note: {folder}: the best evaluation was at step 1, whose checkpoint is gone (checkpoint.keep_best=1 keeps it); this is step 2\n"
    assert again.stderr.endswith(said)
    assert "note:" not in samewise("eval", folder, "--checkpoint", "last").stderr
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr().err == said


def test_a_limited_evaluation_uses_the_first_batches_and_its_output_says_so(samewise, tmp_path) -> None:
    done, folder = train(samewise, tmp_path, "max_steps=0", "evaluate.limit=2", "evaluate.every_steps=1")
    said = "the first 32 of 64 samples of valid (evaluate.limit=2)"
    assert f"  evaluates {said}" in done.stderr.splitlines()
    assert said in done.stdout
    limited = json.loads((folder / "summary.json").read_text())["metrics"]
    assert limited["evaluated"] == said
    short = samewise("eval", folder, "--json")
    assert json.loads(short.stdout)["metrics"] == limited["final"]
    assert json.loads(short.stdout)["evaluated"] == said
    whole = json.loads(samewise("eval", folder, "evaluate.limit=null", "--json").stdout)
    assert whole["evaluated"] == ""
    assert whole["metrics"]["valid/loss"] != limited["final"]["valid/loss"]
    other = json.loads(samewise("eval", folder, "--split", "train", "--json").stdout)
    assert other["evaluated"] == "", "only the validation split is cut short"


def test_a_limit_beyond_the_split_is_not_mentioned(samewise, tmp_path) -> None:
    done, _ = train(samewise, tmp_path, "max_steps=0", "evaluate.limit=400")
    assert "evaluate.limit" not in done.stderr + done.stdout


@pytest.mark.parametrize("override", ["evaluate.limit=0", "max_steps=-1"])
def test_values_that_are_too_small_are_refused(samewise, override) -> None:
    done = samewise("check", *TINY, override)
    assert done.returncode == 2
    assert "is too small" in done.stderr


LAB = """
import torch.nn.functional as F
from samewise.runner.interfaces import Loss, Phase, Recipe


class Least(Recipe):
    def loss(self, model, batch, phase):
        logits, margin = model(batch["image"]), phase.name == "second"
        each = F.multi_margin_loss(logits, batch["label"], reduction="none") if margin else F.cross_entropy(logits, batch["label"], reduction="none")
        return Loss(each.sum(), len(each), parts={"squares": each.detach().square().sum()})


class Two(Least):
    phases = (Phase("first"), Phase("second"))


class Half(Least):
    def measure(self, model, batch):
        return 1.0
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "lab.py").write_text(LAB)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab"]\nconfigs = "configs"\n')
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    for name in ("Least", "Two", "Half"):
        (tmp_path / "configs" / "recipe" / f"{name.lower()}.yaml").write_text(f"_target_: lab.{name}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["dataset=generated_classification", "dataset.samples=64", "evaluate.batch_size=9"]  # the last batch has one sample
    return [*(one for one in TINY if one != "debug=tiny"), *data, "max_steps=2", "run_root=runs"]


@pytest.mark.parametrize("recipe", ["least", "two"])
def test_the_metrics_of_a_recipe_with_nothing_but_a_loss_are_the_losses_of_the_split(samewise, lab, tmp_path, recipe) -> None:
    monitor = "valid/loss" if recipe == "least" else "valid/second/loss"
    done = samewise("train", *lab, f"recipe={recipe}", f"evaluate.monitor={monitor}", "--json")
    assert done.returncode == 0, done.stderr
    model, transforms, config = load(next(tmp_path.glob("runs/*/*/summary.json")).parent, checkpoint="last")
    batch = transforms(*hydra.utils.instantiate(config.cfg.dataset.valid))
    with torch.no_grad():
        logits, labels = model.double()(batch["image"].double()), batch["label"]
    entropy, margin = F.cross_entropy(logits, labels, reduction="none"), F.multi_margin_loss(logits, labels, reduction="none")
    expected = {"": entropy} if recipe == "least" else {"first/": entropy, "second/": margin}
    found = json.loads(done.stdout)["metrics"]["final"]
    assert len(labels) == 64
    for phase, each in expected.items():
        assert found[f"valid/{phase}loss"] == pytest.approx(each.mean().item(), rel=1e-5)
        assert found[f"valid/{phase}squares"] == pytest.approx(each.square().mean().item(), rel=1e-5)
    assert len(found) == 2 * len(expected)


ON_CANVAS = ["experiment=retinanet_own_images", "dataset=digits_on_canvas", "dataset.num_classes=11"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=gan_digits", "max_steps=1"],
        [*ON_CANVAS, "dataset.smallest=24", "dataset.largest=46", "max_steps=0", "evaluate.monitor=valid/map_medium", "evaluate.mode=max"],
    ],
)
def test_a_first_batch_of_one_sample_does_not_stand_for_the_split(samewise, tmp_path, overrides) -> None:
    done = samewise("train", "debug=tiny", *overrides, "evaluate.batch_size=1", "tracking=none", "evaluate.pictures=false", f"run_root={tmp_path}")
    assert done.returncode == 0, done.stderr


def test_a_recipe_that_measures_needs_scores(samewise, lab) -> None:
    done = samewise("check", *lab, "recipe=half")
    assert done.returncode == 2
    assert done.stderr.startswith("error: recipe: Half has a `measure`, but no `scores`")
