"""Scikit-learn's handwritten digits drawn on noise: boxes to detect, nothing to download."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, final

import torch
from torch import Tensor

from samewise.datasets.digits import Digits
from samewise.datasets.parts.annotated_images import annotated_sample
from samewise.datasets.parts.generated import Generated, generator_of
from samewise.runner.errors import ConfigError, Problem

_TRIES = 20
_INK = 96  # grey values from here on belong to the digit: its box is drawn around them


@final
class DigitsOnCanvas(Generated):
    """Samples in the form of `AnnotatedImages`: `image` uint8[3, H, W], `boxes` float32[N, 4],
    `labels` int64[N] (digit + 1), `image_id`.

    A canvas is made anew whenever it is asked for, by its index alone: 1 to `digits` digits of
    different sizes and tints, whose frames do not overlap, on uniform noise. The splits draw from
    different handwritings. Integers throughout: the same pixels on every machine.

    Args:
        split: "train" or "valid", of the digits and of the canvases.
        length: How many canvases.
        height: In pixels.
        width: In pixels.
        digits: The largest number of digits on a canvas.
        smallest: The least height and width of a digit's frame, in pixels.
        largest: The size of the largest digit, in pixels.
        turned: Whether every other canvas, on average, has height and width exchanged: images of
            two aspect ratios.
        seed: The data's own, not the experiment's.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "valid"],
        length: int = 1000,
        height: int = 96,
        width: int = 128,
        digits: int = 4,
        smallest: int = 16,
        largest: int = 48,
        turned: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("digits", digits, 1),
            ("smallest", smallest, 8),
            ("largest", largest, smallest),
        ):
            if value < least:
                raise ConfigError(
                    Problem(f"dataset.{name}", "is too small", value, f"at least {least}")
                )
        if largest > min(height, width):
            raise ConfigError(
                Problem(
                    "dataset.largest",
                    "does not fit on the canvas",
                    largest,
                    f"at most {min(height, width)}",
                )
            )
        super().__init__(length, f"{seed} {split}")
        self._digits = Digits(split=split)
        self.classes = ["background", *self._digits.classes]
        self._height, self._width, self._most = height, width, digits
        self._smallest, self._largest, self._turned = smallest, largest, turned

    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        height, width = self._shape(draw)
        canvas = torch.randint(0, 80, (3, height, width), generator=draw, dtype=torch.uint8)
        boxes: list[list[int]] = []
        labels: list[int] = []
        frames: list[tuple[int, int, int, int]] = []
        for _ in range(_upto(self._most, draw) + 1):
            frame = _free_frame(frames, height, width, self._smallest, self._largest, draw)
            if frame is None:
                break
            frames.append(frame)
            digit = self._digits[_upto(len(self._digits), draw)]
            boxes.append(_draw(canvas, digit["image"][0], frame, draw))
            labels.append(digit["label"] + 1)
        return annotated_sample(
            canvas, torch.tensor(boxes, dtype=torch.float32), torch.tensor(labels), number=index
        )

    def aspect_ratios(self) -> Tensor:
        """float64[N]: width / height of each canvas, without drawing it."""
        shapes = [self._shape(generator_of(f"{self._key} {index}")) for index in range(len(self))]
        return torch.tensor([width / height for height, width in shapes], dtype=torch.float64)

    def fingerprint(self) -> str:
        """32 hex digits of everything that determines the canvases."""
        what = (
            self._digits.fingerprint(),
            self._key,
            self._length,
            self._height,
            self._width,
            self._most,
            self._smallest,
            self._largest,
            self._turned,
        )
        return blake2b(repr(what).encode(), digest_size=16).hexdigest()

    def _shape(self, drawn: torch.Generator) -> tuple[int, int]:
        """(height, width): drawn first, so that it is known without drawing the canvas."""
        turned = _upto(2, drawn) == 1 and self._turned
        return (self._width, self._height) if turned else (self._height, self._width)


def _upto(end: int, drawn: torch.Generator) -> int:
    """0 to end - 1."""
    return int(torch.randint(end, (), generator=drawn))


def _free_frame(
    taken: list[tuple[int, int, int, int]],
    height: int,
    width: int,
    smallest: int,
    largest: int,
    drawn: torch.Generator,
) -> tuple[int, int, int, int] | None:
    """(top, left, height, width) without overlap with those taken; None if none was found."""
    for _ in range(_TRIES):
        tall, wide = (smallest + _upto(largest - smallest + 1, drawn) for _ in range(2))
        wide = min(wide, 2 * tall) if wide > tall else max(wide, tall // 2, smallest)
        top, left = _upto(height - tall + 1, drawn), _upto(width - wide + 1, drawn)
        if all(
            top >= t + h or t >= top + tall or left >= x + w or x >= left + wide
            for t, x, h, w in taken
        ):
            return top, left, tall, wide
    return None


def _draw(
    canvas: Tensor, digit: Tensor, frame: tuple[int, int, int, int], drawn: torch.Generator
) -> list[int]:
    """Draw uint8[8, 8], enlarged to the frame, into uint8[3, H, W].

    Return the box [x1, y1, x2, y2] around its ink.
    """
    top, left, tall, wide = frame
    pixels = digit[torch.arange(tall) * 8 // tall][:, torch.arange(wide) * 8 // wide].to(
        torch.int64
    )
    tint = torch.randint(192, 256, (3, 1, 1), generator=drawn)
    place = canvas[:, top : top + tall, left : left + wide]
    place.copy_(torch.maximum(place, (pixels * tint // 255).to(torch.uint8)))
    rows, columns = (pixels >= _INK).any(1).nonzero()[:, 0], (pixels >= _INK).any(0).nonzero()[:, 0]
    return [
        left + int(columns[0]),
        top + int(rows[0]),
        left + int(columns[-1]) + 1,
        top + int(rows[-1]) + 1,
    ]
