"""A model learns from a frozen teacher: by the published formula, and as another experiment for another teacher."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from samewise_tiny import DIGITS

from samewise import load
from samewise.recipes.classification import Classification
from samewise.recipes.parts.losses import BinaryCrossEntropy
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step

HERE = Project(Path.cwd())
STUDENT = [*DIGITS, "model.width=2", "replicas=1", "distil.temperature=3", "distil.alpha=0.7", "recipe.label_smoothing=0", "clip_norm=null"]
SGD = ["optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.nesterov=false", "scheduler=constant", "~scheduler.cycle_momentum"]


def by_hand(logits: torch.Tensor, taught: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The mean loss of Hinton, Vinyals, Dean 2015, with the entropy of the teacher's soft labels taken off."""
    soft, own = torch.exp(taught / 3), torch.exp(logits / 3)
    soft, own = soft / soft.sum(1, keepdim=True), own / own.sum(1, keepdim=True)
    divergence = (soft * (soft.log() - own.log())).sum(1)
    probability = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    entropy = -probability[range(len(label)), label].log()
    return (0.3 * entropy + 0.7 * 9 * divergence).mean()


def test_a_student_trains_by_the_published_formula_and_its_teachers_weights_identify_the_experiment(samewise, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("teacher", 1), ("other", 2)):
        assert samewise("train", *DIGITS, "model.width=4", "max_steps=4", f"name={name}", f"seed={seed}").returncode == 0
    composed = compose([*STUDENT, *SGD, "distil.teacher=run:teacher"], project=HERE)
    run = build(composed, HERE, RunFolder(tmp_path / "student"))
    model, teacher = deepcopy(run.model), load("teacher").model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, kept = TrainingBatches(run), {name: value.clone() for name, value in teacher.state_dict().items()}
    for _ in range(3):
        micro_batches = next(batches)
        streams.enter(run.seed, "step", run.step, 0, 0)
        batch = run.transforms["train"](deepcopy(micro_batches[0].batch))
        loss = by_hand(model(batch["image"]), teacher(batch["image"]).detach(), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert train_step(run, micro_batches).losses["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(run.model.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run.recipe._teacher.state_dict(), kept, rtol=0, atol=0)

    shutil.copytree("runs/teacher", "runs/copied")
    teachers = ("teacher", "copied", "other")
    fingerprints = [compose([*STUDENT, *SGD, f"distil.teacher=run:runs/{name}"], project=HERE).fingerprint for name in teachers]
    assert fingerprints[0] == fingerprints[1] == composed.fingerprint
    assert fingerprints[2] != fingerprints[0]
    chosen = ["+model@distil.teacher=resnet18_small", "distil.teacher.width=4"]
    assert compose([*STUDENT, *SGD, *chosen, "distil.weights=run:teacher"], project=HERE).fingerprint == fingerprints[0]
    assert compose([*STUDENT, "distil.alpha=0.7"], project=HERE).fingerprint == compose([*STUDENT, "distil.alpha=0.9"], project=HERE).fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["distil.teacher=run:teachr"], "distil.teacher: no such run"),
        (["distil.teacher=teacher"], "distil: has no trained teacher"),
        (["+model@distil.teacher=resnet18_small"], "distil: has no trained teacher"),
        (["distil.alpha=2"], "distil.alpha: is too large"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused(samewise, tmp_path, settings, message) -> None:
    done = samewise("check", *STUDENT, *settings, f"run_root={tmp_path}", code=2)
    assert message in done.stderr


def test_only_outputs_with_a_softmax_are_distilled() -> None:
    with pytest.raises(ConfigError, match="needs a softmax"):
        Classification(loss=BinaryCrossEntropy()).distil(torch.nn.Identity(), temperature=4.0, alpha=0.9)
