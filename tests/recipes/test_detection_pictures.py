"""Labels of predicted boxes can be read wherever the boxes are; label pixels are counted in the rendered pictures."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from samewise.recipes.parts.average_precision import Image
from samewise.recipes.parts.detection_pictures import save_prediction

HEIGHT, WIDTH = 200, 300
NAMES = ["background", "dark blood cell"]
INSIDE = (100.0, 80.0, 160.0, 130.0)
EDGES = {
    "the top": (100.0, 0.0, 160.0, 60.0),
    "the left": (0.0, 80.0, 60.0, 130.0),
    "the right": (250.0, 80.0, 300.0, 130.0),
    "the bottom": (100.0, 150.0, 160.0, 200.0),
    "the upper right corner": (250.0, 0.0, 300.0, 60.0),
    "every edge": (0.0, 0.0, 300.0, 200.0),
    "more than the picture": (-20.0, -20.0, 320.0, 220.0),
}
LABEL = 0.7 * np.array([255, 127, 14])  # matplotlib's second colour, at an opacity of .7 over black


def label_area(file: Path) -> int:
    """The number of pixels with the background colour of a label."""
    pixels = np.asarray(PIL.Image.open(file).convert("RGB")).astype(float)
    return int((abs(pixels - LABEL).max(2) < 3).sum())


def found(box: tuple[float, float, float, float]) -> Image:
    none = torch.zeros(0)
    return Image((HEIGHT, WIDTH), torch.zeros(0, 4), none.long(), none.bool(), none, torch.tensor([box]), torch.tensor([1]), torch.tensor([0.9]))


@pytest.mark.parametrize("edge", EDGES)
def test_the_label_of_a_box_that_touches_an_edge_is_complete(edge: str, tmp_path: Path) -> None:
    black = torch.zeros(3, HEIGHT, WIDTH)
    whole = label_area(save_prediction(tmp_path / "inside.png", black, found(INSIDE), NAMES))
    assert whole > 200
    assert label_area(save_prediction(tmp_path / "edge.png", black, found(EDGES[edge]), NAMES)) >= 0.97 * whole  # more if less of the label lies on its box
