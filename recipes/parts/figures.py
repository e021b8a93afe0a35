"""Makes and saves figures with text that matplotlib must not interpret, such as names of classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# A matplotlibrc, which is read in the current folder too, may set one that fills the memory
DPI = 100
"""Matplotlib's own default resolution."""


def make_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """Create an empty figure of a size in inches of 100 pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout=layout)


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
