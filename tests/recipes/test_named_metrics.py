"""Metrics by name compared with scikit-learn's, whatever the batch size, and messages about metrics that do not fit."""

import numpy as np
import pytest
import torch

from samewise.recipes.classification import Classification
from samewise.runner.config.compose import compose
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import find

CLASSES = 4
CHOICES = ("f1", "precision", "recall", "auroc", "average_precision", "calibration_error", "cohen_kappa", "matthews")


def composed(names: tuple[str, ...], *overrides: str) -> Classification:
    cfg = compose(["experiment=resnet18_digits", f"metrics=[{','.join(names)}]", f"dataset.num_classes={CLASSES}", *overrides], project=find()).cfg
    return instantiate(cfg.recipe, "recipe", allowed=())


@pytest.fixture(scope="module")
def recipe() -> Classification:
    return composed(CHOICES)


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
    import sklearn.metrics

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


def draw_several() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels float32[203, 4]: some images have none; the class 3 is in none."""
    generator = torch.Generator().manual_seed(5)
    label = (torch.rand(203, CLASSES, generator=generator) < torch.tensor([0.6, 0.2, 0.4, 0.0])).float()
    assert (label.sum(1) == 0).any()
    return 1.5 * torch.randn(203, CLASSES, generator=generator) + label - 0.5, label


@pytest.mark.parametrize("loss", ["bce", "focal"])
def test_metrics_of_several_labels_equal_scikit_learns_for_any_batch_size(loss: str) -> None:
    import sklearn.metrics

    names = tuple(one for one in CHOICES if one not in ("calibration_error", "cohen_kappa"))
    several, (logits, label) = composed(names, f"loss={loss}"), draw_several()
    found = compute(several, logits, label, 64)
    again = compute(several, logits, label, 7)
    assert {**found, "loss": 0} == {**again, "loss": 0}
    assert found["loss"] == pytest.approx(again["loss"], rel=1e-7)

    true, probabilities = label.int().numpy(), logits.double().sigmoid().numpy()
    predicted = probabilities > 0.5
    counted = {"f1": sklearn.metrics.f1_score, "precision": sklearn.metrics.precision_score, "recall": sklearn.metrics.recall_score}
    expected = {
        **{name: compared(true, predicted, average="macro", zero_division=0) for name, compared in counted.items()},
        "auroc": sum(sklearn.metrics.roc_auc_score(true[:, k], probabilities[:, k]) for k in range(3)) / CLASSES,  # 0 for the class that is in none
        "average_precision": sum(sklearn.metrics.average_precision_score(true[:, k], probabilities[:, k]) for k in range(3)) / CLASSES,
        "matthews": sklearn.metrics.matthews_corrcoef(true.ravel(), predicted.ravel()),
    }
    assert {name: found[name] for name in names} == pytest.approx(expected, rel=1e-6)

    likeliest = [{k for k in range(CLASSES) if row[k]} or {0} for row in label.tolist()]
    assert found["accuracy"] == sum(int(row.argmax()) in wanted for row, wanted in zip(logits, likeliest, strict=True)) / 203
