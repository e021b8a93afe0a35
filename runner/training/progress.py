"""How far a run has come: what changes as it trains, beside the states of its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where a run stands. A checkpoint holds all of it."""

    step: int = 0
    """Optimizer steps done; the only position there is."""
    evaluated: int = -1
    """The step at which the last evaluation was made."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of the last evaluation."""
    best: dict[str, float] = field(default_factory=dict[str, float])
    """Of the best evaluation by `evaluate.monitor`, with its `step`."""
    also: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Of the best evaluation by each metric of `evaluate.also`, with its `step`."""
    earlier_s: float = 0.0
    """Seconds spent training before the clock was started."""
    _started: float | None = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Spent training, in earlier sessions of the run and in this one."""
        return self.earlier_s + (0.0 if self._started is None else time.monotonic() - self._started)

    def stop_clock(self) -> None:
        """Training has ended; what follows is not its time."""
        self.earlier_s, self._started = self.seconds, None

    def state(self) -> dict[str, Any]:
        """All of it, in plain values."""
        also = {"also": self.also} if self.also else {}
        return {"step": self.step, "evaluated": self.evaluated, "metrics": self.metrics, "best": self.best, **also, "seconds": self.seconds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` was taken."""
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.metrics, self.best, self.earlier_s = state["metrics"], state["best"], state["seconds"]
        self.also = state.get("also", {})
