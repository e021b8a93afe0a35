"""The model as a pipeline of stages, one per process, for a step's micro-batches:
torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.base import Forward, Tally, add_tallies
from samewise.runner.strategies.cutting import cut_model, draws, name_of_draw
from samewise.runner.strategies.stages import CallCapture, ModelCall, StageStrategy
from samewise.runner.strategies.tree import unchanged_buffers

SCHEDULES: dict[str, type[ScheduleGPipe] | type[Schedule1F1B]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}


@final
@dataclass(kw_only=True, eq=False)
class Pipeline(StageStrategy):
    """Each process runs one stage of the model.

    The pipeline's micro-batches are the run's (`accumulate`), in order: the bits of one process.

    Its further settings are those of `RankStrategy`; `nproc=null` means one for each stage.

    Args:
        rank_invariant: Says to the fingerprint that the result is that of one process. Refused
            where a later stage draws random numbers (dropout), which would be others, and where the
            recipe draws some after it has called a model whose first stage draws.
        split: The names of the submodules at which a new stage begins, in order; one stage, and
            process, more than names.
        schedule: gpipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv
            1811.06965). 1f1b: a backward pass as soon as there can be one, so that fewer
            activations wait (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503); wants
            `accumulate` of at least the stages.
    """

    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                Problem(
                    "schedule",
                    "no such schedule",
                    self.schedule,
                    ", ".join(SCHEDULES),
                    nearest(self.schedule, SCHEDULES),
                )
            )
        self._made: dict[
            Any, Any
        ] = {}  # torch's schedules, by the number and shapes of micro-batches
        # In this step: what in this process's stage; and whether the recipe did after calling the
        # model
        self._drew, self._recipe_drew = (
            "",
            False,
        )

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        if self.schedule == "1f1b" and accumulate <= len(self.split):
            stages = len(self.split) + 1
            hint = f"accumulate={stages}, or strategy.schedule=gpipe"
            raise ConfigError(
                Problem(
                    "accumulate",
                    f"1f1b needs at least as many micro-batches as there are stages, {stages}",
                    accumulate,
                    f"at least {stages}",
                    hint,
                )
            )
        super().begin(device, replicas, accumulate)

    def require_fit(self, model: nn.Module) -> None:
        self._cut(model)

    def _cut(self, model: nn.Module) -> list[nn.Module]:
        stages = cut_model(model, self.split)
        for number, stage in enumerate(cut_model(model, self.split, opened=True)[1:], 1):
            name = draws(stage)
            if name and self.rank_invariant:
                raise _other_draws(f"stage {number} draws random numbers ({name})")
        return stages

    def wrap(self, model: nn.Module) -> nn.Module:
        self._keep_stages(self._cut(model))
        self._mine = Mine(
            self._stages[self.peers.rank],
            self._device,
            first=self.peers.rank == 0,
            last=self.peers.rank == len(self._stages) - 1,
        )
        self._network = CallCapture(model, self._device)
        return self._network

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self._accumulate)

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        """As the base class. Only the last stage's process has tallies.

        The loss is the recipe's own: a first call of `forward` stops where it calls the model, and
        tells the first stage's input; in a second one, in the last stage, the model gives what came
        out of the pipeline.
        """
        self.peers.doing = "passing activations between stages"
        # Which calls the recipe again: it must find the batch as it was loaded
        last = self.peers.rank == len(self._stages) - 1
        asked = [
            (micro, self._network.capture_call(partial(forward, micro.copied() if last else micro)))
            for micro in micro_batches
        ]
        tallies: list[Tally] = []
        for _, group in groupby(
            asked, key=lambda pair: pair[1].form
        ):  # an epoch's last one may be smaller
            tallies += self._pass_through(list(group), forward)
        return tallies

    def _pass_through(
        self, group: Sequence[tuple[MicroBatch, ModelCall]], forward: Forward
    ) -> list[Tally]:
        tallies: list[Callable[[], Tally]] = []

        def loss(tensors: Any, place: Tensor) -> Tensor:
            output, self._mine.output = self._mine.output, None
            (total, first, tally), drew = self._network.run_with_output(
                output, partial(forward, group[int(place)][0])
            )
            self._recipe_drew |= drew
            tallies.append(tally)
            return total * first

        schedule, losses, self._mine.strides, name = self._schedule_for(group[0][1], len(group))
        losses[:] = [loss]
        self._mine.asked = iter([asked for _, asked in group])
        schedule.step(target=torch.arange(len(group)), return_outputs=False)
        if self._mine.drew:
            self._drew, self._mine.drew = name or "not each time", False
        return [tally() for tally in tallies]

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        everyone, facts = self.gather(
            tallies, (self._parts.have_gradients(), self._drew, self._recipe_drew)
        )
        self._drew, self._recipe_drew = "", False
        touched, drew, after = zip(*facts, strict=True)
        if self.rank_invariant:  # all processes have heard of it, and raise the same error
            for number, name in enumerate(drew):
                if name and number:
                    raise _other_draws(f"stage {number} draws random numbers ({name})")
                if name and any(after):
                    raise _other_draws(
                        "the recipe draws random numbers after it has called the model, "
                        f"whose stage 0 does too ({name}), so it gets some"
                    )
        self._parts.share(touched)
        return add_tallies(everyone)

    def _schedule_for(
        self, asked: ModelCall, count: int
    ) -> tuple[Any, list[Callable[[Any, Tensor], Tensor]], list[tuple[int, ...]], str]:
        """Torch's schedule for so many micro-batches shaped like this one, the slot for the loss
        that it calls, its inputs' strides, and what draws in it.
        """
        key = (asked.form, count)
        if key not in self._made:
            taken, given, name = self._stage_shapes(asked)
            first, last = self.peers.rank == 0, self.peers.rank == len(self._stages) - 1
            received, sent = (
                () if first else _stage_message(taken),
                given if last else _stage_message(given),
            )
            stage = PipelineStage(
                self._mine,
                self.peers.rank,
                len(self._stages),
                self._device,
                input_args=received,
                output_args=sent,
            )
            kind = SCHEDULES[self.schedule] if count >= len(self._stages) else ScheduleGPipe
            losses: list[Callable[[Any, Tensor], Tensor]] = []

            def loss(output: Any, place: Tensor) -> Tensor:
                return losses[0](output, place)

            self._made[key] = (
                kind(stage, count, loss_fn=loss, scale_grads=False),
                losses,
                [tensor.stride() for tensor in taken],
                name,
            )
        return self._made[key]

    @torch.no_grad()
    def _stage_shapes(self, asked: ModelCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], str]:
        """The shapes that this process's stage takes and returns for such an input, and the name of
        what draws in it.

        Runs the stages up to it once; their buffers do not change.
        """
        given = asked.inputs
        taken, name = given, ""
        for stage in self._stages[: self.peers.rank + 1]:
            with unchanged_buffers(stage), asked.surroundings.enter(self._device):
                output = stage(*given)
                if stage is self._mine.stage and asked.surroundings.generators.differ(self._device):
                    name = name_of_draw(stage, given, self._device)
            taken, given = given, output if isinstance(output, tuple) else (output,)
        first, last = self.peers.rank == 0, self.peers.rank == len(self._stages) - 1
        return (
            taken if first else _require_gradients(taken),
            tuple(tensors_in(given)) if last else _require_gradients(given),
            name,
        )


def _other_draws(what: str) -> ConfigError:
    hint = "strategy=rpc; or strategy.rank_invariant=false, which makes it a different experiment"
    return ConfigError(
        Problem(
            "strategy.rank_invariant",
            f"{what} that differ from those in one process",
            True,
            hint=hint,
        )
    )


@final
class Mine(nn.Module):
    """This process's stage, run with the randomness and autocast of the current micro-batch.

    The first stage's input is that micro-batch's.

    Torch passes contiguous tensors only. Kernels may add in another order for other layouts
    (channels_last), so what a stage takes, and the gradient of what it gives, get the strides that
    they would have in one process. The next stage alone knows those of the gradient: they come as
    the gradient of a small tensor that goes with each activation.
    """

    def __init__(self, stage: nn.Module, device: torch.device, *, first: bool, last: bool) -> None:
        super().__init__()
        self.stage = stage
        self.drew = False
        """Whether it drew random numbers."""
        self._device = device
        self.asked: Iterator[ModelCall] = iter(())
        self.strides: list[tuple[int, ...]] = []
        """Of its inputs, as the stage before it gives them."""
        self.output: Any = None
        """The last stage's, such as a dict, for the loss that follows. Torch gets its tensors."""
        self._first, self._last = first, last

    def forward(self, *inputs: Tensor) -> Any:
        asked = next(self.asked)
        if self._first:
            inputs = asked.inputs
        else:
            tensors, carriers = inputs[: len(self.strides)], inputs[len(self.strides) :]
            inputs = tuple(
                Arrive.apply(*each) for each in zip(tensors, carriers, self.strides, strict=True)
            )  # pyright: ignore[reportAssignmentType]
        with asked.surroundings.enter(self._device):
            output = self.stage(*inputs)
        self.drew = self.drew or asked.surroundings.generators.differ(self._device)
        if self._last:
            self.output = output
            return tuple(tensors_in(output))
        tensors, carriers = zip(
            *(Depart.apply(one) for one in (output if isinstance(output, tuple) else (output,))),
            strict=True,
        )  # pyright: ignore[reportArgumentType]
        return (*tensors, *carriers)


