"""Where the work runs. Only strategies know of processes: recipes, data sets and the loop do not."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samewise.runner.data.loading import MicroBatch
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Loss
from samewise.runner.optim.norm import total_norm
from samewise.runner.processes.peers import Alone, Peers
from samewise.runner.records.digest import digests


@dataclass
class Tally:
    """What losses came to in a step: sums, by name, and their count."""

    count: float = 0.0
    nominal: float = 1.0
    """What each loss was divided by before its backward pass."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    seen: tuple[tuple[int, int], ...] = ()
    """Digests of each micro-batch as it was loaded and as the model got it, in order; none where nothing is traced."""

    @classmethod
    def of(cls, loss: Loss, *, nominal: float, seen: tuple[tuple[int, int], ...] = ()) -> Tally:
        """A micro-batch's, whose loss was divided by `nominal` before its backward pass."""
        return cls(loss.count, nominal, {"loss": loss.total.item(), **{name: value.item() for name, value in loss.parts.items()}}, seen)

    @property
    def weight(self) -> float:
        """What the sum of gradients is still to be divided by."""
        return self.count / self.nominal

    def means(self, *, prefix: str = "") -> dict[str, float]:
        """The losses by name, per item counted."""
        return {f"{prefix}{name}": value / self.count for name, value in self.sums.items()}


Forward = Callable[[MicroBatch], tuple[Tensor, Callable[[], Tally]]]
"""Runs a micro-batch up to its loss, calling the module that `wrap` gave. Returns what to call backward on, and what gives the tally once that is done."""


