"""Reads a step's losses and norms: together, since each read from a device waits for it.

They are checked when they are read; on the CPU that is before they reach the weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from samewise.runner.interfaces import Outcome
from samewise.runner.records.digest import combine
from samewise.runner.strategies.base import Tally
from samewise.runner.training.guards.catalogue import watch
from samewise.runner.training.guards.finite import largest
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Guard, Numbers, Run


class _Unread(NamedTuple):
    """The results of a phase, still on the device."""

    phase: TrainingPhase
    tally: Tally
    norm: Tensor
    gradients: Sequence[Tensor | None] | None
    """The `largest` magnitude of each parameter's gradient; None: the gradients still exist."""
    explain: Sequence[Callable[[], None]]
    """Functions that raise the recipe's own explanation of a loss that is not finite."""


class Readings:
    """The results of a step of a run, phase by phase.

    Args:
        run: The run.
        phases: The phases of the step, in order. Of one that trains several times, the last loss
            is the step's.
    """

    def __init__(self, run: Run, phases: Sequence[TrainingPhase]) -> None:
        self._run, self._phases = run, phases
        self._unread = list[_Unread]()
        self._read: Callable[[], tuple[list[Tally], list[float]]] | None = None
        self._losses, self._norms = dict[str, float](), dict[str, float]()
        self._seen, self._count = list[tuple[int, int]](), 0.0

    def add(
        self, phase: TrainingPhase, tally: Tally, norm: Tensor, micro_batches: Sequence[Tally]
    ) -> None:
        """Add the results of a phase whose optimizer is about to step.

        On the CPU they are read at once. From a device, those of all phases are copied together,
        at the last phase.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        on_cpu, is_last = self._run.strategy.device.type == "cpu", phase is self._phases[-1]
        # The next phase clears the gradients before the host has read whether these are finite
        gradients = None if on_cpu or is_last else largest([x.grad for x in self._run.parameters])
        self._unread.append(
            _Unread(phase, tally, norm, gradients, [x.explain for x in micro_batches if x.explain])
        )
        if on_cpu or is_last:
            self._read = Tally.begin_reading(
                [x.tally for x in self._unread], [x.norm for x in self._unread]
            )
        if on_cpu:
            self.finish()

    def finish(self) -> None:
        """Wait for the copies from a device, and check them.

        Call it after the optimizers' steps are launched, so the device still has work.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        tallies, norms = self._read() if self._read else ([], [])
        for unread, tally, norm in zip(self._unread, tallies, norms, strict=True):
            prefix = "" if len(self._run.phases) == 1 else f"{unread.phase.spec.name}/"
            means = tally.means(prefix=prefix)
            self._losses |= means
            self._norms[f"{prefix}gradient_norm"] = norm
            self._seen += tally.digests
            self._count = tally.count
            watch(
                self._run, Guard.on_numbers, Numbers(means, norm, unread.gradients, unread.explain)
            )
        self._unread, self._read = [], None

    def outcome(self) -> Outcome:
        """Return the outcome of the last step."""
        batch, inputs = map(combine, zip(*self._seen, strict=True)) if self._seen else (0, 0)
        return Outcome(
            self._run.step,
            self._losses,
            self._count,
            self._norms,
            batch,
            inputs,
            self._run.plan.size(self._run.step - 1),
            self._skipped(),
        )

    def _skipped(self) -> frozenset[str]:
        """Return the names of the parameters that only phases left out of this step train."""
        if len(self._run.phases) == 1 or {x.number for x in self._phases} == {
            *range(len(self._run.phases))
        }:
            return frozenset()
        trained = {id(x) for phase in self._phases for x in phase.parameters}
        idle = {id(x) for phase in self._run.phases for x in phase.parameters} - trained
        return frozenset(name for name, x in self._run.model.named_parameters() if id(x) in idle)