@final
class Depart(torch.autograd.Function):
    """Makes a tensor contiguous to be sent, with a carrier for the strides of its gradient:
    float64[dimensions].
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.clone(memory_format=torch.contiguous_format), torch.zeros(
            tensor.dim(), dtype=torch.float64, device=tensor.device
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, strides: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _copy_with_strides(gradient, [int(stride) for stride in strides.tolist()])


@final
class Arrive(torch.autograd.Function):
    """Restores a received tensor's strides; sends back the strides of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, carrier: Tensor, strides: tuple[int, ...]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _copy_with_strides(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (
            gradient.contiguous(),
            torch.tensor(gradient.stride(), dtype=torch.float64, device=gradient.device),
            None,
        )


def _copy_with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides; along a dimension of stride 0, the first value is repeated."""
    shape = tensor.shape
    for dimension, stride in enumerate(strides):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 else tensor
    copied = torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
    return copied.expand(
        [-1 if stride else size for stride, size in zip(strides, shape, strict=True)]
    )


def _stage_message(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a stage sends to the next one for these tensors: see `Depart`."""
    contiguous = (
        tensor.detach().contiguous().requires_grad_(tensor.requires_grad) for tensor in tensors
    )
    return (
        *contiguous,
        *(
            torch.zeros(tensor.dim(), dtype=torch.float64, device=tensor.device).requires_grad_()
            for tensor in tensors
        ),
    )


def _require_gradients(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        tensor.clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for tensor in tensors
    )
