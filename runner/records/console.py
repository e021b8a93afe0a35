"""Coloured output: rich's console, which treats all text literally."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from samewise.runner.secrets import printable, redact, unfiltered_stream


def align(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield rows of cells as lines of columns; a side is `<` or `>`, for each column."""
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        # Some characters are two columns wide, or none
        yield "  ".join(f"{x:{side}{n + len(x) - width_of(x)}}" for x, side, n in cells).rstrip()


def width_of(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


class PlainConsole(Console):
    """Prints names without interpreting markup or control sequences, and hides secrets.

    Its arguments are rich's.
    """

    def __init__(
        self, *, stderr: bool = False, file: IO[str] | None = None, **settings: Any
    ) -> None:
        super().__init__(
            file=file or unfiltered_stream(sys.stderr if stderr else sys.stdout),
            markup=False,
            emoji=False,
            **settings,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else Segment(printable(redact(segment.text)), segment.style)
            )


def show_progress(items: Iterable[Any], total: int) -> Iterator[Any]:
    """Yield items, with a progress bar on a terminal if there are several."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = PlainConsole(stderr=True)
    # Results are printed above the bar, unless they go into a file or a pipe
    shares_terminal = sys.stdout.isatty()
    with Progress(
        *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        console=console,
        transient=True,
        disable=total < 2 or not console.is_terminal,
        redirect_stdout=shares_terminal,
        redirect_stderr=shares_terminal,
    ) as bar:
        yield from bar.track(items, total=total)
