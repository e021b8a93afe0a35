"""Saves figures with text that matplotlib must not interpret, such as names of classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# A matplotlibrc, which is read in the current folder too, may set one that fills the memory
DPI = 100
"""Matplotlib's own default resolution."""


def save_figure(figure: Figure, path: Path) -> None:
    """Save the figure with its texts taken literally."""
    take_literally(figure)
    figure.savefig(path, dpi=DPI)


def take_literally(figure: Figure) -> None:
    """Disable formulas; call it before drawing."""
    # As a formula, a class named `$b^$` is an error
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
