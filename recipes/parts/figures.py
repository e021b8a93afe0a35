"""Saves figures whose text contains names from elsewhere, which matplotlib must not interpret."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI = 100
"""Matplotlib's own default: a matplotlibrc, which it reads in the current folder too, can ask for
pictures that fill the memory."""


def save_figure(figure: Figure, path: Path) -> None:
    """Save the figure with its texts taken literally."""
    take_literally(figure)
    figure.savefig(path, dpi=DPI)


def take_literally(figure: Figure) -> None:
    """Disable formulas, in which a class named `$b^$` would be an error; call it before drawing."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
