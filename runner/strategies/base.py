"""Strategies decide where the work of a step runs.

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
    """Loss sums by name, and the number of items they cover."""

    count: float = 0.0
    """Number of items the means are taken over."""
    nominal: float = 1.0
    """Divisor of each loss before its backward pass."""
    sums: dict[str, Any] = field(default_factory=dict[str, Any])
    """Numbers; float64[] on a device, until they are read."""
    digests: tuple[tuple[int, Any], ...] = ()
    """Digests of each micro-batch as loaded and as the model received it, in order.

    Empty without a trace. On a device, the second is a function that reads the digest.
    """
    explain: Callable[[], None] | None = None
    """Raises the recipe's explanation of a loss that is not finite.

    A micro-batch has it until its tally is read or added to others.
    """

    @classmethod
    def of(cls, loss: Loss, *, nominal: float, digests: tuple[tuple[int, Any], ...] = ()) -> Tally:
        """Make a micro-batch's tally.

        Its loss was divided by `nominal` before its backward pass.
        """
        sums = {
            # Numbers on a device are read later, all with one copy (docs/decisions/one_wait.md)
            name: value.item() if value.is_cpu else value.detach().double()
            for name, value in {"loss": loss.total, **loss.parts}.items()
        }
        return cls(loss.count, nominal, sums, digests, loss.explain)

    @classmethod
    def begin_reading(
        cls, tallies: Sequence[Tally], norms: Sequence[Tensor] = ()
    ) -> Callable[[], tuple[list[Tally], list[float]]]:
        """Start to copy tallies, and tensors' single values, from the device in one transfer.

        Return a function that waits for the copy and returns them in numbers.
        """
        read_numbers = begin_numbers(
            [*(value for tally in tallies for value in tally.sums.values()), *norms]
        )

        def read() -> tuple[list[Tally], list[float]]:
            values = iter(read_numbers())
            sums = [{name: next(values) for name in tally.sums} for tally in tallies]
            digests = [
                tuple(
                    (loaded, sent() if callable(sent) else sent) for loaded, sent in tally.digests
                )
                for tally in tallies
            ]
            return [
                cls(tally.count, tally.nominal, *numbers)
                for tally, numbers in zip(tallies, zip(sums, digests, strict=True), strict=True)
            ], list(values)

        return read

    @property
    def weight(self) -> float:
        """Number by which the sum of gradients is still to be divided."""
        return self.count / self.nominal

    def means(self, *, prefix: str = "") -> dict[str, float]:
        """Return the losses by name, per item counted, once the tally has been read."""
        return {f"{prefix}{name}": value / self.count for name, value in self.sums.items()}


Forward = Callable[[MicroBatch], tuple[Tensor, Tensor, Callable[[], Tally]]]
"""Runs a micro-batch up to its loss, calling the module that `wrap` returned.

