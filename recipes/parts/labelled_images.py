"""Converts the samples of labelled image data sets to tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samewise.datasets.parts.encoded import EncodedImages
from samewise.recipes.parts.forms import form_of
from samewise.runner.errors import DataError, Problem, first_few


def as_record(sample: Any, entry: str = "image") -> Mapping[str, Any]:
    """Return a sample, a dict or a pair, as a dict with `image`, or another entry, and `label`.

    Raises:
        DataError: The sample is neither.
    """
    # Whether a sample is a mapping takes longer to check
    if type(sample) is tuple and len(sample) == 2:
        return {entry: sample[0], "label": sample[1]}
    if isinstance(sample, Mapping) and entry in sample and "label" in sample:
        return sample
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return {entry: sample[0], "label": sample[1]}
    raise DataError(
        Problem(
            "dataset",
            f"a sample is not {'an image' if entry == 'image' else entry} and its label",
            form_of(sample),
            f"a dict with `{entry}` and `label`, or a pair ({entry}, label)",
        )
    )


def as_tensor(image: Any) -> Tensor:
    """Return a tensor[C, H, W], clip[T, C, H, W] or vector[F] unchanged, others as uint8[C, H, W].

    Other images are PIL images and arrays[H, W] or [H, W, C].

    Raises:
        DataError: The image is something else.
    """
    if type(image) is Tensor and image.dim() in (1, 3, 4):
        return image
    if isinstance(image, Tensor):
        # A tv_tensors.Image: the subclass would slow down every further operation
        image = image.as_subclass(Tensor)
        if image.dim() in (2, 3):
            return image.reshape(-1, *image.shape[-2:])
        raise DataError(
            Problem(
                "dataset",
                "an image tensor has the wrong shape",
                list(image.shape),
                "[channels, height, width]",
            )
        )
    # Only data sets without a transform to tensors need this import
    from torchvision.transforms.v2 import (
        functional,
    )

    try:
        # Pillow's own conversion from 16 bits clips at 255
        if (mode := getattr(image, "mode", "RGB")) == "I":
            image = np.asarray(image).clip(0, 65535).astype(np.uint16)
        # Palettes, transparency, CMYK
        elif mode not in ("L", "RGB", "I;16", "F"):
            image = image.convert("L" if mode == "1" else "RGB")
        return (
            functional.pil_to_tensor(image)
            if hasattr(image, "getbands")
            else functional.to_image(image).as_subclass(Tensor)
        )
    except (TypeError, ValueError):
        raise DataError(
            Problem(
                "dataset",
                "an image has an unknown type",
                type(image).__name__,
                "a tensor [C, H, W], a PIL image or an array",
            )
        ) from None


def collate_images(images: Sequence[Any]) -> Tensor | EncodedImages:
    """Return images as one batch; those that the device decodes stay encoded.

    Raises:
        DataError: The images differ in size or type.
    """
    if all(type(image) is EncodedImages for image in images):
        return EncodedImages.concatenate(images)
    return stack_images([as_tensor(image) for image in images])


def stack_images(images: Sequence[Tensor]) -> Tensor:
    """Return images of one size and type as a batch.

    Raises:
        DataError: The images differ.
    """
    # torch would promote bytes to floats without scaling them to [0, 1]
    if len(types := {image.dtype for image in images}) > 1:
        raise DataError(
            Problem(
                "transforms",
                "the images of a batch are of several types",
                ", ".join(sorted(map(str, types))),
                "images of one type",
                "store them as one type, or convert them to float by a sample transform: "
                "torchvision.transforms.v2.ToDtype with scale=true",
            )
        )
    try:
        return torch.stack(list(images))
    except RuntimeError:
        sizes = list(dict.fromkeys("x".join(map(str, image.shape)) for image in images))
    raise DataError(
        Problem(
            "transforms",
            "the images of a batch differ in size (channels x height x width)",
            first_few(sizes, 4),
            "images of one size, after the sample transforms",
            "crop or resize them in transforms.train.sample and .eval.sample, as "
            "transforms=imagenet does; imagenet_on_device needs dataset.decode=device",
        )
    )
