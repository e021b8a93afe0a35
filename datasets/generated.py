"""Generated images, to try a recipe without its data: a pattern for each class, and noise."""

from typing import final

import torch
from torch import Tensor

from samewise.datasets.parts.generated import generator_of
from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.runner.errors import require_at_least

_CELLS = 4


@final
class GeneratedClassification(InMemoryImages):
    """Samples `{"image": uint8[channels, size, size], "label": int}` of generated patterns.

    Classes alternate, so every split is balanced.

    A class's pattern is a 4x4 grid of random greys; an image is its class's pattern in half
    contrast under uniform noise. A small network learns the classes in some tens of steps. All
    arithmetic is in integers, so the pixels are the same on every machine.

    Args:
        size: Height and width in pixels.
        channels: 3 for colour, 1 for grey.
        num_classes: Number of classes.
        length: Number of images.
        frames: T, for clips uint8[T, channels, size, size] in place of images; None: images.
        split: The split's name; splits share the patterns and differ in noise.
        seed: The seed of patterns and noise, independent of the experiment's.
        transform: Applied to each image.

    Raises:
        ConfigError: A size or number is less than 1.
    """

    def __init__(
        self,
        *,
        size: int = 32,
        channels: int = 3,
        num_classes: int = 10,
        length: int = 256,
        frames: int | None = None,
        split: str = "train",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        require_at_least(
            {
                "size": size,
                "channels": channels,
                "num_classes": num_classes,
                "length": length,
                "frames": 1 if frames is None else frames,
            }
        )
        labels = torch.arange(length) % num_classes
        patterns = _patterns(seed, num_classes=num_classes, channels=channels, size=size)
        if frames is not None:
            patterns = patterns[:, None]
        shape = (length, *((frames,) if frames else ()), channels, size, size)
        # Pattern and noise are below 128 each, so their sum fits a byte
        noise = torch.randint(
            0, 128, shape, generator=generator_of(f"{seed} noise {split}"), dtype=torch.uint8
        )
        super().__init__(
            patterns[labels] + noise,
            labels,
            classes=[f"pattern {number}" for number in range(num_classes)],
            transform=transform,
        )


def _patterns(seed: int, *, num_classes: int, channels: int, size: int) -> Tensor:
    """Return uint8[num_classes, channels, size, size] from 0 to 127: a 4x4 grid, enlarged."""
    cells = torch.randint(
        0,
        128,
        (num_classes, channels, _CELLS, _CELLS),
        generator=generator_of(f"{seed} patterns"),
        dtype=torch.uint8,
    )
    place = torch.arange(size) * _CELLS // size
    return cells[:, :, place][:, :, :, place]
