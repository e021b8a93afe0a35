"""Where the work runs.

Only strategies know about processes: recipes, data sets and the loop do not.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samewise.runner.data.loading import MicroBatch
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.interfaces import Loss
from samewise.runner.records.on_device import begin_numbers
from samewise.runner.strategies.layout import Layout
from samewise.runner.strategies.peers import Alone, Peers


@dataclass
class Tally:
    """What losses came to in a step: sums, by name, and their count."""

    count: float = 0.0
    nominal: float = 1.0
    """What each loss was divided by before its backward pass."""
    sums: dict[str, Any] = field(default_factory=dict[str, Any])
    """Numbers; float64[] on a device, until they are read."""
    seen: tuple[tuple[int, Any], ...] = ()
    """Digests of each micro-batch as it was loaded and as the model got it, in order; none where
    nothing is traced. On a device the second is what reads it."""
    explain: Callable[[], None] | None = None
    """Raises what the recipe knows of a loss that is not finite. Of a micro-batch, until it is read
    or added to others."""

    @classmethod
    def of(cls, loss: Loss, *, nominal: float, seen: tuple[tuple[int, Any], ...] = ()) -> Tally:
        """A micro-batch's, whose loss was divided by `nominal` before its backward pass."""
        sums = {
            name: one.item() if one.is_cpu else one.detach().double()
            for name, one in {"loss": loss.total, **loss.parts}.items()
        }
        return cls(loss.count, nominal, sums, seen, loss.explain)

    @classmethod
    def begin_reading(
        cls, tallies: Sequence[Tally], norms: Sequence[Tensor] = ()
    ) -> Callable[[], tuple[list[Tally], list[float]]]:
        """Start to copy some, and tensors' single values, from the device, all together.

        Return what waits for the copy and gives them in numbers.
        """
        copied = begin_numbers(
            [*(value for tally in tallies for value in tally.sums.values()), *norms]
        )

        def read() -> tuple[list[Tally], list[float]]:
            values = iter(copied())
            sums = [{name: next(values) for name in tally.sums} for tally in tallies]
            seen = [
                tuple((one, other() if callable(other) else other) for one, other in tally.seen)
                for tally in tallies
            ]
            return [
                cls(tally.count, tally.nominal, by_name, digests)
                for tally, by_name, digests in zip(tallies, sums, seen, strict=True)
            ], list(values)

        return read

    @property
    def weight(self) -> float:
        """What the sum of gradients is still to be divided by."""
        return self.count / self.nominal

    def means(self, *, prefix: str = "") -> dict[str, float]:
        """The losses by name, per item counted; once it has been read."""
        return {f"{prefix}{name}": value / self.count for name, value in self.sums.items()}


Forward = Callable[[MicroBatch], tuple[Tensor, Tensor, Callable[[], Tally]]]
"""Runs a micro-batch up to its loss, calling the module that `wrap` gave. Returns the loss, the
gradient for its `backward`, and what then gives the tally."""


