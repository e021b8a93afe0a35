"""Shows a sweep's progress: a line for each running job, and one for each that has ended, on
standard error; without a terminal only the latter.
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

_EVERY_S = 1.0
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
        self._drawn = 0.0
        self._began = time.monotonic()
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
        self._console.print(Text(text, style=style))

    def show_found(self, now: PointResult) -> None:
        """A point needs nothing more: it has ended, or is already running."""
        self._counts[now.state] += 1

    def show_restart(self, now: PointResult) -> None:
        """A job that died is restarted."""
        self.say(
            f"{self._head(now.point)}  {now.reason}; restarting it from its last checkpoint",
            "yellow",
        )

    def show_ended(self, now: PointResult) -> None:
        """A job has ended; printed at once."""
        self._counts[now.state] += 1
        parts = [self._head(now.point), now.state.value]
        if now.state is State.finished:
            parts += [f"{now.objective} {now.value:.4g}", f"{now.seconds:.0f} s"]
        if now.reason:
            parts.append(now.reason)
        if now.state is State.failed and self._folder.log(now.point.number).exists():
            parts.append(f"({self._folder.log(now.point.number)})")
        self.say("  ".join(parts), _STYLES.get(now.state, ""))

    def show(self, running: Sequence[Point], *, waiting: int) -> None:
        """Draw the running jobs, at most once a second; only on a terminal."""
        now = time.monotonic()
        if self._live is None or now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        lines = [self._line(point) for point in sorted(running, key=lambda point: point.number)]
        self._live.update(
            Group(*lines[: max(1, self._console.height - 3)], self._foot(len(running), waiting)),
            refresh=True,
        )

    def _head(self, point: Point) -> str:
        of = f"/{self.total}" if self.total else ""
        return f"[{point.number + 1}{of}] {point.label}"

    def _line(self, point: Point) -> Text:
        step, metrics = latest(point.run, point.monitor)
        total = int(read_mapping(point.run.environment, shapes.ENVIRONMENT).get("total_steps", 0))
        parts = [self._head(point), f"step {step}{f'/{total}' if total else ''}"]
        if point.monitor in metrics:
            parts.append(f"{point.monitor} {metrics[point.monitor]:.4g}")
        left = self._left_s(point, step, total)
        if left is not None:
            parts.append(f"{clock(left)} left")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _left_s(self, point: Point, step: int, total: int) -> float | None:
        now = time.monotonic()
        began, first = self._rates.setdefault(point.number, (now, step))
        if not total or step <= first:
            return None
        return (total - step) * (now - began) / (step - first)

    def _foot(self, running: int, waiting: int) -> Text:
        counts = ", ".join(
            f"{count} {state.value}" for state, count in sorted(self._counts.items())
        )
        left = ", ".join(
            filter(None, [counts, f"{running} running", f"{waiting} waiting" if waiting else ""])
        )
        return Text(
            f"{self._folder.id}: {left}, {clock(time.monotonic() - self._began)}", style="dim"
        )


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
