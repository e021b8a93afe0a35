"""MixUp and CutMix: each image is mixed with its neighbour in the batch, and so is its label."""

import abc
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from samewise.datasets.transforms.erasing import inside
from samewise.datasets.transforms.images import chance, image_size, needs_floats, per_sample
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform


class Mixing(BatchTransform):
    """Mixes `image` float32[B, C, H, W] and `label` with those of each sample's `partner`.

    The label, int64[B] or float32[B, K], becomes float32[B, K]. Clips, float32[B, T, C, H, W], are
    mixed frame by frame, all frames alike. The partner is the previous sample, and one draw serves
    the whole micro-batch (each of `accumulate` x `replicas` has its own), as in torchvision's
    references on several GPUs: the order of samples must be random.

    Choices, all [B]: `partner` int64; `pixel` and `label` float64, the sample's own share of pixels
    and of the label; `top`, `left`, `height`, `width` int64, the box of the partner's pixels.

    Args:
        num_classes: K, the number of classes.

    Raises:
        ConfigError: The images are not floating point, or differ in size.
    """

    mixes = True

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    @abc.abstractmethod
    def draw_one(self, height: int, width: int) -> dict[str, float]:
        """Draw `pixel`, `label`, `top`, `left`, `height` and `width` for one batch.

        Args:
            height: Height of the images in pixels.
            width: Width of the images in pixels.
        """

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        drawn = self.draw_one(*image_size(batch))
        choices = {
            name: torch.full(
                (size,), value, dtype=torch.float64 if name in ("pixel", "label") else torch.int64
            )
            for name, value in drawn.items()
        }
        return {"partner": torch.arange(size).roll(1), **choices}

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        images = needs_floats(batch["image"], self)
        partner = choices["partner"].to(images.device, non_blocking=True)
        partners = images.index_select(0, partner)
        if (choices["pixel"] < 1).any():
            mixed = (partners * per_sample(1 - choices["pixel"], images, images.dtype)).add_(
                images * per_sample(choices["pixel"], images, images.dtype)
            )
        else:
            mixed = images
        if choices["height"].any():
            mixed = torch.where(
                inside(
                    images, **{name: choices[name] for name in ("top", "left", "height", "width")}
                ),
                partners,
                mixed,
            )
        soft = self._soften(batch["label"])
        own_share, partner_share = (
            value.to(device=soft.device, dtype=soft.dtype).view(-1, 1)
            for value in (choices["label"], 1 - choices["label"])
        )
        label = soft.index_select(0, partner).mul_(partner_share).add_(soft * own_share)
        return {**batch, "image": mixed, "label": label}

    def _soften(self, label: Tensor) -> Tensor:
        return one_hot(label, self.num_classes).to(torch.float32) if label.dim() == 1 else label


@final
class MixUp(Mixing):
    """Blends both images in the proportion Beta(alpha, alpha).

    Source: Zhang et al. 2017, mixup: Beyond Empirical Risk Minimization, arXiv 1710.09412.

    Args:
        alpha: Parameter of the Beta distribution, greater than 0.
        num_classes: K, the number of classes.

    Raises:
        ConfigError: `alpha` is not greater than 0.
    """

    def __init__(self, alpha: float = 1.0, *, num_classes: int) -> None:
        super().__init__(num_classes=num_classes)
        self.alpha = _positive(alpha)

    def draw_one(self, height: int, width: int) -> dict[str, float]:
        share = _beta(self.alpha)
        return {"pixel": share, "label": share, "top": 0, "left": 0, "height": 0, "width": 0}


