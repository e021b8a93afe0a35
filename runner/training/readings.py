"""The results of a step's phases: read together, since each read from a device waits for it, and
checked: on the CPU before they reach the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from samewise.runner.interfaces import Outcome
from samewise.runner.records.digest import combine
from samewise.runner.strategies.base import Tally
from samewise.runner.training.guards.finite import largest, require_finite_step
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run


class _Unread(NamedTuple):
    """What a phase came to, of which nobody has read anything yet.

    `gradients` is what `largest` made of those of all of the model's parameters; None: they are
    still there. `explain` raises what the recipe knows of a loss.
    """

    phase: TrainingPhase
    tally: Tally
    norm: Tensor
    gradients: Sequence[Tensor | None] | None
    explain: Sequence[Callable[[], None]]


class Readings:
    """What one step of a run came to, phase by phase."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unread = list[_Unread]()
        self._read: Callable[[], tuple[list[Tally], list[float]]] | None = None
        self._losses, self._norms = dict[str, float](), dict[str, float]()
        self._seen, self._count = list[tuple[int, int]](), 0.0

    def add(
        self, phase: TrainingPhase, tally: Tally, norm: Tensor, micro_batches: Sequence[Tally]
    ) -> None:
        """Take in a phase whose optimizer is about to step.

        On the CPU it is read at once; from a device all phases are copied together, at the last
        one.

        TrainingError if a loss or gradient that was read is not finite.
        """
        on_cpu, is_last = self._run.strategy.device.type == "cpu", phase is self._run.phases[-1]
        gradients = (
            None if on_cpu or is_last else largest([one.grad for one in self._run.parameters])
        )
        self._unread.append(
            _Unread(
                phase, tally, norm, gradients, [one.explain for one in micro_batches if one.explain]
            )
        )
        if on_cpu or is_last:
            self._read = Tally.begin_reading(
                [one.tally for one in self._unread], [one.norm for one in self._unread]
            )
        if on_cpu:
            self.finish()

    def finish(self) -> None:
        """Wait for what has been copied from a device, and check it: its optimizers have been
        launched, so the device still has work.

        TrainingError if a loss or gradient is not finite.
        """
        tallies, norms = self._read() if self._read else ([], [])
        for one, tally, norm in zip(self._unread, tallies, norms, strict=True):
            prefix = "" if len(self._run.phases) == 1 else f"{one.phase.spec.name}/"
            means = tally.means(prefix=prefix)
            self._losses |= means
            self._norms[f"{prefix}gradient_norm"] = norm
            self._seen += tally.seen
            self._count = tally.count
            require_finite_step(self._run, means, norm, one.gradients, one.explain)
        self._unread, self._read = [], None

    def outcome(self) -> Outcome:
        """Of the step that the run has just done."""
        batch, inputs = map(combine, zip(*self._seen, strict=True)) if self._seen else (0, 0)
        return Outcome(
            self._run.step,
            self._losses,
            self._count,
            self._norms,
            batch,
            inputs,
            self._run.plan.size(self._run.step - 1),
        )
