"""Coloured output: rich's console, which treats all text literally."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from samewise.runner.secrets import printable, redact, unfiltered_stream


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
