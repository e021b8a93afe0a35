"""What is trained, how far it is and when it will end: a progress bar on a terminal, otherwise a line a minute; and a line for each evaluation."""

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
        line_s: Seconds without a line, where there is no terminal, after which one says how far it is.
    """

    def __init__(self, *, refresh_s: float = 0.2, line_s: float = 60.0) -> None:
        self._refresh_s, self._line_s = refresh_s, line_s
        self._console = PlainConsole(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._drawn = 0.0
        self._began: tuple[float, int] = (0.0, 0)

    def on_start(self, run: RunView) -> None:
        self._began = (time.monotonic(), run.step)
        if run.is_main:
            epochs = f"{run.total_steps} steps of {run.batch_size}, {run.steps_per_epoch} an epoch"
            self._say(run.label, f"  {run.folder} on {run.device}", f"  {run.parameters:,} parameters, {run.samples:,} samples, {epochs}")
        if run.step and run.is_main:
            self._say(f"resumed at step {run.step} of {run.total_steps}")
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
        elif self._bar is None and run.is_main and now - self._drawn > self._line_s:
            self._drawn = now
            per_step = (now - self._began[0]) / (outcome.step - self._began[1])
            ends = time.strftime("%H:%M", time.localtime(time.time() + per_step * (run.total_steps - outcome.step)))
            shown = "  ".join(f"{name} {value:.4f}" for name, value in outcome.losses.items())
            self._say(f"{self._epoch(run)}  step {outcome.step} of {run.total_steps}  {shown}  {1 / per_step:.3g} steps/s, ends at about {ends}")

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if run.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            best = "  (best)" if run.best.get("step") == run.step else ""
            self._say(f"epoch {round(run.epoch, 2):g}  step {run.step}  {shown}{best}")

    def on_end(self, run: RunView) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, highlight=False, soft_wrap=True)
        if self._bar is None:
            self._drawn = time.monotonic()

    def _epoch(self, run: RunView) -> str:
        return f"epoch {min(run.step // run.steps_per_epoch + 1, run.max_epochs)}/{run.max_epochs}"
