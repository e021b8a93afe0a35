"""Shows what is trained, its progress and when it will end: a bar on a terminal or in a notebook,
otherwise a line a minute; a line for each evaluation.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping
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
"""Seconds after which the first line is due: it says when the run will end."""


@final
class ProgressBar(Callback):
    """Shows steps, loss, speed and the time left, on standard error.

    Args:
        refresh_s: Seconds between two drawings.
        line_s: Without a bar: the seconds between lines that report progress.
    """

    def __init__(self, *, refresh_s: float = 0.2, line_s: float = 60.0) -> None:
        self._refresh_s, self._line_s = refresh_s, line_s
        self._console = PlainConsole(stderr=True)
        self._bar: _TerminalBar | _NotebookBar | None = None
        self._drawn = 0.0
        self._wait_s = min(_FIRST_S, line_s)
        self._began: tuple[float, int] = (0.0, 0)
        self._last: int | None = None
        self._trains = False

    def on_start(self, run: RunView) -> None:
        self._began, self._last, self._trains = (time.monotonic(), run.step), run.step, True
        if run.is_main:
            epochs = (
                f"{run.total_steps} steps of {run.batch_size} samples, {run.steps_per_epoch} "
                "per epoch"
            )
            self._say(
                run.label,
                f"  {run.folder} on {run.device}",
                f"  {run.parameters:,} parameters, {run.samples:,} samples, {epochs}",
            )
            if run.left_out:
                self._say(f"  evaluates {run.left_out}")
        if run.step and run.is_main:
            self._say(f"resumed at step {run.step} of {run.total_steps}")
        if run.is_main and self._console.is_jupyter:
            self._bar = _NotebookBar(run.total_steps, run.step)
        elif run.is_main and sys.stderr.isatty():
            self._bar = _TerminalBar(self._console, run.total_steps, run.step)

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        now = time.monotonic()
        if (
            self._last is None or outcome.step != self._last + 1
        ):  # `verify` repeats a part of the training: its end is not the training's
            self._began, self._drawn, self._trains = (now, outcome.step), now, False
        self._last = outcome.step
        if (
            not run.is_main
            or outcome.step == self._began[1]
            or now - self._drawn <= (self._refresh_s if self._bar else self._wait_s)
        ):
            return
        self._drawn = now
        losses = "  ".join(f"{name} {value:.4f}" for name, value in outcome.losses.items())
        if self._bar:
            self._bar.draw(outcome.step, self._epoch(run), losses)
        else:
            self._wait_s = self._line_s
            per_step = (now - self._began[0]) / (outcome.step - self._began[1])
            speed = f"{1 / per_step:.3g} steps/s"
            ends = time.strftime(
                "%H:%M", time.localtime(time.time() + per_step * (run.total_steps - outcome.step))
            )
            speed += f", ends at about {ends}" if self._trains else ""
            self._say(
                f"{self._epoch(run)}  step {outcome.step} of {run.total_steps}  {losses}  {speed}"
            )

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if run.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            best = "  (best)" if run.best.get("step") == run.step else ""
            self._say(f"epoch {round(run.epoch, 2):g}  step {run.step}  {shown}{best}")

    def on_end(self, run: RunView) -> None:
        if self._bar:
            self._bar.draw(run.step, self._epoch(run), "")
            self._bar.stop()
            self._bar = None

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, highlight=False, soft_wrap=True)
        if self._bar is None:
            self._drawn = time.monotonic()

    def _epoch(self, run: RunView) -> str:
        return f"epoch {min(run.step // run.steps_per_epoch + 1, run.max_epochs)}/{run.max_epochs}"


class _TerminalBar:
    """Rich's progress bar, removed when it stops."""

    def __init__(self, console: PlainConsole, total: int, step: int) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._progress.add_task("", total=total, completed=step, losses="")
        self._progress.start()

    def draw(self, step: int, epoch: str, losses: str) -> None:
        self._progress.update(
            self._task, completed=step, description=epoch, losses=losses, refresh=True
        )

    def stop(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """An output of a notebook's cell, replaced at each update: HTML, without widgets.

    Its last state stays.
    """

    def __init__(self, total: int, step: int) -> None:
        from IPython.display import display

        self._total, self._first, self._began = total, step, time.monotonic()
        self._shown: Any = display(self._drawn(step, "", ""), raw=True, display_id=True)

    def draw(self, step: int, epoch: str, losses: str) -> None:
        self._shown.update(self._drawn(step, epoch, losses), raw=True)

    def stop(self) -> None:
        pass

    def _drawn(self, step: int, epoch: str, losses: str) -> dict[str, str]:
        elapsed_s = time.monotonic() - self._began
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
