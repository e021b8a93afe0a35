"""Image generation with a GAN: a generator and a discriminator, each with its own optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samewise.recipes.parts import pictures
from samewise.runner.errors import DataError, require_at_least
from samewise.runner.interfaces import Batch, Loss, Phase, Recipe, Scores

LossName = Literal["non_saturating", "hinge", "least_squares", "wasserstein"]

_DISCRIMINATOR = Phase("discriminator", modules=("discriminator",))
_GENERATOR = Phase("generator", modules=("generator",))
# By name: the discriminator's loss of real and of fake logits, and the generator's of fake ones
_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "non_saturating": (lambda x: F.softplus(-x), F.softplus, lambda x: F.softplus(-x)),
    "hinge": (lambda x: F.relu(1 - x), lambda x: F.relu(1 + x), torch.neg),
    "least_squares": (lambda x: (x - 1).square(), torch.square, lambda x: (x - 1).square()),
    "wasserstein": (torch.neg, torch.positive, torch.neg),
}


@dataclass(frozen=True)
class MeasuredAdversarial:
    """Measurements of one evaluation batch of B images, on the CPU.

    Args:
        real: bool[B], whether the discriminator takes each real image for real.
        fake: bool[B], whether it takes each generated image for real.
        images: float32[B, C, H, W], the real images as the model reads them.
        generated: float32[B, C, H, W].
    """

    real: Tensor
    fake: Tensor
    images: Tensor
    generated: Tensor


@final
class GenerativeAdversarial(Recipe):
    """Training of a GAN; batches are `{"image": float32[B, C, H, W] in [-1, 1]}`.

    Other entries of an image data set are ignored.

    A step first trains the discriminator D on the batch and on as many generated images, then the
    generator G against it, with noise of its own. With D's logits, the sums over the batch are

    - "non_saturating" (Goodfellow et al. 2014, arXiv 1406.2661, section 3): D: softplus(-D(x)) +
      softplus(D(G(z))); G: softplus(-D(G(z)))
    - "hinge" (Lim, Ye 2017, arXiv 1705.02894): D: max(0, 1 - D(x)) + max(0, 1 + D(G(z))); G:
      -D(G(z))
    - "least_squares" (Mao et al. 2016, arXiv 1611.04076): D: (D(x) - 1)^2 + D(G(z))^2; G: (D(G(z))
      - 1)^2
    - "wasserstein" (Gulrajani et al. 2017, arXiv 1704.00028): D: D(G(z)) - D(x) + 10 (|grad D(y)| -
      1)^2, y being at a random place between an image x and a generated one; G: -D(G(z))

    The model has the parts `generator` and `discriminator`. Called with noise and images, it
    returns D's logits of the images and of the generated ones, as
    `samewise.recipes.models.dcgan.DCGAN` does.

    Args:
        noise: Length of the noise vector, float32[B, noise] from N(0, 1).
        loss: "non_saturating" (binary cross-entropy), "hinge", "least_squares" or "wasserstein".
        compared: Number of real and of generated images that the energy distance compares, the
            first of the split.

    Raises:
        ConfigError: `noise` is less than 1, or `compared` less than 2.
    """

    gives = "images made of noise, with numbers from -1 to 1"

    def __init__(
        self, *, noise: int = 64, loss: LossName = "non_saturating", compared: int = 1024
    ) -> None:
        require_at_least({"recipe.noise": noise})
        require_at_least({"recipe.compared": compared}, least=2)
        self.noise = noise
        self.kind: LossName = loss
        self.compared = compared

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (_DISCRIMINATOR, _GENERATOR)

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the phase's loss: sums over the B images, in float32 for any precision.

        The discriminator's loss has the parts `real`, `fake` and, if Wasserstein's, `penalty`.
        """
        images = batch["image"]
        noise = self._noise(images)
        of_real, of_fake, of_generator = _LOSSES[self.kind]
        if phase.name == _GENERATOR.name:
            _, fake = model(noise)
            return Loss(of_generator(fake.float()).sum(), count=len(images))
        # In its phase, only the discriminator accumulates gradients
        real, fake = model(noise, images)
        parts = {"real": of_real(real.float()).sum(), "fake": of_fake(fake.float()).sum()}
        total = parts["real"] + parts["fake"]
        if self.kind == "wasserstein":
            parts["penalty"] = self._penalty(getattr(model, "module", model), images, noise)
            total = total + parts["penalty"]
        return Loss(
            total,
            count=len(images),
            parts={name: part.detach() for name, part in parts.items()},
        )

    def measure(self, model: Any, batch: Batch) -> MeasuredAdversarial:
        images = batch["image"]
        generated = model.generator(self._noise(images))
        real, fake = (model.discriminator(x) > 0 for x in (images, generated))
        return MeasuredAdversarial(
            real=real.cpu(),
            fake=fake.cpu(),
            images=images.float().cpu(),
            generated=generated.float().cpu(),
        )

    def scores(self, dataset: Any) -> Scores:
        return AdversarialScores(compared=self.compared)

    def _noise(self, images: Tensor) -> Tensor:
        """Draw float32[B, noise] from the runner's stream."""
        # On the CPU, so that every device gets the same numbers
        return torch.randn(len(images), self.noise).to(images.device, non_blocking=True)

    def _penalty(self, model: Any, images: Tensor, noise: Tensor) -> Tensor:
        """Return ten times (|grad D(y)| - 1)^2, summed over images y between real and generated."""
        with torch.enable_grad():
            share = torch.rand(len(images), 1, 1, 1).to(images.device, non_blocking=True)
            between = torch.lerp(model.generator(noise).detach(), images, share).requires_grad_()
            (slope,) = torch.autograd.grad(
                model.discriminator(between).sum(), between, create_graph=True
            )
        return 10.0 * (slope.flatten(1).norm(dim=1) - 1.0).square().sum()