class Strategy(abc.ABC):
    """Carries the replicas of a run.

    The loop asks, for each step: `carry` the micro-batches, forward and backward; then `reduce`,
    after which every parameter's `.grad` is the *sum* over all micro-batches of the step, wherever
    they ran. How weights lie in the processes is its `layout`'s matter, what these say to each
    other its `peers`'.
    """

    level = "R1"
    """The strongest promise that a run under it can state."""
    pretends = True
    """Whether one rank can take a step while the others are only pretended, for `samewise check`.
    """
    unfreezes = False
    """Whether parameters may begin to be trained in the midst of training."""
    compiles = False
    """Whether `compiled` may be other than the model: it is called as a whole."""

    def __init__(self) -> None:
        self.peers: Peers = Alone()
        """All ranks of the run. `begin` joins them."""
        self.layout = Layout(self.peers)
        """How weights lie in them. Settled once `wrap` has been called."""
        self.compiled: Callable[[nn.Module], nn.Module] = lambda model: model
        """Makes of a model what `wrap` calls in training, with the same parameters and buffers."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    def processes(self, device: str, replicas: int) -> int:
        """How many processes `samewise train` is to start on this machine.

        ConfigError if they cannot carry the replicas, or there are not devices enough.
        """
        return 1

    @abc.abstractmethod
    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        """Take up the work on `device`: auto, cpu or cuda.

        ConfigError if the device does not exist, or the replicas cannot be carried.
        """

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training, its parameters already on the device."""

    @property
    @abc.abstractmethod
    def micro_batches(self) -> Sequence[int]:
        """The numbers of the micro-batches that this process carries in every step, in order."""

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one of them.

        One that has no samples is left out.
        """
        return nullcontext()

    def coming(self, plan: Plan, step: int) -> None:
        """The step that comes, counted from 0, so that one whose processes wait for each other
        knows which have samples. Nobody waits here.

        ConfigError if the plan has steps that cannot be carried.
        """

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        """Run forward and backward of this process's micro-batches of a step, one after the other.

        Their tallies.

        `forward` runs one of them up to its loss; the same again where it is called again. One that
        cuts the model, not the batch, has an order of its own.
        """
        tallies: list[Tally] = []
        for micro in micro_batches:
            with self.micro_batch(micro.number):
                loss, first, tally = forward(micro)
                loss.backward(first)
            tallies.append(tally())
        return tallies

    @abc.abstractmethod
    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        """Finish the exchange of gradients, and add up the tallies of all replicas.

        `tallies` are this process's, a micro-batch each.
        """

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within it every process may call the model by itself, as often as it likes.

        All ranks must enter it.
        """
        return nullcontext()

    def require_fit(self, model: nn.Module) -> None:
        """Raise a ConfigError where `wrap` would refuse the model.

        Asked by `samewise check` where the others cannot be pretended.
        """

    def describe(self) -> list[str]:
        """Sentences for `samewise check` about how the work is divided, besides which rank takes
        which micro-batches.
        """
        return []

    def cautions(self) -> list[Problem]:
        """What the settings leave unused on this machine; asked after `begin`."""
        return []

    def buffer_bytes(self) -> int:
        """What this process's buffers for sums of gradients take, besides the gradients of a
        backward pass.
        """
        return 0

    def gather(self, tallies: Sequence[Tally], facts: Any = None) -> tuple[list[Tally], list[Any]]:
        """The tallies of all ranks, in order, and a further small value of each rank.

        With them the ranks agree whether to stop.
        """
        said = self.peers.gather(
            (
                [vars(tally) for tally in Tally.begin_reading(tallies)()[0]],
                facts,
                self.peers.stop_heard,
            )
        )
        self.peers.stop_agreed = next((heard for _, _, heard in said if heard), None)
        return [Tally(**tally) for some, _, _ in said for tally in some], [
            facts for _, facts, _ in said
        ]

    def abandon(self, error: BaseException) -> None:
        """This rank fails: tell the others at once."""
        self.peers.abandon(error)

    def end(self) -> None:
        """Leave; called once, when this process has written all it has to write."""
        self.peers.leave()


def add_tallies(tallies: Sequence[Tally]) -> Tally:
    """The sum over a binary tree of the tallies' numbers, so that it does not depend on who carries
    them.
    """
    row = list(tallies)
    while len(row) > 1:
        pairs = [_pair(row[place], row[place + 1]) for place in range(0, len(row) - 1, 2)]
        row = pairs + row[len(row) // 2 * 2 :]
    return row[0]


def _pair(left: Tally, right: Tally) -> Tally:
    names = dict.fromkeys([*left.sums, *right.sums])
    sums = {name: left.sums.get(name, 0.0) + right.sums.get(name, 0.0) for name in names}
    return Tally(left.count + right.count, left.nominal, sums, left.seen + right.seen)


def choose_device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu` or `cuda`.

    ConfigError if `cuda` was requested, but there is none, or if its memory is used up.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError(
            Problem(
                "device",
                "torch finds no CUDA device",
                name,
                "cpu, or auto",
                "run `samewise doctor` to see what this machine has",
            )
        )
    if name == "cpu" or not found:
        return torch.device("cpu")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=device)
    except (
        RuntimeError
    ) as error:  # with another process's tensors there, not even CUDA's own memory may be left
        hint = (
            "`nvidia-smi` shows what uses it; CUDA_VISIBLE_DEVICES selects another device, "
            "device=cpu uses none"
        )
        raise ConfigError(
            Problem(
                "device", f"the CUDA device cannot be used: {first_line(error)}", name, hint=hint
            )
        ) from error
    return device
