"""A progress bar on a terminal, otherwise a line for each evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records.console import PlainConsole


@final
class ProgressBar(Callback):
    """Shows steps, loss, speed and the time left, on standard error.

    Args:
        refresh_s: Seconds between two drawings.
    """

    def __init__(self, *, refresh_s: float = 0.2) -> None:
        self._refresh_s = refresh_s
        self._console = PlainConsole(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._drawn = 0.0

    def on_start(self, run: RunView) -> None:
        if run.step and run.is_main:
            self._console.print(f"resumed at step {run.step} of {run.total_steps}")
        if sys.stderr.isatty() and run.is_main:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(self._epoch(run), total=run.total_steps, completed=run.step, loss="")
            self._bar.start()

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        now = time.monotonic()
        if self._bar and now - self._drawn > self._refresh_s:
            self._drawn = now
            loss = " ".join(f"{name} {value:.4f}" for name, value in outcome.losses.items())
            self._bar.update(self._task, completed=outcome.step, description=self._epoch(run), loss=loss, refresh=True)

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if run.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            best = "  (best)" if run.best.get("step") == run.step else ""
            self._console.print(f"epoch {round(run.epoch, 2):g}  step {run.step}  {shown}{best}", highlight=False, soft_wrap=True)

    def on_end(self, run: RunView) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _epoch(self, run: RunView) -> str:
        return f"epoch {min(run.step // run.steps_per_epoch + 1, run.max_epochs)}/{run.max_epochs}"
