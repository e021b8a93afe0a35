"""Stages of a model, each in its own process, for the strategies `pipeline` and `rpc`.

Every process has the whole model; the work and the memory of activations are divided. After a
step's backward pass each process sends the gradients of its stage to the others. The weights are
therefore complete and equal everywhere, and clipping, averages of weights, evaluation and
checkpoints need not know of stages.
"""

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
from samewise.runner.strategies.ranks import OneReplica
from samewise.runner.strategies.surroundings import Generators, Surroundings
from samewise.runner.strategies.tree import copy_buffers


@final
class StageParts:
    """Parameters and buffers of the stages, which every process receives."""

    def __init__(self, stages: Sequence[nn.Module], peers: Processes) -> None:
        self._trained = [
            [parameter for parameter in stage.parameters() if parameter.requires_grad]
            for stage in stages
        ]
        self._stages = stages
        self._peers = peers

    def have_gradients(self) -> list[bool]:
        """Return for each parameter of this process's stage whether it has a gradient.

        Raises:
            ConfigError: A parameter of another stage has one here, which no process would receive.
        """
        foreign = (
            parameter
            for owner, trained in enumerate(self._trained)
            if owner != self._peers.rank
            for parameter in trained
        )
        if any(parameter.grad is not None for parameter in foreign):
            raise reads_weights()
        return [parameter.grad is not None for parameter in self._trained[self._peers.rank]]

    @torch.no_grad()
    def share(self, touched: Sequence[Sequence[bool]]) -> None:
        """Send each process's gradients and buffers to all.

        `touched` has the results of `have_gradients` of all processes.
        """
        for owner, marks in enumerate(touched):
            self._peers.doing = f"sharing the gradients of stage {owner}"
            trained = [
                parameter
                for parameter, mark in zip(self._trained[owner], marks, strict=True)
                if mark
            ]
            is_own = owner == self._peers.rank
            # Looked up each time: a layer may assign another tensor to a buffer.
            buffers = list(self._stages[owner].buffers())
            tensors = [
                *(
                    parameter.grad if is_own and parameter.grad is not None else parameter
                    for parameter in trained
                ),
                *buffers,
            ]
            if not tensors:
                continue
            values = from_rank(owner, tensors)
            if not is_own:
                for parameter, value in zip(trained, values, strict=False):
                    parameter.grad = value
                copy_buffers(buffers, values[len(trained) :])


def reads_weights() -> ConfigError:
    """Make the error for a recipe whose loss reads weights of another process, as by a penalty."""
    return ConfigError(
        Problem(
            "recipe",
            "uses the model's weights in its loss other than by calling the model, which stages do "
            "not support",
            hint="strategy=elastic",
        )
    )


@dataclass(frozen=True)
class ModelCall:
    """A recipe's call of the model: its input, and the state around it."""

    inputs: tuple[Tensor, ...]
    surroundings: Surroundings

    @property
    def form(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and dtypes of the inputs."""
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.inputs)


class _CallCaptured(BaseException):
    """Ends a recipe at its model call.

    Not an Exception, so that nothing catches it.
    """


class StandIn(nn.Module):
    """Stand-in for the model in a recipe's loss.

    Its `modules` are the whole model's, so that a recipe finds there what it finds in one process.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        # In a tuple, it is not a submodule.
        self._model = (model,)
        self._device = device

    # `modules` calls it.
    def named_modules(self, *arguments: Any, **keywords: Any) -> Generator[tuple[str, nn.Module]]:
        yield from self._model[0].named_modules(*arguments, **keywords)


@final
class CallCapture(StandIn):
    """Stand-in that captures a recipe's call first, and later returns another process's output."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self._call: ModelCall | None = None
        self._outputs: list[Any] = []
        self._generators: Generators | None = None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self._outputs:
            self._generators = Generators.now(self._device)
            return self._outputs.pop()
        if keywords or not all(isinstance(value, Tensor) for value in inputs):
            raise ConfigError(
                Problem(
                    "recipe",
                    "calls the model with arguments other than positional tensors, which "
                    "stages cannot pass on",
                    hint="strategy=elastic",
                )
            )
        if self._call is not None:
            raise ConfigError(
                Problem(
                    "recipe",
                    "calls the model twice for a loss, which stages do not support",
                    hint="strategy=elastic",
                )
            )
        self._call = ModelCall(inputs, Surroundings.now(self._device))
        raise _CallCaptured

    def capture_call(self, run: Callable[[], Any]) -> ModelCall:
        """Return the model's call in `run`, which ends there."""
        self._call = None
        with suppress(_CallCaptured):
            run()
        if self._call is None:
            raise ConfigError(
                Problem(
                    "recipe",
                    "does not call the model for its loss, so its input is unknown",
                    hint="strategy=elastic",
                )
            )
        call, self._call = self._call, None
        return call

    def run_with_output(self, output: Any, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of `run` if the model returns `output`, and whether it draws later."""
        self._outputs = [output]
        result = run()
        generators, self._generators = self._generators, None
        return result, generators is not None and generators.differ(self._device)


@dataclass(kw_only=True, eq=False)
class StageStrategy(OneReplica):
    """Strategy with one stage of the model per process.

    `RankStrategy` has the other settings; `nproc=null` means one process per stage.

    Args:
        split: Names of the submodules at which a new stage begins, in order. There is one stage,
            and process, more than names.
        rank_invariant: Whether the fingerprint is that of one process.

    Raises:
        ConfigError: `split` is empty.
    """

    split: Sequence[str]
    rank_invariant: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            not self.split,
            "split",
            "does not name a place to cut the model",
            list(self.split),
            "names of submodules",
            "strategy.split=[layer3]",
        )

    @property
    def parts(self) -> int:
        return len(self.split) + 1

    def _keep_stages(self, stages: list[nn.Module]) -> None:
        """Keep the model's stages, whose gradients `reduce` sends to all."""
        assert isinstance(self.peers, Processes)
        self._stages, self._parts = stages, StageParts(stages, self.peers)

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        all_tallies, touched = self.gather(tallies, self._parts.have_gradients())
        self._parts.share(touched)
        return add_tallies(all_tallies)
