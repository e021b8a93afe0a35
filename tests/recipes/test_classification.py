"""The classification recipe against independent computations of what it documents."""

import math
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from samewise_tiny import DIGITS
from torch import Tensor, nn

from samewise import load
from samewise.datasets.transforms.numeric import ToFloat
from samewise.recipes.classification import Classification
from samewise.recipes.parts.labelled_images import as_tensor
from samewise.recipes.parts.losses import BinaryCrossEntropy
from samewise.recipes.parts.test_time import views
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step


class Fixed(nn.Module):
    """Returns the logits that it was made with, whatever the images are."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, image: Tensor) -> Tensor:
        return self.logits[: len(image)]


def draw(samples: int = 40, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator) * 3
    return torch.rand(samples, 3, 12, 12, generator=generator), torch.randint(classes, (samples,), generator=generator), logits


@pytest.mark.parametrize("form", [np.uint16, np.int32])
def test_images_of_16_bits_are_scaled_not_clipped(form: type):
    numbers = np.linspace(0, 65535, 64).reshape(8, 8).astype(form)
    batch = {"image": as_tensor(Image.fromarray(numbers))[None]}
    assert torch.allclose(ToFloat()(batch)["image"][0, 0].double(), torch.from_numpy(numbers / 65535), atol=1e-6)


def test_the_loss_is_float32_under_autocast():
    images, labels, _ = draw()
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images).dtype == torch.bfloat16
        loss = Classification().loss(model, {"image": images, "label": labels}, Phase())
        measured = Classification().measure(model, {"image": images, "label": labels})
    assert loss.total.dtype == torch.float32
    assert measured.loss.dtype == measured.confidence.dtype == torch.float32


def score(logits: Tensor, labels: Tensor, images: Tensor, batch: int, **options: object):
    recipe = Classification(**options)
    scores = recipe.scores(None)
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        with torch.no_grad():
            scores.add(recipe.measure(Fixed(logits[part]), {"image": images[part], "label": labels[part]}))
    return scores


def test_equal_logits_are_ranked_by_class_number_and_top_1_agrees_with_the_prediction():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    measured = Classification().measure(Fixed(logits), {"image": torch.zeros(3, 1, 4, 4), "label": torch.tensor([1, 1, 2])})
    assert measured.rank.tolist() == [1, 0, 2]
    assert ((measured.rank == 0) == (measured.prediction == measured.label)).all()


def test_a_model_that_outputs_nan_is_never_counted_as_right():
    images, labels, logits = draw()
    told = score(torch.full_like(logits, math.nan), labels, images, 8).compute()
    assert told["accuracy_top5"] == 0
    assert math.isnan(told["loss"])


def test_images_of_different_sizes_are_reported_with_sizes_and_remedy():
    with pytest.raises(DataError) as caught:
        Classification().collate([(torch.zeros(3, 32, 32), 0), (torch.zeros(3, 40, 32), 1), (torch.zeros(3, 32, 32), 1)])
    assert "3x32x32, 3x40x32" in str(caught.value)
    assert "transforms=imagenet" in str(caught.value)


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_out_of_range_is_named_when_it_is_loaded(label: int):
    samples = [(torch.zeros(1, 2, 2), value) for value in (0, 9, label)]
    with pytest.raises(DataError) as caught:
        Classification(num_classes=10).collate(samples)
    assert "there are 10 classes" in str(caught.value)
    assert str(label) in str(caught.value)
    assert "0 to 9" in str(caught.value)


@pytest.mark.parametrize(
    "sample", [{"picture": 1, "label": 2}, (1, 2, 3), "text", (torch.zeros(2, 3, 4, 5, 6), 0), (object(), 0), (torch.zeros(1, 2, 2), "cat")]
)
def test_a_malformed_sample_is_a_clear_error(sample: object):
    with pytest.raises(DataError, match="dataset: "):
        Classification().collate([sample])


class Places(nn.Module):
    """Logits that depend on where things are in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 6 * 6, 4).requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(image.flatten(1)).tanh()


def shift(image: Tensor, by: int) -> Tensor:
    """Shift the image: each pixel comes from `by` rows and columns further on, mirrored at the edges."""
    height, width = image.shape[-2:]
    made = torch.empty_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = (abs(place + by) if place + by < end else 2 * (end - 1) - (place + by) for place, end in ((y, height), (x, width)))
            made[..., y, x] = image[..., from_y, from_x]
    return made


@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (2, 3, 2, 6, 5)])
def test_the_views_are_the_image_flipped_and_shifted(shape: tuple[int, ...]):
    images = torch.randn(shape)
    expected = [(0.25, images), (0.25, images.flip(-1))]
    expected += [(0.125, one) for by in (-1, 1) for one in (shift(images, by), shift(images, by).flip(-1))]
    made = views(images, "flip_and_translate")
    assert sum(weight for weight, _ in made) == 1.0
    assert [weight for weight, _ in made] == [weight for weight, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(made, expected, strict=True))


@pytest.mark.parametrize("kind", ["none", "flip", "flip_and_translate"])
def test_evaluation_and_prediction_average_the_logits_but_training_does_not(kind: str):
    torch.manual_seed(0)
    model, batch = Places(), {"image": torch.randn(5, 3, 6, 6), "label": torch.arange(5) % 4, "file": [""] * 5}
    recipe, plain = Classification(num_classes=4, test_time_augmentation=kind), Classification(num_classes=4)
    logits = sum(weight * model(image) for weight, image in views(batch["image"], kind))
    assert isinstance(logits, Tensor)
    measured = recipe.measure(model, batch)
    assert torch.allclose(measured.loss, nn.functional.cross_entropy(logits, batch["label"], reduction="none"))
    assert torch.equal(measured.prediction, logits.argmax(1))
    probabilities = recipe.predict(model, batch)[0].values()["probabilities"]
    assert probabilities == pytest.approx({str(place): float(one) for place, one in enumerate(logits[0].softmax(0))}, rel=1e-5)
    assert torch.equal(recipe.loss(model, batch, Phase()).total, plain.loss(model, batch, Phase()).total)


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
