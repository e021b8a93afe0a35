"""The pictures of a classification: real PNG files that show what they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Subset

from samewise.recipes.classification import Classification, ClassificationScores


class Constant(nn.Module):
    """Logits that always favour class 0."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(image), self.classes)
        logits[:, 0] = 4 + image.mean(dim=(1, 2, 3))
        return logits


def scores_of(classes: int, names: list[str], *, channels: int = 3) -> ClassificationScores:
    recipe = Classification()
    scores = recipe.scores(Subset(SimpleNamespace(classes=names), [0]))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, 3 * classes, 16):
        labels = torch.arange(start, min(start + 16, 3 * classes)) % classes
        scores.add(recipe.measure(Constant(classes), {"image": torch.randn(len(labels), channels, 16, 16, generator=generator), "label": labels}))
    return scores


@pytest.mark.parametrize(("classes", "channels"), [(2, 1), (10, 3), pytest.param(100, 3, marks=pytest.mark.slow), pytest.param(300, 1, marks=pytest.mark.slow)])
def test_pictures_are_png_files_of_a_reasonable_size(tmp_path: Path, classes: int, channels: int):
    scores_of(classes, [f"kind number {k}" for k in range(classes)], channels=channels).save_pictures(tmp_path)
    for name in ("confusion_matrix.png", "predictions.png"):
        with Image.open(tmp_path / name) as picture:
            picture.load()
            assert picture.format == "PNG"
            assert 300 <= picture.width <= 2000
            assert 250 <= picture.height <= 2000
            assert len(np.unique(np.asarray(picture))) > 20  # something is drawn
            assert (tmp_path / name).stat().st_size < 600_000


@pytest.mark.slow
def test_the_recipe_does_not_import_matplotlib_before_it_draws():
    code = "import sys, samewise.recipes.classification; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode == 0
