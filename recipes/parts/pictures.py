"""Pictures of results.

Matplotlib is imported when a picture is drawn, and its global state is not used.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samewise.recipes.parts.figures import make_figure, save_figure
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import truncate

_CELL, _CAPTION, _TITLE, _MARGIN = 1.55, 0.5, 0.45, 0.06
"""Sizes on a sheet of predictions, in inches."""
_short = partial(truncate, longest=18, ending="…")


def thumbnails(images: Tensor, *, longest: int = 96) -> Tensor:
    """Return uint8[S, C, h, w]: images in any scale, shrunk, each stretched to its own range.

    Stretching shows normalised images without knowing their mean and deviation; their colour
    balance shifts a little.

    Args:
        images: [S, C, H, W], or clips [S, C, T, H, W], of which the middle frame is shown. Of more
            than three channels the first three are shown, of two the first. Tensors [S, W] and [S,
            H, W] are shown as grey images.
        longest: Upper limit of the longer side in pixels.
    """
    images = (images[:, :, images.shape[2] // 2] if images.dim() == 5 else images).to(torch.float32)
    images = images.reshape(len(images), *[1] * (4 - images.dim()), *images.shape[1:])
    images = images if images.shape[1] in (1, 3) else images[:, : 3 if images.shape[1] > 3 else 1]
    shrink = max(images.shape[-2:]) / longest
    if shrink > 1:
        size = [max(1, round(side / shrink)) for side in images.shape[-2:]]
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
    low = images.amin(dim=(1, 2, 3), keepdim=True)
    # An image of one colour has no span to divide by
    span = (images.amax(dim=(1, 2, 3), keepdim=True) - low).clamp(min=1e-12)
    return ((images - low) / span).nan_to_num().mul(255).round().to(torch.uint8)


def save_classified(
    path: Path, image: Tensor, caption: str, *, smallest: int = 320, largest: int = 1280
) -> Path:
    """Draw uint8[3, H, W] with a line of text in the lower left corner.

    The longer side is resized to between `smallest` and `largest` pixels.
    """
    height, width = image.shape[-2:]
    scale = min(max(1.0, smallest / max(height, width)), largest / max(height, width)) / 100
    figure = make_figure(max(width * scale, 0.2), max(height * scale, 0.2), layout=None)
    axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.imshow(
        image.movedim(0, -1).numpy(),
        interpolation="nearest" if scale > 0.01 else "antialiased",
        aspect="auto",
    )
    size = 11 * max(1.0, max(height, width) * scale * 100 / 640)
    box = {"facecolor": "white", "alpha": 0.8, "pad": 2.0, "linewidth": 0}
    axes.text(
        0.01,
        0.01,
        truncate(caption, 40, ending="…"),
        transform=axes.transAxes,
        fontsize=size,
        color="black",
        ha="left",
        va="bottom",
        bbox=box,
    )
    save_figure(figure, path)
    return path


@dataclass(frozen=True)
class Shown:
    """A prediction of a sheet, with the sample as it is drawn."""

    image: Tensor
    label: int
    prediction: int
    confidence: float
    loss: float


class PredictionSheet:
    """Keeps a few predictions of a split: wrong ones, then right ones, with the largest losses.

    Args:
        wrong: Most wrong predictions.
        total: Most predictions altogether.
    """

    def __init__(self, *, wrong: int = 24, total: int = 32) -> None:
        self._sizes = {False: wrong, True: total}
        self._total = total
        # Heaps by whether the prediction is right, with the least loss on top
        self._heaps: dict[bool, list[tuple[float, int, Shown]]] = {
            False: [],
            True: [],
        }

    def add(
        self,
        image: Tensor,
        label: int,
        prediction: int,
        confidence: float,
        loss: float,
        position: int,
    ) -> None:
        """Consider an image uint8[C, h, w] at `position` of the split.

        The position decides between equal losses.
        """
        right = label == prediction
        heap, entry = (
            self._heaps[right],
            (
                # NaN counts as the largest loss
                loss if loss == loss else math.inf,
                -position,
                Shown(image, label, prediction, confidence, loss),
            ),
        )
        push = heapq.heappush if len(heap) < self._sizes[right] else heapq.heappushpop
        push(heap, entry)

    def shown(self) -> list[Shown]:
        """Return the predictions, wrong ones first, each kind by falling loss."""
        return [
            entry[-1]
            for right in (False, True)
            for entry in sorted(self._heaps[right], reverse=True)
        ][: self._total]

    def save(self, path: Path, names: Sequence[str], *, columns: int = 8) -> None:
        """Draw the sheet; wrong predictions come first, in red."""
        shown = self.shown()
        rows = max(1, math.ceil(len(shown) / columns))
        width, height = _CELL * columns, _TITLE + (_CELL + _CAPTION) * rows
        figure = make_figure(width, height, layout=None)
        # One axes for all, in inches: an axes for each sample takes ten times as long to draw
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for number, item in enumerate(shown):
            top = _TITLE + (_CELL + _CAPTION) * (number // columns) + _CAPTION
            _draw_prediction(axes, item, names, x_left=_CELL * (number % columns), y_top=top)
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        wrong = sum(item.label != item.prediction for item in shown)
        title = f"{wrong} wrong predictions (red), {len(shown) - wrong} right: largest loss first"
        axes.text(width / 2, _TITLE / 2, title, fontsize=10, ha="center", va="center")
        save_figure(figure, path)


def save_image_grid(path: Path, images: Tensor, *, columns: int = 8, side: int = 64) -> None:
    """Write a sheet of images [N, C, H, W], C 1 or 3, on a common scale.

    Images go row by row, each enlarged by whole pixels to about `side`.
    """
    from torchvision.utils import save_image

    times = max(1, side // max(images.shape[-2:]))
    save_image(
        images.repeat_interleave(times, dim=2).repeat_interleave(times, dim=3),
        path,
        nrow=columns,
        normalize=True,
        pad_value=0.5,
    )


def save_confusion_matrix(path: Path, confusion: Tensor, names: Sequence[str]) -> None:
    """Draw int64[K, K] (true, predicted), with rows as shares.

    Counts are written for K <= 20, names for K <= 100.
    """
    classes = len(confusion)
    # A class may have no images
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    inches = min(16.0, max(5.0, 0.42 * classes if classes <= 30 else 6.4 + 0.1 * classes))
    figure = make_figure(inches + 1.5, inches + 0.7)
    axes: Any = figure.subplots()
    drawn: Any = axes.imshow(
        shares.numpy(), cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest"
    )
    figure.colorbar(
        drawn,
        ax=axes,
        label="share of the true class",
        fraction=0.05,
        pad=0.02,
        shrink=0.6,
        aspect=30,
    )
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(
        f"{int(confusion.diagonal().sum())} of {int(confusion.sum())} right", fontsize=10
    )
    if classes <= 100:
        # In points, 72 to the inch
        size = min(9.0, 0.6 * 72 * inches / classes)
        short = [_short(name) for name in names]
        axes.set_xticks(
            range(classes),
            short,
            rotation=0 if max(map(len, short)) <= 2 and classes <= 30 else 90,
            fontsize=size,
        )
        axes.set_yticks(range(classes), short, fontsize=size)
    if classes <= 20:
        for true, predicted in confusion.nonzero().tolist():
            colour = "white" if shares[true, predicted] > 0.5 else "black"
            axes.text(
                predicted,
                true,
                str(int(confusion[true, predicted])),
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    save_figure(figure, path)


def save_scatter(path: Path, labels: Tensor, outputs: Tensor, names: Sequence[str]) -> None:
    """Draw outputs over true values, float[N, T] each, in a square for each target."""
    count = len(names)
    figure = make_figure(4.0 * count, 4.0)
    squares: Any = figure.subplots(1, count, squeeze=False)
    for axes, name, true, output in zip(squares[0], names, labels.t(), outputs.t(), strict=True):
        axes.scatter(true.numpy(), output.numpy(), s=8)
        axes.axline((float(true.mean()), float(true.mean())), slope=1.0, color="grey", linewidth=1)
        axes.set(title=_short(name), xlabel="true", ylabel="predicted")
    save_figure(figure, path)


def save_class_accuracy(path: Path, confusion: Tensor, names: Sequence[str]) -> None:
    """Write a line per class: its images, the right ones, and its most frequent mistake."""
    lines = list[list[Any]]()
    for number, row in enumerate(confusion.tolist()):
        images, right = sum(row), row[number]
        mistakes = [0 if x == number else times for x, times in enumerate(row)]
        times = max(mistakes)
        lines.append(
            [
                names[number],
                images,
                right,
                f"{right / images:.4f}" if images else "",
                names[mistakes.index(times)] if times else "",
                times,
            ]
        )
    write_csv(
        path, ("class", "images", "right", "accuracy", "most often mistaken for", "times"), lines
    )


def _draw_prediction(
    axes: Any, item: Shown, names: Sequence[str], *, x_left: float, y_top: float
) -> None:
    picture = item.image.movedim(0, -1).numpy()
    high, wide = picture.shape[:2]
    inches = (_CELL - 2 * _MARGIN) / max(high, wide)
    middle = x_left + _CELL / 2
    place = (middle - wide * inches / 2, middle + wide * inches / 2, y_top + high * inches, y_top)
    axes.imshow(
        picture if picture.shape[-1] == 3 else picture[..., 0],
        cmap="gray",
        interpolation="nearest",
        extent=place,
        aspect="equal",
    )
    right = item.label == item.prediction
    prediction = f"{_short(names[item.prediction])} ({item.confidence:.0%})"
    caption = prediction if right else f"{prediction}\nnot {_short(names[item.label])}"
    axes.text(
        middle,
        y_top - _MARGIN,
        caption,
        fontsize=8,
        color="black" if right else "crimson",
        ha="center",
        va="bottom",
    )