@final
class CutMix(Mixing):
    """Pastes a box of the partner over the image.

    The box's share is 1 - Beta(alpha, alpha) before it is cut at the border. Source: Yun et al.
    2019, CutMix, arXiv 1905.04899.

    Args:
        alpha: Parameter of the Beta distribution, greater than 0.
        num_classes: K, the number of classes.

    Raises:
        ConfigError: `alpha` is not greater than 0.
    """

    def __init__(self, alpha: float = 1.0, *, num_classes: int) -> None:
        super().__init__(num_classes=num_classes)
        self.alpha = _positive(alpha)

    def draw_one(self, height: int, width: int) -> dict[str, float]:
        # A box with the share s of the area has the share sqrt(s) of each side
        half = 0.5 * (1.0 - _beta(self.alpha)) ** 0.5
        x, y = int(torch.randint(width, ())), int(torch.randint(height, ()))
        first_column, last_column = max(0, x - int(half * width)), min(width, x + int(half * width))
        first_row, last_row = max(0, y - int(half * height)), min(height, y + int(half * height))
        # The border may have cut the box
        share = 1.0 - (last_column - first_column) * (last_row - first_row) / (width * height)
        return {
            "pixel": 1.0,
            "label": share,
            "top": first_row,
            "left": first_column,
            "height": last_row - first_row,
            "width": last_column - first_column,
        }


@final
class MixUpOrCutMix(Mixing):
    """MixUp or CutMix, drawn for each batch.

    Args:
        mixup_alpha: The `alpha` of MixUp; 0: only CutMix.
        cutmix_alpha: The `alpha` of CutMix; 0: only MixUp.
        p_mixup: Probability of MixUp, if both may be drawn; the rest is CutMix's.
        p: Probability that a batch is mixed at all.
        epochs: Number of epochs in which batches are mixed; None: all.
        num_classes: K, the number of classes.

    Raises:
        ConfigError: An alpha is negative, or a probability is not in [0, 1].
    """

    def __init__(
        self,
        *,
        mixup_alpha: float = 0.2,
        cutmix_alpha: float = 1.0,
        p_mixup: float = 0.5,
        p: float = 1.0,
        epochs: int | None = None,
        num_classes: int,
    ) -> None:
        super().__init__(num_classes=num_classes)
        self.p_mixup, self.p, self.epochs = chance("p_mixup", p_mixup), chance("p", p), epochs
        self.needs_places = epochs is not None
        self.kinds = [
            kind(alpha, num_classes=num_classes)
            for kind, alpha in ((MixUp, mixup_alpha), (CutMix, cutmix_alpha))
            if alpha != 0
        ]

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        mixed = super().apply(batch, choices)
        if self.epochs is None:
            return mixed
        # On the batch's device: to read the epoch here, the host would wait for it
        is_over = batch["place"][:, 0] >= self.epochs
        images = batch["image"]
        return {
            **mixed,
            "image": torch.where(
                is_over.view(-1, *[1] * (images.dim() - 1)), images, mixed["image"]
            ),
            "label": torch.where(is_over.view(-1, 1), self._soften(batch["label"]), mixed["label"]),
        }

    def draw_one(self, height: int, width: int) -> dict[str, float]:
        # Without a draw where nothing is to be chosen: the bits of earlier versions
        if not self.kinds or (self.p < 1 and float(torch.rand(())) >= self.p):
            return {"pixel": 1.0, "label": 1.0, "top": 0, "left": 0, "height": 0, "width": 0}
        first, last = self.kinds[0], self.kinds[-1]
        chosen = first if first is last or float(torch.rand(())) < self.p_mixup else last
        return chosen.draw_one(height, width)


_SMALLEST_ALPHA = 0.01
"""Smallest alpha for which torch's Dirichlet draws from the right distribution."""


def _positive(alpha: float) -> float:
    """Return alpha; a ConfigError unless it is greater than 0."""
    ConfigError.raise_if(
        alpha <= 0, "transforms", "alpha must be greater than 0", alpha, "a number greater than 0"
    )
    return float(alpha)


def _beta(alpha: float) -> float:
    """Draw from Beta(alpha, alpha) with the CPU's default generator."""
    concentration = torch.full((2,), alpha, dtype=torch.float64)
    if alpha >= _SMALLEST_ALPHA:
        return float(torch.distributions.Dirichlet(concentration).sample()[0])
    # Both gammas would underflow, and their ratio would be a half. With U uniform, gamma(alpha) is
    # distributed as gamma(alpha + 1) U ** (1 / alpha).
    log_grown = (
        torch.distributions.Gamma(concentration + 1.0, torch.ones_like(concentration))
        .sample()
        .log()
    )
    log_gamma, other_log_gamma = (
        log_grown + torch.rand(2, dtype=torch.float64).log() / concentration
    )
    return float(torch.sigmoid(log_gamma - other_log_gamma))
