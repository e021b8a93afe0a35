"""Strategy that runs a step's micro-batches through a pipeline of stages, one per process.

Built on torch.distributed.pipelining.
"""

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
from samewise.runner.strategies.cutting import cut_model
from samewise.runner.strategies.stages import CallCapture, ModelCall, StageStrategy
from samewise.runner.strategies.tree import unchanged_buffers

SCHEDULES: dict[str, type[ScheduleGPipe] | type[Schedule1F1B]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}


@final
@dataclass(kw_only=True, eq=False)
class Pipeline(StageStrategy):
    """Model in stages, one per process, through which the run's micro-batches pass in order.

    `accumulate` is their number; the bits are those of one process. `RankStrategy` has the other
    settings; `nproc=null` means one for each stage.

    Args:
        rank_invariant: Whether the fingerprint is that of one process. Refused where a later stage
            draws random numbers (dropout), which would differ, and where the recipe draws some
            after calling a model whose first stage draws.
        split: Names of the submodules at which a new stage begins, in order. There is one stage,
            and process, more than names.
        schedule: gpipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv
            1811.06965). 1f1b: a backward pass as soon as possible, so that fewer activations wait
            (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503); needs `accumulate` of at
            least the number of stages.

    Raises:
        ConfigError: A setting is out of its range.
    """

    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            self.schedule not in SCHEDULES,
            "schedule",
            "no such schedule",
            self.schedule,
            ", ".join(SCHEDULES),
            nearest(self.schedule, SCHEDULES),
        )
        # Torch's schedules, by the number and shapes of micro-batches
        self._schedules: dict[Any, Any] = {}
        # Whether the recipe drew random numbers in this step after calling the model
        self._recipe_drew = False

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        ConfigError.raise_if(
            self.schedule == "1f1b" and accumulate < self.parts,
            "accumulate",
            f"1f1b needs at least as many micro-batches as there are stages, {self.parts}",
            accumulate,
            f"at least {self.parts}",
            f"accumulate={self.parts}, or strategy.schedule=gpipe",
        )
        super().begin(device, replicas, accumulate)

    def require_fit(self, model: nn.Module) -> None:
        cut_model(model, self.split)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._keep_stages(cut_model(model, self.split))
        self._stage = StageModule(
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
        """Run forward and backward of the micro-batches; only the last stage returns tallies."""
        self.peers.doing = "passing activations between stages"
        # The loss is the recipe's own. A first call of `forward` stops where it calls the model,
        # and shows the first stage's input. In a second one, in the last stage, the model returns
        # the pipeline's output; it must find the batch as it was loaded.
        is_last = self.peers.rank == len(self._stages) - 1
        calls = [
            (
                micro,
                self._network.capture_call(partial(forward, micro.copied() if is_last else micro)),
            )
            for micro in micro_batches
        ]
        tallies: list[Tally] = []
        # An epoch's last micro-batch may be smaller.
        for _, group in groupby(calls, key=lambda pair: pair[1].form):
            tallies += self._pass_through(list(group), forward)
        return tallies

    def _pass_through(
        self, group: Sequence[tuple[MicroBatch, ModelCall]], forward: Forward
    ) -> list[Tally]:
        tallies: list[Callable[[], Tally]] = []

        def loss(tensors: Any, number: Tensor) -> Tensor:
            output, self._stage.output = self._stage.output, None
            (total, gradient, tally), drew = self._network.run_with_output(
                output, partial(forward, group[int(number)][0])
            )
            self._recipe_drew |= drew
            tallies.append(tally)
            # Torch begins a backward pass with 1
            return total * gradient

        schedule, losses, self._stage.strides = self._schedule_for(group[0][1], len(group))
        # Torch's schedule is kept, and this loss refers to the micro-batches of one group
        losses[:] = [loss]
        self._stage.calls = iter([call for _, call in group])
        schedule.step(target=torch.arange(len(group)), return_outputs=False)
        return [tally() for tally in tallies]

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        all_tallies, facts = self.gather(
            tallies, (self._parts.have_gradients(), self._stage.drew, self._recipe_drew)
        )
        self._stage.drew = self._recipe_drew = False
        touched, drew, recipe_drew = zip(*facts, strict=True)
        # All processes have these facts, and raise the same error
        if self.rank_invariant and any(drew[1:]):
            raise _differing_draws(f"stage {drew.index(True, 1)} draws random numbers")
        if self.rank_invariant and drew[0] and any(recipe_drew):
            raise _differing_draws(
                "the recipe draws random numbers after it has called the model, whose stage 0 "
                "does too, so it gets some"
            )
        self._parts.share(touched)
        return add_tallies(all_tallies)

    def _schedule_for(
        self, call: ModelCall, count: int
    ) -> tuple[Any, list[Callable[[Any, Tensor], Tensor]], list[tuple[int, ...]]]:
        """Return torch's schedule for `count` micro-batches of this shape, made once.

        With it, the list whose only element is the loss that it calls, and the strides of the
        stage's inputs.
        """
        key = (call.form, count)
        if key not in self._schedules:
            inputs, outputs = self._stage_shapes(call)
            is_first, is_last = self.peers.rank == 0, self.peers.rank == len(self._stages) - 1
            received = () if is_first else _stage_message(inputs)
            sent = outputs if is_last else _stage_message(outputs)
            stage = PipelineStage(
                self._stage,
                self.peers.rank,
                len(self._stages),
                self._device,
                input_args=received,
                output_args=sent,
            )
            # 1f1b needs as many micro-batches as stages, more than an epoch's last step may have
            kind = SCHEDULES[self.schedule] if count >= len(self._stages) else ScheduleGPipe
            losses: list[Callable[[Any, Tensor], Tensor]] = []

            def loss(output: Any, number: Tensor) -> Tensor:
                return losses[0](output, number)

            self._schedules[key] = (
                # Losses are sums; torch would divide gradients by the number of micro-batches
                kind(stage, count, loss_fn=loss, scale_grads=False),
                losses,
                [tensor.stride() for tensor in inputs],
            )
        return self._schedules[key]

    @torch.no_grad()
    def _stage_shapes(self, call: ModelCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the inputs and outputs of this process's stage.

        Runs the stages up to it once; their buffers do not change.
        """
        inputs = outputs = call.inputs
        for stage in self._stages[: self.peers.rank + 1]:
            inputs = outputs
            with unchanged_buffers(stage), call.surroundings.enter(self._device):
                output = stage(*inputs)
            outputs = output if isinstance(output, tuple) else (output,)
        is_first, is_last = self.peers.rank == 0, self.peers.rank == len(self._stages) - 1
        return (
            inputs if is_first else _require_gradients(inputs),
            tuple(tensors_in(outputs)) if is_last else _require_gradients(outputs),
        )


def _differing_draws(cause: str) -> ConfigError:
    return ConfigError(
        Problem(
            "strategy.rank_invariant",
            f"{cause} that differ from those in one process",
            True,
            hint="strategy=rpc; or strategy.rank_invariant=false, which makes it a different "
            "experiment",
        )
    )


@final
class StageModule(nn.Module):
    """This process's stage, run with the randomness and autocast of the current micro-batch.

    The first stage's input is that micro-batch's. Torch passes contiguous tensors only, and kernels
    may add in another order for other layouts (channels_last). The inputs of a stage, and the
    gradients of its outputs, therefore get the strides that they would have in one process. Only
    the next stage knows those of the gradient: they come as the gradient of a small tensor that
    accompanies each activation.
    """

    def __init__(self, stage: nn.Module, device: torch.device, *, first: bool, last: bool) -> None:
        super().__init__()
        self.stage = stage
        self.drew = False
        """Whether the stage drew random numbers."""
        self._device = device
        self.calls: Iterator[ModelCall] = iter(())
        self.strides: list[tuple[int, ...]] = []
        """Strides of its inputs, as the previous stage returns them."""
        self.output: Any = None
        """Output of the last stage, such as a dict, for the loss. Torch receives its tensors."""
        self._is_first, self._is_last = first, last

    def forward(self, *inputs: Tensor) -> Any:
        call = next(self.calls)
        if self._is_first:
            inputs = call.inputs
        else:
            tensors, carriers = inputs[: len(self.strides)], inputs[len(self.strides) :]
            inputs = tuple(
                Arrive.apply(*x) for x in zip(tensors, carriers, self.strides, strict=True)
            )  # pyright: ignore[reportAssignmentType]
        with call.surroundings.enter(self._device):
            output = self.stage(*inputs)
        self.drew = self.drew or call.surroundings.generators.differ(self._device)
        if self._is_last:
            self.output = output
            return tuple(tensors_in(output))
        tensors, carriers = zip(
            *(Depart.apply(x) for x in (output if isinstance(output, tuple) else (output,))),
            strict=True,
        )  # pyright: ignore[reportArgumentType]
        return (*tensors, *carriers)


@final
class Depart(torch.autograd.Function):
    """Makes a tensor contiguous for sending, with a carrier of its gradient's strides.

    The carrier is float64[dimensions].
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
    """Restores a received tensor's strides, and sends back those of its gradient."""

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
    """Copy a tensor with these strides; along a stride of 0, the first value is repeated."""
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
    """Return the tensors that a stage sends to the next one: contiguous ones and their carriers."""
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
