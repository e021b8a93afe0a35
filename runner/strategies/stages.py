"""Stages of a model, each in its own process, for the strategies `pipeline` and `rpc`.

Every process has the whole model: what is divided is the work and the memory of activations. After
a step's backward pass each process hands the gradients of its stage to the others; so the weights
are whole and alike everywhere, and clipping, averages of weights, evaluation and checkpoints need
not know of stages.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.strategies.base import Tally, add_tallies
from samewise.runner.strategies.packing import from_rank
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import RankStrategy
from samewise.runner.strategies.surroundings import Generators, Surroundings
from samewise.runner.strategies.tree import copy_buffers


@final
class StageParts:
    """The stages' parameters and buffers, whose gradients and values every process receives."""

    def __init__(self, stages: Sequence[nn.Module], peers: Processes) -> None:
        self._trained = [
            [parameter for parameter in stage.parameters() if parameter.requires_grad]
            for stage in stages
        ]
        self._stages = stages
        self._peers = peers

    def have_gradients(self) -> list[bool]:
        """Which parameters of this process's stage have a gradient.

        ConfigError if another stage's has one here, which nobody would receive.
        """
        others = (
            parameter
            for owner, trained in enumerate(self._trained)
            if owner != self._peers.rank
            for parameter in trained
        )
        if any(parameter.grad is not None for parameter in others):
            raise reads_weights()
        return [parameter.grad is not None for parameter in self._trained[self._peers.rank]]

    @torch.no_grad()
    def share(self, touched: Sequence[Sequence[bool]]) -> None:
        """Send each process's gradients and buffers to all.

        `touched` combines the results of `touched` of all processes.
        """
        for owner, marks in enumerate(touched):
            self._peers.doing = f"sharing the gradients of stage {owner}"
            trained = [
                parameter
                for parameter, mark in zip(self._trained[owner], marks, strict=True)
                if mark
            ]
            # Looked up: a layer may assign another tensor to one
            mine, buffers = (
                owner == self._peers.rank,
                list(self._stages[owner].buffers()),
            )
            tensors = [
                *(
                    parameter.grad if mine and parameter.grad is not None else parameter
                    for parameter in trained
                ),
                *buffers,
            ]
            if not tensors:
                continue
            values = from_rank(owner, tensors)
            if not mine:
                for parameter, value in zip(trained, values, strict=False):
                    parameter.grad = value
                copy_buffers(buffers, values[len(trained) :])


def reads_weights() -> ConfigError:
    """The error for a recipe whose loss depends on weights of a stage in another process, such as
    by a penalty.
    """
    words = (
        "uses the model's weights in its loss other than by calling the model, which stages do "
        "not support"
    )
    return ConfigError(Problem("recipe", words, hint="strategy=elastic"))


@dataclass(frozen=True)
class ModelCall:
    """A recipe's call of the model: its input, and the state around it."""

    inputs: tuple[Tensor, ...]
    surroundings: Surroundings

    @property
    def form(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The inputs' shapes and dtypes."""
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.inputs)


class _CallCaptured(BaseException):
    """Ends a recipe at its model call with the input.

    Not an Exception, so that nothing catches it.
    """


class StandIn(nn.Module):
    """Stands in for the model in a recipe's loss.

    Its `modules` are those of the whole model, so that a recipe finds there what it finds in one
    process.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple: not a submodule
        self._device = device

    def named_modules(
        self, *given: Any, **further: Any
    ) -> Generator[tuple[str, nn.Module]]:  # `modules` calls it
        yield from self._model[0].named_modules(*given, **further)


@final
class CallCapture(StandIn):
    """First captures the input of a recipe's call, then returns another process's output."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self._asked: ModelCall | None = None
        self._given: list[Any] = []
        self._begun: Generators | None = None

    def forward(self, *inputs: Any, **further: Any) -> Any:
        if self._given:
            self._begun = Generators.now(self._device)
            return self._given.pop()
        if further or not all(isinstance(value, Tensor) for value in inputs):
            hint = "strategy=elastic"
            raise ConfigError(
                Problem(
                    "recipe",
                    "calls the model with arguments other than positional tensors, which "
                    "stages cannot pass on",
                    hint=hint,
                )
            )
        if self._asked is not None:
            raise ConfigError(
                Problem(
                    "recipe",
                    "calls the model twice for a loss, which stages do not support",
                    hint="strategy=elastic",
                )
            )
        self._asked = ModelCall(inputs, Surroundings.now(self._device))
        raise _CallCaptured

    def capture_call(self, run: Callable[[], Any]) -> ModelCall:
        """The input of the model's call in `run`, which ends there."""
        self._asked = None
        with suppress(_CallCaptured):
            run()
        if self._asked is None:
            raise ConfigError(
                Problem(
                    "recipe",
                    "does not call the model for its loss, so its input is unknown",
                    hint="strategy=elastic",
                )
            )
        asked, self._asked = self._asked, None
        return asked

    def run_with_output(self, output: Any, run: Callable[[], Any]) -> tuple[Any, bool]:
        """The result of `run` if the model returns `output`, and whether it draws random numbers
        after that.
        """
        self._given = [output]
        result = run()
        begun, self._begun = self._begun, None
        return result, begun is not None and begun.differ(self._device)


@dataclass(kw_only=True, eq=False)
class StageStrategy(RankStrategy, abc.ABC):
    """Each process runs one stage.

    `nproc=null` means one process per stage. The other settings are those of `RankStrategy`.

    Args:
        split: The names of the submodules at which a new stage begins, in order; one stage, and
            process, more than names.
        rank_invariant: Says to the fingerprint that the result is that of one process.
    """

    pretends = False

    split: Sequence[str]
    rank_invariant: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.split:
            raise ConfigError(
                Problem(
                    "split",
                    "does not name a place to cut the model",
                    list(self.split),
                    "names of submodules",
                    "strategy.split=[layer3]",
                )
            )

    def processes(self, device: str, replicas: int) -> int:
        if replicas > 1:  # each replica would need its own processes
            reason, hint = (
                f"{self._strategy_name} cuts the model, not the batch: it carries one replica",
                "replicas=1, and accumulate=N for micro-batches",
            )
            raise ConfigError(Problem("replicas", reason, replicas, "1", hint))
        return self._require_one_for_each_stage(
            self.count_processes(device, otherwise=len(self.split) + 1)
        )

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        self._require_one_for_each_stage(self.size)
        self._meet(device, accumulate)

    @property
    def _strategy_name(self) -> str:
        return f"strategy={type(self).__name__.lower()}"

    def _require_one_for_each_stage(self, size: int) -> int:
        stages = len(self.split) + 1
        if size != stages:
            reason = (
                f"{self._strategy_name} with {stages} stages (cut at {', '.join(self.split)}) "
                f"cannot run in {size} process{'es' * (size > 1)}"
            )
            raise ConfigError(
                Problem(
                    "strategy.nproc",
                    reason,
                    size,
                    f"{stages}, or null",
                    "strategy.split needs one name for each process after the first",
                )
            )
        return size

    def _keep_stages(self, stages: list[nn.Module]) -> None:
        """Keep the model's stages, whose gradients `reduce` sends to all."""
        assert isinstance(self.peers, Processes)
        self._stages, self._parts = stages, StageParts(stages, self.peers)

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        everyone, touched = self.gather(tallies, self._parts.have_gradients())
        self._parts.share(touched)
        return add_tallies(everyone)