class Strategy(abc.ABC):
    """Carries the replicas of a run.

    The loop asks, for each step: `carry` the micro-batches, forward and backward; then `reduce`, after which every parameter's `.grad` is the *sum*
    over all micro-batches of the step, wherever they ran.
    """

    level = "R1"
    """The strongest promise that a run under it can state."""
    pretends = True
    """Whether one rank can take a step while the others are only pretended, for `samewise check`."""
    peers: Peers = Alone()
    """All ranks of the run. `begin` joins them."""

    def __init__(self) -> None:
        self._heard: str | None = None
        self._agreed: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs, draws and writes."""
        return self.peers.rank == 0

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    def processes(self, device: str, replicas: int) -> int:
        """How many processes `samewise train` is to start on this machine.

        Raises:
            ConfigError: they cannot carry so many replicas, or there are not devices enough.
        """
        return 1

    @abc.abstractmethod
    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        """Take up the work: `device` is auto, cpu or cuda.

        Raises:
            ConfigError: there is no such device, or the replicas cannot be carried.
        """

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training, its parameters already on the device."""

    @property
    @abc.abstractmethod
    def micro_batches(self) -> Sequence[int]:
        """The numbers of the micro-batches that this process carries in every step, in order."""

    @abc.abstractmethod
    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one of them. One that has no samples is left out."""

    def coming(self, plan: Plan, step: int) -> None:
        """The step that comes, counted from 0, so that one whose processes wait for each other knows which have samples. Nobody waits here.

        Raises:
            ConfigError: the plan has steps that cannot be carried.
        """

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        """Run forward and backward of a step's micro-batches, one after the other. One that cuts the model, not the batch, has an order of its own.

        Args:
            micro_batches: This process's.
            forward: Runs one of them up to its loss; the same again where it is called again.

        Returns:
            Their tallies.
        """
        tallies: list[Tally] = []
        for micro in micro_batches:
            with self.micro_batch(micro.number):
                loss, tally = forward(micro)
                loss.backward()
            tallies.append(tally())
        return tallies

    @abc.abstractmethod
    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        """Finish the exchange of gradients, and add up the tallies of all replicas. `tallies` are this process's, a micro-batch each."""

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step: this new one, or one like it that keeps only this process's share of the state."""
        return optimizer

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What `share_optimizer` gave, as a state that any strategy can load. All ranks must call it; only rank 0's answer is whole."""
        return optimizer.state_dict()

    shards = 1
    """Into how many parts the parameters are cut, each process holding one."""

    def whole(self, state: Any) -> Any:
        """A state as one process would hold it, with nothing in shards, on rank 0. All ranks must call it."""
        return state

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """A tensor, or this process's shard of one, to be filled from a checkpoint in shards."""
        return torch.empty(shape, dtype=dtype)

    def digests(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """A digest for each tensor, on rank 0. All ranks must call it."""
        return digests(tensors) if self.is_main else []

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """float32[]: the 2-norm of all gradients together."""
        return total_norm(gradients)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of the run's model that lives as it does, for an average of weights."""
        return copy.deepcopy(model)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within it every process may call the model by itself, as often as it likes. All ranks must enter it."""
        return nullcontext()

    def share(self, batches: int) -> Sequence[int]:
        """Which of an evaluation's batches this process takes."""
        return range(self.peers.rank, batches, self.peers.size)

    def collect(self, outcomes: Sequence[Any]) -> list[Any]:
        """The evaluation outcomes of all processes, in the order of their batches."""
        by_rank = self.peers.gather(list(outcomes))
        return [by_rank[number % len(by_rank)][number // len(by_rank)] for number in range(sum(map(len, by_rank)))]

    def first(self, make: Callable[[], Any]) -> Any:
        """What the main process makes, in every process; what it raises there ends all of them."""
        return self.peers.first(make)

    def require_fit(self, model: nn.Module) -> None:
        """Raise a ConfigError where `wrap` would refuse the model; asked by `samewise check` where the others cannot be pretended."""

    def described(self) -> list[str]:
        """What `samewise check` tells of how the work is divided, beside who takes which micro-batches: sentences."""
        return []

    def ask_stop(self, reason: str) -> None:
        """A signal has asked this process to stop; the ranks agree on it in their next exchange, so that all stop after the same step."""
        self._heard = reason
        if self.peers.size == 1:
            self._agreed = reason

    @property
    def stop_heard(self) -> bool:
        """Whether this process was asked to stop."""
        return self._heard is not None

    @property
    def stop_asked(self) -> str | None:
        """Why all ranks are to stop, once they have agreed on it."""
        return self._agreed

    def gathered(self, tallies: Sequence[Tally], facts: Any = None) -> tuple[list[Tally], list[Any]]:
        """The tallies of all ranks, in order, and a further small value of each rank; with them the ranks agree whether to stop."""
        said = self.peers.gather(([vars(tally) for tally in tallies], facts, self._heard))
        self._agreed = next((heard for _, _, heard in said if heard), None)
        return [Tally(**tally) for some, _, _ in said for tally in some], [facts for _, facts, _ in said]

    def abandon(self, error: BaseException) -> None:
        """This rank fails: tell the others at once."""
        self.peers.abandon(error)

    def end(self) -> None:
        """Leave; called once, when this process has written all it has to write."""
        self.peers.leave()


def added(tallies: Sequence[Tally]) -> Tally:
    """The sum over a binary tree of the tallies' numbers, so that it does not depend on who carries them."""
    row = list(tallies)
    while len(row) > 1:
        pairs = [_pair(row[place], row[place + 1]) for place in range(0, len(row) - 1, 2)]
        row = pairs + row[len(row) // 2 * 2 :]
    return row[0]


def _pair(left: Tally, right: Tally) -> Tally:
    names = dict.fromkeys([*left.sums, *right.sums])
    sums = {name: left.sums.get(name, 0.0) + right.sums.get(name, 0.0) for name in names}
    return Tally(left.count + right.count, left.nominal, sums, left.seen + right.seen)


def device_named(name: str) -> torch.device:
    """The torch device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: `cuda` was asked for and there is none.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError(Problem("device", "torch sees no CUDA device", name, "cpu, or auto", "`samewise doctor` says what this machine has"))
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" or (name == "auto" and found) else torch.device("cpu")
