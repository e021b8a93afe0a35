"""The results of a step's phases: read together, since each read from a device waits for it, and checked before they reach the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from samewise.runner.interfaces import Outcome
from samewise.runner.records.digest import combine
from samewise.runner.strategies.base import Tally
from samewise.runner.training.finite import largest, require_finite_step
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run


class _Unread(NamedTuple):
    """What a phase came to, of which nobody has read anything yet.

    `gradients` is what `largest` made of those of all of the model's parameters; None: they are still there. `explain` raises what the recipe knows of a loss.
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
        self._losses, self._norms = dict[str, float](), dict[str, float]()
        self._seen, self._count = list[tuple[int, int]](), 0.0

    def add(self, phase: TrainingPhase, tally: Tally, norm: Tensor, micro_batches: Sequence[Tally]) -> None:
        """Take in a phase whose optimizer is about to step. On the CPU it is read at once; a device is waited for once, at the last phase.

        TrainingError if a loss or gradient that was read is not finite.
        """
        reads = phase is self._run.phases[-1] or self._run.strategy.device.type == "cpu"
        gradients = None if reads else largest([one.grad for one in self._run.parameters])
        self._unread.append(_Unread(phase, tally, norm, gradients, [one.explain for one in micro_batches if one.explain]))
        if reads:
            self._read()

    def _read(self) -> None:
        tallies, norms = Tally.read([one.tally for one in self._unread], [one.norm for one in self._unread])
        for one, tally, norm in zip(self._unread, tallies, norms, strict=True):
            prefix = "" if len(self._run.phases) == 1 else f"{one.phase.spec.name}/"
            means = tally.means(prefix=prefix)
            self._losses |= means
            self._norms[f"{prefix}gradient_norm"] = norm
            self._seen += tally.seen
            self._count = tally.count
            require_finite_step(self._run, means, norm, one.gradients, one.explain)
        self._unread.clear()

    def outcome(self) -> Outcome:
        """Of the step that the run has just done."""
        batch, inputs = map(combine, zip(*self._seen, strict=True)) if self._seen else (0, 0)
        return Outcome(self._run.step, self._losses, self._count, self._norms, batch, inputs)
