"""Stop a training after some time, so that the same command resumes it."""

import time
from typing import final

from samewise.runner.errors import require_at_least
from samewise.runner.interfaces import Callback, Outcome, RunView


@final
class TimeLimit(Callback):
    """Saves and stops once this start has trained for a time.

    The time changes no result, since a run that has stopped is resumed to the same bits.

    Args:
        minutes: The time.

    Raises:
        ConfigError: It is negative.
    """

    def __init__(self, *, minutes: float) -> None:
        require_at_least({"minutes": minutes}, least=0)
        self._minutes, self._start = minutes, time.monotonic()

    def on_start(self, run: RunView) -> None:
        self._start = time.monotonic()

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        if time.monotonic() - self._start >= 60 * self._minutes and not run.is_stopping:
            run.interrupt(f"the time limit of {self._minutes:g} minutes")
