"""Metrics by name compared with scikit-learn's, whatever the batch size, and messages about metrics that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch

from samewise.recipes.classification import Classification
from samewise.runner.cli import main
from samewise.runner.config.compose import compose
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import find
from samewise.runner.errors import ConfigError

CLASSES = 4
CHOICES = ("f1", "precision", "recall", "auroc", "average_precision", "calibration_error", "cohen_kappa", "matthews")


@pytest.fixture(scope="module")
def recipe() -> Classification:
    cfg = compose(["experiment=resnet18_digits", f"metrics=[{','.join(CHOICES)}]", f"dataset.num_classes={CLASSES}"], project=find()).cfg
    return instantiate(cfg.recipe, "recipe", allowed=())


class Given(torch.nn.Module):
    """A model whose logits are its input."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten(1)


def compute(recipe: Classification, logits: torch.Tensor, label: torch.Tensor, size: int) -> dict[str, float]:
    scores = recipe.scores(None)
    for begin in range(0, len(label), size):
        batch = {"image": logits[begin : begin + size, :, None, None], "label": label[begin : begin + size]}
        scores.add(recipe.measure(Given(), batch))
    return scores.compute()


def test_metrics_equal_scikit_learns_for_any_batch_size(recipe: Classification) -> None:
    generator = torch.Generator().manual_seed(3)
    label = torch.randint(CLASSES, (203,), generator=generator)
    logits = torch.randn(203, CLASSES, generator=generator) + torch.nn.functional.one_hot(label, CLASSES)
    found = compute(recipe, logits, label, 64)
    assert found == compute(recipe, logits, label, 7)

    probabilities, true = logits.double().softmax(1).numpy(), label.numpy()
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((predicted == true)[bins == one].mean() - confidence[bins == one].mean()) * (bins == one).mean() for one in np.unique(bins)]
    one_hot = np.eye(CLASSES)[true]
    expected = {
        "f1": sklearn.metrics.f1_score(true, predicted, average="macro"),
        "precision": sklearn.metrics.precision_score(true, predicted, average="macro"),
        "recall": sklearn.metrics.recall_score(true, predicted, average="macro"),
        "auroc": sklearn.metrics.roc_auc_score(true, probabilities, multi_class="ovr", average="macro"),
        "average_precision": sklearn.metrics.average_precision_score(one_hot, probabilities, average="macro"),
        "calibration_error": sum(gaps),
        "cohen_kappa": sklearn.metrics.cohen_kappa_score(true, predicted),
        "matthews": sklearn.metrics.matthews_corrcoef(true, predicted),
    }
    assert {name: found[name] for name in CHOICES} == pytest.approx(expected, rel=1e-5)


def test_each_evaluation_starts_from_zero(recipe: Classification) -> None:
    label = torch.arange(8) % CLASSES
    right, wrong = torch.eye(CLASSES)[label], torch.eye(CLASSES)[(label + 1) % CLASSES]
    assert compute(recipe, right, label, 8)["f1"] == 1.0
    assert compute(recipe, wrong, label, 8)["f1"] == 0.0
    assert compute(recipe, right, label, 8)["f1"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["metrics=f1", "recipe.metrics.f1.average=none"], "recipe.metrics.f1: gives several numbers"),
        (["metrics=f1", "recipe.metrics.f1.num_classes=3"], "recipe.metrics.f1: does not take 10 probabilities"),
        (
            ["+recipe.metrics.accuracy._target_=torchmetrics.classification.MulticlassAccuracy", "+recipe.metrics.accuracy.num_classes=10"],
            "recipe.metrics.accuracy: is the name",
        ),
        (["+recipe.metrics.sum._target_=torch.nn.Identity"], "recipe.metrics.sum: is not a metric"),
        (["+recipe.metrics.clip._target_=torchmetrics.multimodal.CLIPScore"], "recipe.metrics.clip"),
    ],
)
def test_metrics_that_do_not_fit_are_reported_before_training(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "experiment=resnet18_digits", "debug=tiny", "model.width=4", *overrides]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_warnings_of_torchmetrics_are_kept_once_and_not_printed(recipe: Classification, recwarn: pytest.WarningsRecorder) -> None:
    scores = recipe.scores(None)
    batch = {"image": torch.randn(6, CLASSES, 1, 1), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    scores.add(recipe.measure(Given(), batch))
    assert scores.doubts() == []
    scores.compute()
    scores.compute()
    (doubt,) = [one for one in scores.doubts() if one.path == "recipe.metrics.auroc"]
    assert "torchmetrics warns: No positive samples" in doubt.message
    assert "a class that no evaluated sample has" in doubt.hint
    assert not [one for one in recwarn if "No positive samples" in str(one.message)]
