"""Test-time augmentation: the mean over versions of an image, against loops over pixels."""

import pytest
import torch
from torch import Tensor, nn

from samewise.recipes.classification import Classification
from samewise.recipes.parts.test_time import views
from samewise.runner.interfaces import Phase


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
