"""scikit-learn's handwritten digits drawn on noise: boxes to detect, without a download."""

from hashlib import blake2b
from typing import Any, Literal, final

import torch
from torch import Tensor

from samewise.datasets.digits import Digits
from samewise.datasets.parts.annotated_images import annotated_sample, class_map_sample
from samewise.datasets.parts.generated import Generated, generator_of
from samewise.runner.errors import ConfigError, require_at_least

_TRIES = 20
# The box is drawn around pixels of at least this grey value
_INK = 96


@final
class DigitsOnCanvas(Generated):
    """Samples of `AnnotatedImages`: digits of several sizes and tints on uniform noise.

    A sample has `image` uint8[3, H, W], `boxes` float32[N, 4] (x1, y1, x2, y2) in pixels, `labels`
    int64[N] (digit + 1) and `image_id`. With masks it also has `masks` uint8[N, H, W], each digit's
    ink; a sample of classes has `image` and `mask` uint8[H, W] alone, 0 being the background.

    A canvas is a function of its index: it has 1 to `digits` digits, whose frames do not overlap.
    The splits draw from different handwritings. All arithmetic is in integers, so the pixels are
    the same on every machine.

    Args:
        split: "train" or "valid", of the digits and of the canvases.
        length: Number of canvases.
        height: Height in pixels.
        width: Width in pixels.
        digits: Largest number of digits on a canvas.
        smallest: Least height and width of a digit's frame, in pixels.
        largest: Greatest height and width of a digit's frame, in pixels.
        turned: Exchange height and width of half of the canvases, at random: images then have two
            aspect ratios.
        masks: "objects" adds a mask for each digit, "classes" replaces boxes by a map of labels.
        seed: The data's own seed, independent of the experiment's.

    Raises:
        ConfigError: A size or number is too small, or the largest digit does not fit on the canvas.
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
        masks: Literal["none", "objects", "classes"] = "none",
        seed: int = 0,
    ) -> None:
        require_at_least({"dataset.digits": digits})
        require_at_least({"dataset.smallest": smallest}, least=8)
        require_at_least({"dataset.largest": largest}, least=smallest)
        ConfigError.raise_if(
            largest > min(height, width),
            "dataset.largest",
            "does not fit on the canvas",
            largest,
            f"at most {min(height, width)}",
        )
        super().__init__(length, f"{seed} {split}")
        self._digits = Digits(split=split)
        self.classes = ["background", *self._digits.classes]
        self._height, self._width, self._most = height, width, digits
        self._smallest, self._largest, self._turned = smallest, largest, turned
        self._masks = masks

    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        height, width = self._shape(draw)
        canvas = torch.randint(0, 80, (3, height, width), generator=draw, dtype=torch.uint8)
        boxes: list[list[int]] = []
        labels: list[int] = []
        frames: list[tuple[int, int, int, int]] = []
        masks = torch.zeros(self._most, height, width, dtype=torch.uint8)
        for _ in range(_upto(self._most, draw) + 1):
            frame = _free_frame(frames, height, width, self._smallest, self._largest, draw)
            if frame is None:
                break
            frames.append(frame)
            digit = self._digits[_upto(len(self._digits), draw)]
            boxes.append(_draw(canvas, digit["image"][0], frame, draw, masks[len(labels)]))
            labels.append(digit["label"] + 1)
        drawn, label = masks[: len(labels)], torch.tensor(labels)
        if self._masks == "classes":
            return class_map_sample(canvas, drawn, label, number=index)
        return annotated_sample(
            canvas,
            torch.tensor(boxes, dtype=torch.float32),
            label,
            number=index,
            masks=drawn if self._masks == "objects" else None,
        )

    def aspect_ratios(self) -> Tensor:
        """Return float64[N]: width / height of each canvas, without drawing it."""
        shapes = [self._shape(generator_of(f"{self._key} {index}")) for index in range(len(self))]
        return torch.tensor([width / height for height, width in shapes], dtype=torch.float64)

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover everything that determines the canvases."""
        settings = (
            self._digits.fingerprint(),
            self._key,
            self._length,
            self._height,
            self._width,
            self._most,
            self._smallest,
            self._largest,
            self._turned,
            *([] if self._masks == "none" else [self._masks]),
        )
        return blake2b(repr(settings).encode(), digest_size=16).hexdigest()

    def _shape(self, draw: torch.Generator) -> tuple[int, int]:
        """Draw (height, width)."""
        # The shape is drawn before the digits, so that it is known without drawing the canvas
        turned = _upto(2, draw) == 1 and self._turned
        return (self._width, self._height) if turned else (self._height, self._width)


def _upto(end: int, draw: torch.Generator) -> int:
    """Draw an integer from 0 to end - 1."""
    return int(torch.randint(end, (), generator=draw))


def _free_frame(
    occupied: list[tuple[int, int, int, int]],
    height: int,
    width: int,
    smallest: int,
    largest: int,
    draw: torch.Generator,
) -> tuple[int, int, int, int] | None:
    """Draw (top, left, height, width) that overlaps no occupied frame; None after many tries."""
    for _ in range(_TRIES):
        tall, wide = (smallest + _upto(largest - smallest + 1, draw) for _ in range(2))
        # A frame is at most twice as wide as high, and the reverse
        wide = min(wide, 2 * tall) if wide > tall else max(wide, tall // 2, smallest)
        first_row, first_column = _upto(height - tall + 1, draw), _upto(width - wide + 1, draw)
        if all(
            first_row >= t + h
            or t >= first_row + tall
            or first_column >= x + w
            or x >= first_column + wide
            for t, x, h, w in occupied
        ):
            return first_row, first_column, tall, wide
    return None


def _draw(
    canvas: Tensor,
    digit: Tensor,
    frame: tuple[int, int, int, int],
    draw: torch.Generator,
    mask: Tensor,
) -> list[int]:
    """Draw uint8[8, 8], enlarged to the frame, into uint8[3, H, W]; return its ink's box.

    The ink is 1 in `mask`, uint8[H, W].
    """
    first_row, first_column, tall, wide = frame
    pixels = digit[torch.arange(tall) * 8 // tall][:, torch.arange(wide) * 8 // wide].to(
        torch.int64
    )
    tint = torch.randint(192, 256, (3, 1, 1), generator=draw)
    place = canvas[:, first_row : first_row + tall, first_column : first_column + wide]
    place.copy_(torch.maximum(place, (pixels * tint // 255).to(torch.uint8)))
    mask[first_row : first_row + tall, first_column : first_column + wide] = pixels >= _INK
    rows, columns = (pixels >= _INK).any(1).nonzero()[:, 0], (pixels >= _INK).any(0).nonzero()[:, 0]
    return [
        first_column + int(columns[0]),
        first_row + int(rows[0]),
        first_column + int(columns[-1]) + 1,
        first_row + int(rows[-1]) + 1,
    ]
