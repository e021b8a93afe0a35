"""Generated numbers and images, to try a regression without its data."""

from collections.abc import Sequence
from typing import final

import torch

from samewise.datasets.parts.generated import generator_of
from samewise.datasets.parts.in_memory import NumberRows
from samewise.runner.errors import require_at_least


@final
class GeneratedNumbers(NumberRows):
    """Samples with `features` float32[F], `image` uint8[C, H, W] and `label` float32[T].

    A target is a feature plus twice the next one. The upper half of an image is as bright as the
    first feature, the lower half as the second, under noise. All arithmetic is in integers, so the
    numbers are the same on every machine.

    Args:
        features: The names of the features, at least two.
        targets: The names of the targets, as many as features or fewer.
        size: Height and width of the images in pixels, even.
        channels: 3 for colour, 1 for grey.
        length: Number of samples.
        split: The split's name; splits differ in their numbers.

    Raises:
        ConfigError: A size or number is less than 1.
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        targets: Sequence[str],
        size: int = 8,
        channels: int = 3,
        length: int = 256,
        split: str = "train",
    ) -> None:
        require_at_least({"size": size, "channels": channels, "length": length})
        draw = generator_of(split)
        numbers = torch.randint(0, 128, (length, len(features)), generator=draw)
        noise = torch.randint(0, 128, (length, channels, size, size), generator=draw)
        levels = numbers[:, :2].repeat_interleave(size // 2, dim=1)[:, None, :, None]
        labels = (numbers + 2 * numbers.roll(-1, 1))[:, : len(targets)]
        super().__init__(
            targets,
            features=numbers.float(),
            image=(levels + noise).to(torch.uint8),
            label=labels.float(),
        )
