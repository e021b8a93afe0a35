"""Pictures of detections.

Matplotlib is imported when a picture is drawn, and its global state is not used.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samewise.datasets.parts.masks import decode
from samewise.recipes.parts.average_precision import AveragePrecision, Image
from samewise.recipes.parts.figures import make_figure, save_figure, take_literally
from samewise.recipes.parts.tables import write_csv

_SCREEN = 900
"""Longest side in pixels of a picture that is viewed without shrinking."""


def save_detections(
    path: Path,
    thumbnails: Sequence[Tensor],
    images: Sequence[Image],
    names: Sequence[str],
    *,
    least: float = 0.3,
    columns: int = 4,
) -> None:
    """Draw images uint8[3, h, w] with true boxes (thin, white) and detections (a colour per class).

    Detections have a score of at least `least`; if there are none, the three best are drawn.
    """
    rows = max(1, math.ceil(len(thumbnails) / columns))
    figure = make_figure(4.0 * columns, 3.3 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in axes:
        place.set_axis_off()
    for place, thumbnail, image in zip(axes, thumbnails, images, strict=False):
        _draw(place, thumbnail, image, names, least)
    figure.suptitle(
        f"true boxes: thin white; detections with a score of at least {least:g}, or the "
        "three best: colour of the class",
        fontsize=11,
    )
    _pull_labels_inside(figure)
    save_figure(figure, path)


def save_prediction(
    path: Path,
    picture: Tensor,
    image: Image,
    names: Sequence[str],
    *,
    least: float = 0.3,
    best: int = 3,
) -> Path:
    """Draw float32[3, H, W] in [0, 1] pixel by pixel, with its detections.

    Small images are enlarged. Detections have a score of at least `least`; if there are none, the
    `best` ones are drawn. Lines and letters grow with the picture, so that they stay legible when
    it is shrunk to a screen.
    """
    height, width = image.size
    # In inches of 100 pixels
    scale = max(1.0, 480 / max(height, width)) / 100
    figure = make_figure(width * scale, height * scale, layout=None)
    axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    _draw(
        axes,
        (picture.clamp(0, 1) * 255).round().to(torch.uint8),
        image,
        names,
        least,
        best=best,
        scale=max(1.0, max(height, width) / _SCREEN),
    )
    _pull_labels_inside(figure)
    save_figure(figure, path)
    return path


def save_precision_recall(
    path: Path, result: AveragePrecision, names: Sequence[str], *, most: int = 20
) -> None:
    """Draw precision against recall at an IoU of .5, a line for each of the largest classes.

    At most `most` classes are drawn, those with the most boxes.
    """
    figure = make_figure(7.5, 5.5)
    axes: Any = figure.subplots()
    chosen = sorted(result.by_class(), key=lambda row: (-result.boxes[row[0]], row[0]))[:most]
    for label, _, at_50 in chosen:
        axes.plot(
            np.linspace(0, 1, 101),
            result.curve(label),
            color=_colour(label),
            label=f"{_name(label, names)}: {at_50:.3f} ({result.boxes[label]} boxes)",
        )
    axes.set(
        xlim=(0, 1.01),
        ylim=(0, 1.02),
        xlabel="recall",
        ylabel="precision",
        title=f"IoU 0.5: mean AP {max(0.0, result.stats['map_50']):.3f}",
    )
    axes.grid(alpha=0.3)
    if chosen:
        axes.legend(fontsize=8, title="AP of class")
    save_figure(figure, path)


def save_class_precision(path: Path, result: AveragePrecision, names: Sequence[str]) -> None:
    """Write a line per class: its true boxes, its average precision over all IoUs, and at .5."""
    rows = (
        [label, _name(label, names), result.boxes[label], f"{mean:.4f}", f"{at_50:.4f}"]
        for label, mean, at_50 in result.by_class()
    )
    write_csv(path, ("label", "class", "boxes", "ap", "ap_50"), rows)


def _draw(
    axes: Any,
    thumbnail: Tensor,
    image: Image,
    names: Sequence[str],
    least: float,
    *,
    best: int = 3,
    scale: float = 1.0,
) -> None:
    """Draw an image's boxes; `scale` multiplies line widths and font sizes."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    axes.imshow(thumbnail.movedim(0, -1).numpy(), interpolation="nearest")
    shrunk = thumbnail.shape[-1] / image.size[1]
    for x1, y1, x2, y2 in (image.boxes * shrunk).tolist():
        axes.add_patch(
            Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor="white", linewidth=0.8)
        )
    order = image.found_scores.argsort(descending=True, stable=True)
    drawn = [
        place
        for rank, place in enumerate(order.tolist())
        if image.found_scores[place] >= least
        or (rank < best and image.found_scores[order[0]] < least)
    ]
    for place in drawn:
        if image.found_masks is not None:
            mask = decode([image.found_masks[place]], *image.size)[0].numpy()[:, :, None]
            high, wide = thumbnail.shape[-2:]
            axes.imshow(
                mask * np.array(to_rgba(_colour(int(image.found_labels[place])), alpha=0.5)),
                extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
            )
        x1, y1, x2, y2 = (image.found_boxes[place] * shrunk).tolist()
        label = int(image.found_labels[place])
        axes.add_patch(
            Rectangle(
                (x1, y1),
                x2 - x1,
                y2 - y1,
                fill=False,
                edgecolor=_colour(label),
                linewidth=1.6 * scale,
            )
        )
        caption = f"{_name(label, names)} {image.found_scores[place]:.2f}"
        box = {"facecolor": _colour(label), "alpha": 0.7, "pad": 0.6, "linewidth": 0}
        # Labels are moved inside later, so the layout leaves no room for them
        axes.text(
            x1, y1, caption, fontsize=6 * scale, color="black", va="bottom", bbox=box
        ).set_in_layout(False)


def _pull_labels_inside(figure: Any) -> None:
    """Move labels that extend beyond their picture inside; too wide ones keep their start."""
    take_literally(figure)
    # The extent of a text is known only once it is drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame = axes.get_window_extent()
        for text in axes.texts:
            label = text.get_bbox_patch().get_window_extent()  # type: ignore[union-attr]
            right, up = (
                max(min(0.0, frame.x1 - label.x1), frame.x0 - label.x0),
                min(max(0.0, frame.y0 - label.y0), frame.y1 - label.y1),
            )
            x, y = axes.transData.transform(text.get_position())
            text.set_position(tuple(axes.transData.inverted().transform((x + right, y + up))))


def _colour(label: int) -> str:
    """Return a colour of matplotlib's cycle of ten, by label."""
    return f"C{label % 10}"


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)
