"""Show what is trained, its progress and when it will end.

A terminal and a notebook have a bar, other outputs a line a minute; each evaluation has a line.
"""

import html
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records.console import PlainConsole
from samewise.runner.secrets import printable, redact

_FIRST_S = 10.0
"""Seconds until the first line, which says when the run will end."""


@final
class ProgressBar(Callback):
    """Shows steps, loss, speed and remaining time on standard error.

    Args:
        refresh_s: Seconds between two updates of the bar.
        line_s: Seconds between two lines of progress, without a bar.
        names: Losses, parts and metrics to show; None: all.
    """

    def __init__(
        self, *, refresh_s: float = 0.2, line_s: float = 60.0, names: Sequence[str] | None = None
    ) -> None:
        self._refresh_s, self._line_s, self._names = refresh_s, line_s, names
        self._console = PlainConsole(stderr=True)
        self._bar: _TerminalBar | _NotebookBar | None = None
        self._last_draw = 0.0
        self._wait_s = min(_FIRST_S, line_s)
        self._start: tuple[float, int] = (0.0, 0)
        self._last_step: int | None = None
        self._is_whole_training = False

    def on_start(self, run: RunView) -> None:
        self._start, self._last_step, self._is_whole_training = (
            (time.monotonic(), run.step),
            run.step,
            True,
        )
        if run.is_main:
            epochs = (
                f"{run.total_steps} steps of {run.batch_size} samples, {run.steps_per_epoch} "
                "per epoch"
            )
            self._print(
                run.label,
                f"  {run.folder} on {run.device}",
                f"  {run.parameters:,} parameters, {run.samples:,} samples, {epochs}",
            )
            if run.left_out:
                self._print(f"  evaluates {run.left_out}")
        if run.step and run.is_main:
            self._print(f"resumed at step {run.step} of {run.total_steps}")
        if run.is_main and self._console.is_jupyter:
            self._bar = _NotebookBar(run.total_steps, run.step)
        elif run.is_main and sys.stderr.isatty():
            self._bar = _TerminalBar(self._console, run.total_steps, run.step)

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        now = time.monotonic()
        # `verify` repeats a part of the training, whose end is not the training's
        if self._last_step is None or outcome.step != self._last_step + 1:
            self._start, self._last_draw, self._is_whole_training = (now, outcome.step), now, False
        self._last_step = outcome.step
        if (
            not run.is_main
            or outcome.step == self._start[1]
            or now - self._last_draw <= (self._refresh_s if self._bar else self._wait_s)
        ):
            return
        self._last_draw = now
        losses = self._values(outcome.losses)
        if self._bar:
            self._bar.draw(outcome.step, self._epoch(run), losses)
        else:
            self._wait_s = self._line_s
            per_step = (now - self._start[0]) / (outcome.step - self._start[1])
            speed = f"{1 / per_step:.3g} steps/s"
            end_time = time.strftime(
                "%H:%M", time.localtime(time.time() + per_step * (run.total_steps - outcome.step))
            )
            speed += f", ends at about {end_time}" if self._is_whole_training else ""
            self._print(
                f"{self._epoch(run)}  step {outcome.step} of {run.total_steps}  {losses}  {speed}"
            )

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if run.is_main:
            values = self._values(metrics)
            best = "  (best)" if run.best.get("step") == run.step else ""
            self._print(f"epoch {round(run.epoch, 2):g}  step {run.step}  {values}{best}")

    def on_end(self, run: RunView) -> None:
        if self._bar:
            self._bar.draw(run.step, self._epoch(run), "")
            self._bar.stop()
            self._bar = None

    def _values(self, numbers: Mapping[str, float]) -> str:
        return "  ".join(
            f"{name} {value:.4f}"
            for name, value in numbers.items()
            if self._names is None or name in self._names
        )

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, highlight=False, soft_wrap=True)
        if self._bar is None:
            self._last_draw = time.monotonic()

    def _epoch(self, run: RunView) -> str:
        return f"epoch {min(run.step // run.steps_per_epoch + 1, run.max_epochs)}/{run.max_epochs}"


class _TerminalBar:
    """Progress bar of Rich, removed when it stops."""

    def __init__(self, console: PlainConsole, total: int, step: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            # Names of losses are no markup
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, completed=step, losses="")
        self._progress.start()

    def draw(self, step: int, epoch: str, losses: str) -> None:
        self._progress.update(
            self._task, completed=step, description=epoch, losses=losses, refresh=True
        )

    def stop(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """Output of a notebook's cell, replaced at each update: HTML, without widgets."""

    def __init__(self, total: int, step: int) -> None:
        from IPython.display import display

        self._total, self._first, self._start = total, step, time.monotonic()
        self._display: Any = display(self._output(step, "", ""), raw=True, display_id=True)

    def draw(self, step: int, epoch: str, losses: str) -> None:
        self._display.update(self._output(step, epoch, losses), raw=True)

    def stop(self) -> None:
        pass

    def _output(self, step: int, epoch: str, losses: str) -> dict[str, str]:
        elapsed_s = time.monotonic() - self._start
        # Steps of an earlier attempt took none of this time
        remaining_s = (
            elapsed_s / (step - self._first) * (self._total - step) if step > self._first else 0.0
        )
        parts = [
            epoch,
            f"{step}/{self._total}",
            losses,
            f"{elapsed_s:.0f} s",
            f"{remaining_s:.0f} s left" if remaining_s else "",
        ]
        text = printable(redact("  ".join(filter(None, parts))))
        return {
            "text/plain": text,
            "text/html": f"<progress value='{step}' max='{self._total}'></progress> "
            f"<code>{html.escape(text)}</code>",
        }
