"""The losses that a config can choose, against their formulas in float64, and in training with micro-batches."""

import math

import pytest
import torch
from torch import Tensor, nn

from samewise.recipes.classification import Classification
from samewise.recipes.parts.losses import BinaryCrossEntropy, CrossEntropy, Focal, Huber, MeanAbsolute, MeanSquared
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Phase

WEIGHTS = [0.5, 1.0, 2.0, 0.25]


class Fixed(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, image: Tensor) -> Tensor:
        return self.logits


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def cross_entropy(row: list[float], wanted: list[float]) -> float:
    normaliser = math.log(sum(math.exp(value) for value in row))
    return -sum(weight * share * (value - normaliser) for weight, share, value in zip(WEIGHTS, wanted, row, strict=True))


def bce(row: list[float], wanted: list[float]) -> float:
    return -sum(w * t * math.log(sigmoid(x)) + (1 - t) * math.log(1 - sigmoid(x)) for w, t, x in zip(WEIGHTS, wanted, row, strict=True))


def focal(row: list[float], wanted: list[float], *, alpha: float = 0.3, gamma: float = 1.5) -> float:
    total = 0.0
    for x, t in zip(row, wanted, strict=True):
        p = sigmoid(x)
        p_t, alpha_t = p * t + (1 - p) * (1 - t), alpha * t + (1 - alpha) * (1 - t)
        total -= alpha_t * (1 - p_t) ** gamma * (t * math.log(p) + (1 - t) * math.log(1 - p))
    return total


def mean_of(measure):
    return lambda row, wanted: sum(measure(x - t) for x, t in zip(row, wanted, strict=True)) / len(row)


CASES = {
    "cross_entropy": (CrossEntropy(weight=WEIGHTS), cross_entropy),
    "bce": (BinaryCrossEntropy(positive_weight=WEIGHTS), bce),
    "focal": (Focal(alpha=0.3, gamma=1.5), focal),
    "mse": (MeanSquared(), mean_of(lambda d: d * d)),
    "l1": (MeanAbsolute(), mean_of(abs)),
    "huber": (Huber(delta=0.7), mean_of(lambda d: d * d / 2 if abs(d) < 0.7 else 0.7 * (abs(d) - 0.35))),
}


@pytest.mark.parametrize("several", [False, True], ids=["classes", "several labels"])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_equal_the_formula_for_each_image(name: str, several: bool) -> None:
    criterion, formula = CASES[name]
    generator = torch.Generator().manual_seed(3)
    logits, classes = 2 * torch.randn(9, 4, generator=generator), torch.randint(4, (9,), generator=generator)
    label = torch.rand(9, 4, generator=generator).round() if several else classes
    wanted = (label if several else nn.functional.one_hot(classes, 4)).double().tolist()
    model, recipe = Fixed(logits), Classification(num_classes=4, loss=criterion)
    loss = recipe.loss(model, {"image": torch.zeros(9, 3, 4, 4), "label": label}, Phase())
    expected = [formula(row, shares) for row, shares in zip(logits.double().tolist(), wanted, strict=True)]
    assert loss.count == 9
    assert loss.total.item() == pytest.approx(sum(expected), rel=1e-5)
    loss.total.backward()
    for row, column in ((0, 0), (4, 2), (8, 3)):
        shifted = [logits.double().tolist()[row] for _ in range(2)]
        shifted[0][column] += 1e-6
        shifted[1][column] -= 1e-6
        slope = (formula(shifted[0], wanted[row]) - formula(shifted[1], wanted[row])) / 2e-6
        assert float(model.logits.grad[row, column]) == pytest.approx(slope, rel=1e-3, abs=1e-6)
    measured = recipe.measure(model.eval(), {"image": torch.zeros(9, 3, 4, 4), "label": label})
    assert measured.loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_labels_are_smoothed_only_in_training_and_alike_for_every_loss() -> None:
    logits, batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), {"image": torch.zeros(6, 3, 4, 4), "label": torch.tensor([0, 1, 2, 3, 0, 1])}
    smooth = 0.8 * nn.functional.one_hot(batch["label"], 4) + 0.05
    for criterion in (CrossEntropy(), Focal(), BinaryCrossEntropy(), MeanSquared(), MeanAbsolute()):
        recipe, model = Classification(loss=criterion, label_smoothing=0.2), Fixed(logits)
        torch.testing.assert_close(recipe.loss(model, batch, Phase()).total, criterion(model.logits, smooth).sum())
        torch.testing.assert_close(recipe.measure(model, batch).loss, criterion(logits, batch["label"]))
    chosen, plain = (Classification(loss=loss, label_smoothing=0.2).loss(model, batch, Phase()).total for loss in (CrossEntropy(), None))
    torch.testing.assert_close(chosen, plain)


def test_torchs_own_loss_is_accepted_if_it_gives_one_value_for_each_image() -> None:
    own = Classification(loss=nn.CrossEntropyLoss(reduction="none"))
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.tensor([0, 1])}
    model = Fixed(torch.eye(2))
    assert own.loss(model, batch, Phase()).total == Classification().loss(model, batch, Phase()).total
    with pytest.raises(ConfigError, match="one loss for each sample"):
        Classification(loss=nn.MSELoss()).loss(model, {**batch, "label": torch.eye(2)}, Phase())