@final
class AdversarialScores(Scores):
    """Accuracy of the discriminator on unseen images, and distance of generated images from them.

    Args:
        compared: Number of real and of generated images that the energy distance compares.
    """

    def __init__(self, *, compared: int = 1024) -> None:
        self.compared = compared
        self.count = 0
        self._right = {"real": 0, "fake": 0}
        self._compared: dict[str, list[Tensor]] = {"real": [], "fake": []}

    def add(self, measured: MeasuredAdversarial) -> None:
        # The images compared are the first of the split, in any batches
        room = max(self.compared - self.count, 0)
        self._right["real"] += int(measured.real.sum())
        self._right["fake"] += int((~measured.fake).sum())
        self._compared["real"].append(measured.images[:room])
        self._compared["fake"].append(measured.generated[:room])
        self.count += len(measured.real)

    def compute(self) -> dict[str, float]:
        """Return `energy_distance` on the images' scale, `real_accuracy` and `fake_accuracy`.

        The accuracies are the discriminator's.

        Raises:
            DataError: The evaluated split has fewer than two images.
        """
        if self.count < 2:
            raise DataError("the evaluated split has fewer than two images")
        return {
            "energy_distance": energy_distance(
                torch.cat(self._compared["real"]), torch.cat(self._compared["fake"])
            ),
            "real_accuracy": self._right["real"] / self.count,
            "fake_accuracy": self._right["fake"] / self.count,
        }

    def save_pictures(self, folder: Path) -> None:
        """Write `generated.png` and, for comparison, `real.png`: sheets of the first 64 images."""
        for name, key in (("generated", "fake"), ("real", "real")):
            pictures.save_image_grid(folder / f"{name}.png", torch.cat(self._compared[key])[:64])


def energy_distance(first: Tensor, second: Tensor) -> float:
    """Return the unbiased 2 E|X - Y| - E|X - X'| - E|Y - Y'| of two samples.

    Source: Székely, Rizzo 2013, Energy statistics, https://doi.org/10.1016/j.jspi.2013.03.018. Its
    mean is 0 if and only if both samples come from one distribution; it needs no network and no
    parameter. |.| is the root mean square over an image's pixels, so the unit is a pixel's.

    Args:
        first: float[N, ...], N at least 2.
        second: float[M, ...], M at least 2.
    """
    x, y = (sample.flatten(1).double() for sample in (first, second))
    across, within_x, within_y = (
        _distances(x, y).mean(),
        *(
            _distances(sample, sample).sum() / (len(sample) * (len(sample) - 1))
            for sample in (x, y)
        ),
    )
    return float(2 * across - within_x - within_y) / x.shape[1] ** 0.5


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances of all pairs of rows, float64[N, M]."""
    # With a matrix product, equal rows would not have distance zero
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
