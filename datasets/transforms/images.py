"""Base of image transforms: the keys that they change, and checks of their arguments."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, BatchTransform


def map_images(batch: Batch, keys: Sequence[str], change: Callable[[Tensor], Any]) -> Batch:
    """Return a batch with `change` applied to the values at `keys`; other values are shared."""
    return {name: change(value) if name in keys else value for name, value in batch.items()}


class ImageTransform(BatchTransform):
    """A transform of `image` that leaves every other key as it is.

    The images are uint8 or float32[B, C, H, W], or a list of B images [C, H, W] of different sizes.
    Clips, [B, T, C, H, W] or a list of B clips [T, C, H, W], have one choice each, the same for all
    frames. A list stays a list unless the transform gives one size (`gives_one_size`).

    Raises:
        ConfigError: The transform moves pixels, and the batch has boxes or masks that it does not
            move.
    """

    keys: Sequence[str] = ("image",)
    moves_pixels = False
    """Whether pixels change their places, so that boxes would no longer fit."""
    gives_one_size = False
    """Whether images of several sizes become one tensor."""

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        if self.moves_pixels and "boxes" in batch:
            name, hint = (
                type(self).__name__,
                "the transforms in samewise.datasets.transforms.detection move both",
            )
            raise ConfigError(
                Problem("transforms", f"{name} would move the image but not its boxes", hint=hint)
            )
        if self.moves_pixels and (moved := _as_large(batch, self.keys)):
            raise ConfigError(
                Problem(
                    "transforms",
                    f"{type(self).__name__} would move the image but not "
                    f"{', '.join(moved)}, of the same size",
                    hint="give samples torchvision's tv_tensors.Image and tv_tensors.Mask, which "
                    "transforms.train.sample moves together",
                )
            )
        return map_images(batch, self.keys, lambda images: self._change_all(images, choices))

    def _change_all(
        self, images: Tensor | list[Tensor], choices: dict[str, Tensor]
    ) -> Tensor | list[Tensor]:
        if isinstance(images, Tensor):
            return self._change_frames(images, choices)
        choices_by_image = (
            {name: values[place : place + 1] for name, values in choices.items()}
            for place in range(len(images))
        )
        changed = [
            self._change_frames(image[None], image_choices)[0]
            for image, image_choices in zip(images, choices_by_image, strict=True)
        ]
        return (
            torch.stack(changed)
            if self.gives_one_size and len({image.shape for image in changed}) == 1
            else changed
        )

    def _change_frames(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        if images.dim() < 5:
            return self.change(images, choices)
        frame_choices = {
            name: values.repeat_interleave(images.shape[1], dim=0)
            for name, values in choices.items()
        }
        return self.change(images.flatten(0, 1), frame_choices).unflatten(0, images.shape[:2])

    @abc.abstractmethod
    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        """Return the changed images without modifying the input.

        Args:
            images: uint8 or float32[B, C, H, W].
            choices: Tensors [B, ...] from `draw`, on the CPU.
        """


def _as_large(batch: Batch, keys: Sequence[str]) -> list[str]:
    """Return the entries of a batch, such as masks, that are as high and wide as its images."""

    def size(value: Any) -> tuple[int, ...] | None:
        """Return a value's height and width; None if it has none."""
        # Reading a tensor's length would fix the batch's size in an exported program
        if isinstance(value, Tensor):
            return tuple(value.shape[-2:]) if value.dim() > 2 else None
        element = value[0] if isinstance(value, list) and value else None
        return (
            tuple(element.shape[-2:]) if isinstance(element, Tensor) and element.dim() > 1 else None
        )

    image = size(batch.get("image"))
    return [
        name
        for name, value in batch.items()
        if name not in keys and image is not None and size(value) == image
    ]


