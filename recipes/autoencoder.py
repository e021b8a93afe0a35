"""Autoencoders: images to themselves, through a code; variational, if the model is."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.labelled_images import as_record, collate_images
from samewise.recipes.parts.losses import MeanSquared, is_sigmoid, of_samples
from samewise.recipes.parts.pictures import save_image_grid
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, Form, Loss, Phase, Prediction, Recipe, Scores

_SHOWN = 32
"""Number of a split's images that are drawn beside their reconstructions."""


@final
class Autoencoding(Recipe):
    """Training of an autoencoder; batches are `{"image": float32[B, C, H, W]}`; labels are ignored.

    The model returns images of the same shape; a variational one also each image's divergence in
    nats, float32[B], which is added to its loss. With a method `encode(image)` it also gives codes
    float32[B, K] to predictions and exports.

    Args:
        channels: Channels of the images that `predict` reads: 1 is grey, 3 colour.
        image_size: Height and width to which it resizes them; None: as they are.
        peak: Largest difference of two pixels, for the signal-to-noise ratio: 1 for pixels in [0,
            1].
        loss: A module from outputs and pixels, float32[B, C H W], to each image's loss, float[B]
            (`parts.losses`); None: the mean squared error. With the link `sigmoid`, outputs are
            logits of pixels in [0, 1].
    """

    gives = "the reconstruction of each image, on the scale of the input"
    takes = "images"
    extensions = IMAGES

    def __init__(
        self,
        *,
        channels: int = 3,
        image_size: int | None = None,
        peak: float = 1.0,
        loss: nn.Module | None = None,
    ) -> None:
        self.channels, self.image_size, self.peak = channels, image_size, peak
        self.criterion, self._is_sigmoid = loss or MeanSquared(), is_sigmoid(loss)

    def collate(self, samples: Sequence[Any]) -> Batch:
        return {"image": collate_images([as_record(sample)["image"] for sample in samples])}

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the loss summed over the B images; its part `divergence`, if the model has one."""
        losses, parts, _ = self._reconstruct(model, batch["image"])
        return Loss(losses.sum(), count=len(losses), parts=parts)

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return each image's loss and squared error, and the first images with their outputs."""
        losses, _, outputs = self._reconstruct(model, batch["image"])
        pairs = torch.stack([batch["image"], outputs], 1)[:_SHOWN].float()
        return losses.cpu(), _mse(batch["image"], outputs), pairs.cpu()

    def scores(self, dataset: Any) -> Scores:
        return AutoencoderScores(peak=self.peak)

    def read(self, file: Path) -> dict[str, Any]:
        """Read an image, with a placeholder label."""
        image = read_image(file, mode="gray" if self.channels == 1 else "rgb")
        if self.image_size is not None:
            image = functional.resize(image, [self.image_size] * 2, antialias=True)
        return {"image": image, "label": 0}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        images = batch["image"]
        _, _, outputs = self._reconstruct(model, images)
        codes = model.encode(images) if hasattr(model, "encode") else images.new_empty(0)  # pyright: ignore[reportCallIssue]
        pairs = torch.stack([images, outputs], 1).float().cpu()
        errors = _mse(images, outputs).tolist()
        return [
            Reconstruction(pair, error, codes[place : place + 1].flatten().tolist(), self.peak)
            for place, (pair, error) in enumerate(zip(pairs, errors, strict=True))
        ]

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """Return the form for images, which returns reconstructions and codes."""

        def call(model: Any, image: Tensor) -> dict[str, Tensor]:
            # Without the loss, whose autocast torch.export cannot run
            outputs, _ = self._outputs(model, image)
            return {
                "reconstruction": outputs.sigmoid() if self._is_sigmoid else outputs,
                "code": model.encode(image),
            }

        return {"": Form(call, {"image": batch["image"]})} if hasattr(model, "encode") else {}

    def _reconstruct(
        self, model: nn.Module, images: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return each image's loss float32[B], its parts' sums, and the reconstructions."""
        outputs, divergence = self._outputs(model, images)
        losses, parts = of_samples(self.criterion, outputs.flatten(1), images.flatten(1)), {}
        if divergence is not None:
            losses, parts = losses + divergence, {"divergence": divergence.sum().detach()}
        return losses, parts, outputs.sigmoid() if self._is_sigmoid else outputs

    def _outputs(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the model's images of at least float32, and the divergences if it has them."""
        output = model(images)
        outputs, divergence = output if isinstance(output, tuple) else (output, None)
        if not isinstance(outputs, Tensor) or outputs.shape != images.shape:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return images",
                    form_of(outputs),
                    f"a tensor {list(images.shape)}",
                    "an image_size that is a multiple of 2 for each of model.widths",
                )
            )
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)), divergence


@final
class AutoencoderScores(Scores):
    """Scores of an autoencoder: the same bits however the split is cut into batches.

    Args:
        peak: As in the recipe.
    """

    def __init__(self, *, peak: float) -> None:
        self._peak = peak
        self._losses, self._errors, self._pairs = list[float](), list[float](), list[Tensor]()

    def add(self, measured: tuple[Tensor, Tensor, Tensor]) -> None:
        losses, errors, pairs = measured
        self._losses += losses.tolist()
        self._errors += errors.tolist()
        self._pairs += pairs[: _SHOWN - len(self._pairs)]

    def compute(self) -> dict[str, float]:
        """Return the means of `loss`, `mse` and `psnr` (in dB) over the images."""
        values = {
            "loss": self._losses,
            "mse": self._errors,
            "psnr": [_psnr(x, self._peak) for x in self._errors],
        }
        return {name: math.fsum(x) / len(x) for name, x in values.items()}

    def save_pictures(self, folder: Path) -> None:
        """Write `reconstructions.png`: images, each followed by its reconstruction."""
        save_image_grid(folder / "reconstructions.png", torch.cat(self._pairs))


@final
class Reconstruction(Prediction):
    """The reconstruction of an image, and its code.

    Args:
        pair: float32[2, C, H, W], the image and its reconstruction.
        mse: The mean squared error over the pixels.
        code: The numbers of the code, or none.
        peak: As in the recipe.
    """

    def __init__(self, pair: Tensor, mse: float, code: Sequence[float], peak: float) -> None:
        self.pair, self.mse, self.code, self._peak = pair, mse, list(code), peak

    def values(self) -> dict[str, Any]:
        return {"mse": self.mse, "psnr": _psnr(self.mse, self._peak), "code": self.code}

    def rows(self) -> list[dict[str, Any]]:
        codes = {f"code_{number}": value for number, value in enumerate(self.code)}
        return [{"mse": self.mse, "psnr": _psnr(self.mse, self._peak), **codes}]

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_reconstruction.png`: the image and its reconstruction."""
        path = folder / f"{name}_reconstruction.png"
        save_image_grid(path, self.pair, columns=2, side=256)
        return [path]


def _mse(images: Tensor, outputs: Tensor) -> Tensor:
    return (images - outputs).float().square().flatten(1).mean(1).cpu()


def _psnr(mse: float, peak: float) -> float:
    return 10.0 * math.log10(peak**2 / mse) if mse else math.inf
