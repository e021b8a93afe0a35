"""A drawn figure to a file: its texts are names that others gave, and mean nothing to matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI = 100
"""Matplotlib's own default: a matplotlibrc, which it reads in the current folder too, can ask for pictures that fill the memory."""


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure, its texts as they are."""
    take_literally(figure)
    figure.savefig(path, dpi=DPI)


def take_literally(figure: Figure) -> None:
    """No text is a formula, in which a class called `$b^$` would be an error; call it before anything is drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