Returns the loss, the gradient for its `backward`, and a function that then returns the tally.
"""


class Strategy(abc.ABC):
    """Carries the replicas of a run.

    For each step the loop calls `carry` with the micro-batches, which runs their forward and
    backward passes, and then `reduce`, after which every parameter's `.grad` is the *sum* over all
    micro-batches of the step, wherever they ran. The `layout` says how weights are divided among
    the processes; `peers` are the connections between them.
    """

    level = "R1"
    """Strongest promise (R0 to R3) that a run under this strategy can state."""
    pretends = True
    """Whether one rank can take a step while `samewise check` simulates the others."""
    unfreezes = False
    """Whether parameters may begin to be trained in the midst of training."""
    at_once = 1
    """Number of micro-batches whose activations a process holds at a time."""
    compiles = False
    """Whether `compiled` may differ from the model, which is then called as a whole."""

    def __init__(self) -> None:
        self.peers: Peers = Alone()
        """All ranks of the run; `begin` connects them."""
        self.layout = Layout(self.peers)
        """Division of the weights among the ranks; final once `wrap` has been called."""
        self.compiled: Callable[[nn.Module], nn.Module] = lambda model: model
        """Makes the module that `wrap` returns, with the model's parameters and buffers."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device on which this process computes."""

    def processes(self, device: str, replicas: int) -> int:
        """Return the number of processes that `samewise train` starts on this machine.

        Args:
            device: The config's device.
            replicas: Number of replicas.

        Raises:
            ConfigError: The processes cannot carry the replicas, or there are too few devices.
        """
        return 1

    @abc.abstractmethod
    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        """Connect the processes, and choose the device.

        Args:
            device: auto, cpu or cuda.
            replicas: Number of replicas.
            accumulate: Micro-batches of each replica in a step.

        Raises:
            ConfigError: The device does not exist, or the replicas cannot be carried.
        """

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; its parameters are on the device already."""

    @property
    @abc.abstractmethod
    def micro_batches(self) -> Sequence[int]:
        """Numbers of the micro-batches that this process carries in every step, in order."""

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Enter a context for the forward and backward pass of a micro-batch that has samples."""
        return nullcontext()

    def prepare_step(self, plan: Plan, step: int) -> None:
        """Prepare for a step, counted from 0, in which some micro-batches may have no samples.

        Raises:
            ConfigError: The plan has steps that cannot be carried.
        """

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        """Run forward and backward of this process's micro-batches of a step, in order.

        Args:
            micro_batches: The micro-batches that have samples.
            forward: Runs one of them up to its loss. It may be called again, with the same result.

        Returns:
            The tallies of the micro-batches.
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

        Args:
            tallies: This process's, one for each micro-batch.

        Returns:
            The step's tally.
        """

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter a context in which each process may call the model on its own.

        All ranks must enter it.
        """
        return nullcontext()

    def require_fit(self, model: nn.Module) -> None:
        """Raise a ConfigError where `wrap` would refuse the model.

        `samewise check` calls it where other ranks cannot be simulated.
        """

    def describe(self) -> list[str]:
        """Describe for `samewise check` how the work is divided, besides the micro-batches."""
        return []

    def cautions(self) -> list[Problem]:
        """Warn of settings that leave devices unused; called after `begin`."""
        return []

    def buffer_bytes(self) -> int:
        """Return the bytes of this process's buffers for sums of gradients.

        Without the gradients of a backward pass.
        """
        return 0

    def gather(self, tallies: Sequence[Tally], facts: Any = None) -> tuple[list[Tally], list[Any]]:
        """Return the tallies of all ranks, in order, and a further small value of each rank.

        Ranks also agree here whether to stop.
        """
        messages = self.peers.gather(
            (
                [vars(tally) for tally in Tally.begin_reading(tallies)()[0]],
                facts,
                self.peers.stop_heard,
                self.peers.save_heard,
            )
        )
        tallies_by_rank, all_facts, reasons, saves = zip(*messages, strict=True)
        self.peers.stop_agreed = next(filter(None, reasons), None)
        self.peers.save_agreed = any(saves)
        return [Tally(**tally) for own in tallies_by_rank for tally in own], list(all_facts)

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one fails."""
        self.peers.abandon(error)

    def end(self) -> None:
        """Disconnect; called once, when this process has written everything."""
        self.peers.leave()


def add_tallies(tallies: Sequence[Tally]) -> Tally:
    """Add up tallies over a binary tree of their numbers, whichever process has them."""
    row = list(tallies)
    while len(row) > 1:
        pairs = [_pair(row[index], row[index + 1]) for index in range(0, len(row) - 1, 2)]
        row = pairs + row[len(row) // 2 * 2 :]
    return row[0]


def _pair(first: Tally, second: Tally) -> Tally:
    # A micro-batch's loss may lack parts that another's has
    names = dict.fromkeys([*first.sums, *second.sums])
    sums = {name: first.sums.get(name, 0.0) + second.sums.get(name, 0.0) for name in names}
    return Tally(first.count + second.count, first.nominal, sums, first.digests + second.digests)


def choose_device(name: str) -> torch.device:
    """Return the torch device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: `cuda` was requested and does not exist, or its memory is used up.
    """
    has_cuda = torch.cuda.is_available()
    ConfigError.raise_if(
        name == "cuda" and not has_cuda,
        "device",
        "torch finds no CUDA device",
        name,
        "cpu, or auto",
        "run `samewise doctor` to see what this machine has",
    )
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=device)
    # Another process may have left too little memory even for CUDA's own context.
    except RuntimeError as error:
        raise ConfigError(
            Problem(
                "device",
                f"the CUDA device cannot be used: {first_line(error)}",
                name,
                hint="`nvidia-smi` shows what uses it; CUDA_VISIBLE_DEVICES selects another "
                "device, device=cpu uses none",
            )
        ) from error
    return device
