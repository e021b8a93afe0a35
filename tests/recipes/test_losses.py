"""The losses that a config can choose, against their formulas in float64, and in training with micro-batches."""

from __future__ import annotations

import json
import math

import pytest
import torch
from samewise_tiny import DIGITS
from torch import Tensor, nn

from samewise.recipes.classification import Classification
from samewise.recipes.parts.losses import BinaryCrossEntropy, CrossEntropy, Focal, MeanAbsolute, MeanSquared
from samewise.runner.errors import ConfigError, DataError
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


TINY = [*DIGITS, "model.width=4", "max_steps=3"]


WEIGHED = ["loss=cross_entropy", "recipe.loss.weight=[1,2,3,4,5,6,7,8,9,10]"]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["loss=focal"], WEIGHED, ["loss=bce"]])
def test_training_with_a_loss_and_micro_batches_repeats_bit_for_bit(samewise, tmp_path, chosen: list[str]) -> None:
    made = []
    for times in range(2):
        told = samewise("train", *TINY, *chosen, "replicas=2", "accumulate=2", f"run_root={tmp_path / str(times)}", "--json")
        assert told.returncode == 0, told.stderr
        made.append(json.loads(told.stdout.splitlines()[-1]))
    assert made[0]["weights_sha256"] == made[1]["weights_sha256"]
    assert made[0]["metrics"] == made[1]["metrics"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss=cross_entropy", "recipe.loss.weight=[1,2]"], "does not have one number for each class"),
        (["loss=cross_entropy", "recipe.loss.weight=[1,-2]"], "recipe.loss.weight: has a number that is not a valid weight"),
        (["loss=focal", "recipe.loss.alpha=2"], "recipe.loss.alpha: is not a valid weight"),
        (["loss=vocal"], "focal"),
        (["+recipe.loss._target_=torch.nn.CrossEntropyLoss"], "does not give one loss for each image"),
        (["recipe=detection", "loss=focal"], "Detection has no such argument"),
    ],
)
def test_an_impossible_loss_is_refused_with_its_place(samewise, overrides: list[str], said: str) -> None:
    done = samewise("check", *TINY, *overrides)
    assert done.returncode == 2
    assert said in done.stderr + done.stdout


def test_torchs_own_loss_is_accepted_if_it_gives_one_value_for_each_image() -> None:
    own = Classification(loss=nn.CrossEntropyLoss(reduction="none"))
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.tensor([0, 1])}
    model = Fixed(torch.eye(2))
    assert own.loss(model, batch, Phase()).total == Classification().loss(model, batch, Phase()).total
    with pytest.raises(ConfigError, match="one loss for each image"):
        Classification(loss=nn.MSELoss()).loss(model, {**batch, "label": torch.eye(2)}, Phase())


class Own(nn.Module):
    """A loss of a user's, with a link."""

    def __init__(self, link: str) -> None:
        super().__init__()
        self.link = link

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return logits.logsumexp(1)


SEPARATE = {"bce": BinaryCrossEntropy(), "focal": Focal(), "own": Own("sigmoid"), "torch's": nn.MultiLabelSoftMarginLoss(reduction="none")}
TOGETHER = {"none": None, "cross_entropy": CrossEntropy(), "mse": MeanSquared(), "own": Own("softmax"), "torch's": nn.CrossEntropyLoss(reduction="none")}


@pytest.mark.parametrize(("losses", "link"), [(SEPARATE, "sigmoid"), (TOGETHER, "softmax")])
def test_predictions_follow_the_losss_link(losses: dict[str, nn.Module | None], link: str) -> None:
    logits = 4 * torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    logits[2] = -3.0
    expected = torch.sigmoid(logits.double()) if link == "sigmoid" else torch.softmax(logits.double(), 1)
    for loss in losses.values():
        recipe = Classification(loss=loss)
        batch = {"image": torch.zeros(3, 3, 4, 4), "label": torch.zeros(3, dtype=torch.int64), "file": ["a", "b", "c"]}
        assert recipe.gives.count(link) == 1
        with torch.no_grad():
            made = recipe.predict(Fixed(logits), batch)
        for prediction, row, row_logits in zip(made, expected, logits, strict=True):
            found = prediction.values()
            best = row_logits.argsort(descending=True, stable=True)[:5].tolist()
            assert found["label"] == best[0]
            assert found["probabilities"] == pytest.approx({str(k): float(row[k]) for k in best}, rel=1e-5)
            assert len(prediction.rows()) == 1


@pytest.mark.parametrize("loss", [None, CrossEntropy(), nn.CrossEntropyLoss(reduction="none")])
@pytest.mark.parametrize("label", [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [float("nan"), 1.0, 0.0]])
def test_a_cross_entropy_refuses_several_labels_or_none(loss: nn.Module | None, label: list[float]) -> None:
    samples = [(torch.zeros(1, 2, 2), torch.tensor(one)) for one in ([0.33, 0.33, 0.33], label)]
    with pytest.raises(DataError, match=r"dataset: a label's numbers add up to (2|0|nan), (.|\n)*loss=bce"):
        Classification(loss=loss).collate(samples)
    with pytest.raises(DataError, match="add up to"):
        Classification(loss=loss).require({"label": torch.tensor([label])})
    for other in (BinaryCrossEntropy(), Focal(), MeanSquared(), MeanAbsolute()):
        assert len(Classification(loss=other).collate(samples)["label"]) == 2


@pytest.mark.parametrize("loss", [None, MeanSquared()])
def test_labels_of_another_width_than_the_outputs_are_an_error_that_tells_both(loss: nn.Module | None) -> None:
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.eye(2, 5)}
    with pytest.raises(ConfigError, match="a label has 5 numbers, but the model has 3 outputs"):
        Classification(loss=loss).loss(Fixed(torch.zeros(2, 3)), batch, Phase())