def image_size(batch: Batch) -> tuple[int, int]:
    """Return (H, W) of the batch's images.

    Raises:
        ConfigError: The images differ in size.
    """
    if not isinstance(batch["image"], Tensor):
        sizes = sorted({tuple(image.shape[-2:]) for image in batch["image"]})
        raise ConfigError(
            Problem(
                "transforms",
                "the images of a batch differ in size",
                str(sizes[:4]),
                "images of one size",
                "to make them one size, put RandomResizedCrop, CenterCrop, or Resize with a height "
                "and a width, before it",
            )
        )
    return batch["image"].shape[-2], batch["image"].shape[-1]


def image_sizes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return heights and widths, int64[B] each, of images that may differ in size."""
    images = batch["image"]
    sizes = (
        [tuple(images.shape[-2:])] * len(images)
        if isinstance(images, Tensor)
        else [tuple(image.shape[-2:]) for image in images]
    )
    heights, widths = torch.tensor(sizes).unbind(1)
    return heights, widths


def per_sample(values: Tensor, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Reshape [B] to [B, 1, 1, 1] on the images' device, or [B, 1, 1, 1, 1] for clips."""
    return values.to(device=images.device, dtype=dtype or values.dtype, non_blocking=True).view(
        -1, *[1] * (images.dim() - 1)
    )


def uniform(size: int, low: float, high: float) -> Tensor:
    """Draw float64[size] from [low, high) with the CPU's default generator."""
    return torch.rand(size, dtype=torch.float64) * (high - low) + low


def integers(ends: Tensor) -> Tensor:
    """Draw int64 of the shape of `ends`, each from 0 to its end - 1."""
    return (torch.rand(ends.shape, dtype=torch.float64) * ends).long()


def chance(name: str, value: float) -> float:
    """Return a probability; a ConfigError if it is not from 0 to 1."""
    ConfigError.raise_if(
        not 0.0 <= value <= 1.0, name, "is not a valid probability", value, "a number from 0 to 1"
    )
    return float(value)


def pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) from one number for both, or from two.

    Raises:
        ConfigError: The value is not a valid size.
    """
    numbers = (value, value) if isinstance(value, int) else tuple(value)
    ConfigError.raise_if(
        len(numbers) != 2 or min(numbers) < 1,
        name,
        "is not a valid size",
        value,
        "one whole number of pixels, at least 1, or [height, width]",
    )
    return numbers


def interval(
    name: str, value: Sequence[float], *, low: float = float("-inf")
) -> tuple[float, float]:
    """Return an interval as (low, high).

    Raises:
        ConfigError: The value is not a valid interval, or starts below `low`.
    """
    numbers = tuple(float(number) for number in value)
    ConfigError.raise_if(
        len(numbers) != 2 or not low <= numbers[0] <= numbers[1],
        name,
        "is not a valid interval",
        list(value),
        "[low, high]",
    )
    return numbers


def needs_colours(images: Tensor, transform: object) -> Tensor:
    """Return the images; a ConfigError unless they have 1 or 3 channels."""
    name = type(transform).__name__
    if images.shape[-3] not in (1, 3):
        raise ConfigError(
            Problem(
                "transforms",
                f"{name} works on images with 1 or 3 channels",
                images.shape[-3],
                hint=f"leave {name} out: colours are not defined for other channels",
            )
        )
    return images


def needs_bytes(images: Tensor, transform: object) -> Tensor:
    """Return the images; a ConfigError unless they are uint8 with 1 or 3 channels."""
    name = type(transform).__name__
    if needs_colours(images, transform).dtype != torch.uint8:
        raise ConfigError(
            Problem(
                "transforms",
                f"{name} works on uint8 images",
                str(images.dtype),
                hint=f"put {name} before ToFloat",
            )
        )
    return images


def needs_floats(images: Tensor, transform: object) -> Tensor:
    """Return the images; a ConfigError unless they are floating point."""
    name = type(transform).__name__
    if not images.is_floating_point():
        raise ConfigError(
            Problem(
                "transforms",
                f"{name} works on floating-point images",
                str(images.dtype),
                hint=f"put {name} after ToFloat",
            )
        )
    return images
