"""Show a sweep's progress on standard error.

On a terminal there is a line for each running job; everywhere, a line for each that has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.text import Text

from samewise.runner.records import shapes
from samewise.runner.records.console import PlainConsole
from samewise.runner.records.files import read_mapping
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweeps.results import PointResult, State, latest

# Each redraw reads the end of every running run's journal
_REDRAW_S = 1.0
_STYLES = {
    State.finished: "green",
    State.failed: "bold red",
    State.pruned: "yellow",
    State.interrupted: "yellow",
}


class Watcher:
    """Displays a running sweep."""

    def __init__(
        self, folder: SweepFolder, *, total: int | None, console: PlainConsole | None = None
    ) -> None:
        self._folder, self.total = folder, total
        self._console = console or PlainConsole(stderr=True, highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True)
            if self._console.is_terminal
            else None
        )
        self._counts = Counter[State]()
        self._last_draw = 0.0
        self._start = time.monotonic()
        self._rates = dict[int, tuple[float, int]]()

    def __enter__(self) -> Watcher:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        # As Text, so that brackets in a value are no markup
        self._console.print(Text(text, style=style))

    def count_ended(self, result: PointResult) -> None:
        """Count a point that needs nothing more, without a line."""
        self._counts[result.state] += 1

    def show_restart(self, result: PointResult) -> None:
        """Print that a job which died is restarted."""
        self.say(
            f"{self._head(result.point)}  {result.reason}; restarting it from its last checkpoint",
            "yellow",
        )

    def show_ended(self, result: PointResult) -> None:
        """Print how a job has ended."""
        self._counts[result.state] += 1
        parts = [self._head(result.point), result.state.value]
        if result.state is State.finished:
            parts += [f"{result.objective} {result.value:.4g}", f"{result.seconds:.0f} s"]
        if result.reason:
            parts.append(result.reason)
        if result.state is State.failed and self._folder.log(result.point.number).exists():
            parts.append(f"({self._folder.log(result.point.number)})")
        self.say("  ".join(parts), _STYLES.get(result.state, ""))

    def show(self, running: Sequence[Point], *, waiting: int) -> None:
        """Draw the running jobs, at most once a second; only on a terminal."""
        now = time.monotonic()
        if self._live is None or now - self._last_draw < _REDRAW_S:
            return
        self._last_draw = now
        lines = [self._line(point) for point in sorted(running, key=lambda point: point.number)]
        self._live.update(
            # rich cuts off what is higher than the terminal, and the foot comes last
            Group(*lines[: max(1, self._console.height - 3)], self._foot(len(running), waiting)),
            refresh=True,
        )

    def _head(self, point: Point) -> str:
        total = f"/{self.total}" if self.total else ""
        return f"[{point.number + 1}{total}] {point.label}"

    def _line(self, point: Point) -> Text:
        step, metrics = latest(point.run, point.monitor)
        total = int(read_mapping(point.run.environment, shapes.ENVIRONMENT).get("total_steps", 0))
        parts = [self._head(point), f"step {step}{f'/{total}' if total else ''}"]
        if point.monitor in metrics:
            parts.append(f"{point.monitor} {metrics[point.monitor]:.4g}")
        remaining_s = self._remaining_s(point, step, total)
        if remaining_s is not None:
            parts.append(f"{clock(remaining_s)} left")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _remaining_s(self, point: Point, step: int, total: int) -> float | None:
        """Return the seconds until a run ends, at its speed since it was first shown.

        None if unknown.
        """
        now = time.monotonic()
        # Steps of an earlier attempt took none of this time
        start_time, start_step = self._rates.setdefault(point.number, (now, step))
        if not total or step <= start_step:
            return None
        return (total - step) * (now - start_time) / (step - start_step)

    def _foot(self, running: int, waiting: int) -> Text:
        counts = ", ".join(
            f"{count} {state.value}" for state, count in sorted(self._counts.items())
        )
        text = ", ".join(
            filter(None, [counts, f"{running} running", f"{waiting} waiting" if waiting else ""])
        )
        return Text(
            f"{self._folder.id}: {text}, {clock(time.monotonic() - self._start)}", style="dim"
        )


def clock(seconds: float) -> str:
    """Format seconds as `1:02:03` or `2:03`."""
    total = int(seconds)
    hours, minutes, remainder = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"
