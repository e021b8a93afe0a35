"""The classes of an image's pixels, to write and to draw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.utils import draw_segmentation_masks, make_grid, save_image

from samewise.datasets.parts.decode import read_image
from samewise.runner.interfaces import Prediction


@final
class Segmented(Prediction):
    """The classes of one image's pixels.

    Args:
        labels: int64[H, W], in pixels of the file.
        file: The image file.
        classes: The labels' names; empty: their numbers.
    """

    def __init__(self, labels: Tensor, file: str, classes: Sequence[str] = ()) -> None:
        self.labels, self.classes, self._file = labels.cpu(), list(classes), file

    def values(self) -> dict[str, Any]:
        """Return `width`, `height`, and `classes`: each one's share of the pixels, if any."""
        height, width = self.labels.shape
        return {
            "width": width,
            "height": height,
            "classes": {row["class"]: row["share"] for row in self.rows()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each class in the image: `label`, `class`, `pixels` and `share`."""
        counts = enumerate(self.labels.flatten().bincount().tolist())
        return [
            {
                "label": label,
                "class": self.classes[label] if label < len(self.classes) else str(label),
                "pixels": pixels,
                "share": pixels / self.labels.numel(),
            }
            for label, pixels in counts
            if pixels
        ]

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_mask.png`, whose pixels are labels, and `NAME_overlay.png`."""
        mask, overlay = folder / f"{name}_mask.png", folder / f"{name}_overlay.png"
        picture = Image.fromarray(self.labels.to(torch.uint8).numpy())
        picture.putpalette([part for label in range(256) for part in colour(label)])
        picture.save(mask)
        drawn = _overlay(read_image(self._file), self.labels)
        Image.fromarray(drawn.movedim(0, -1).numpy()).save(overlay)
        return [mask, overlay]


def colour(label: int) -> tuple[int, int, int]:
    """Return a label's colour in Pascal VOC's palette: black for 0, then red, green, ..."""
    bits = [[label >> (3 * place + part) & 1 for place in range(3)] for part in range(3)]
    red, green, blue = (sum(bit << (7 - place) for place, bit in enumerate(x)) for x in bits)
    return red, green, blue


def save_segmentations(path: Path, shown: Sequence[Tensor], num_classes: int) -> None:
    """Draw rows of an image, its true classes and those of the model.

    Args:
        path: The file to write.
        shown: uint8[5, h, w]: colours, true labels, predicted labels.
        num_classes: Number of labels.
    """
    height, width = (max(x.shape[side] for x in shown) for side in (1, 2))
    panels = [
        F.pad(panel, (0, width - panel.shape[2], 0, height - panel.shape[1]))
        for x in shown
        for panel in (x[:3], _overlay(x[:3], x[3]), _overlay(x[:3], x[4]))
    ]
    save_image(make_grid(torch.stack(panels), nrow=3).float() / 255, path)


def _overlay(image: Tensor, labels: Tensor) -> Tensor:
    """Return uint8[3, H, W], in which labels other than 0 are coloured; 255 is grey."""
    present = [label for label in labels.unique().tolist() if label]
    if not present:
        return image
    masks = torch.stack([labels == label for label in present])
    colours = [(224, 224, 192) if label == 255 else colour(label) for label in present]
    return draw_segmentation_masks(image, masks, alpha=0.6, colors=colours)
