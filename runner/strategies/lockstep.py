"""Micro-batches of a step side by side, for layers that compute with all samples of the step.

Each runs in a thread. One of them computes at a time, until it needs values of the others, so the
bits are those of micro-batches that run one after another.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.strategies.base import Forward, Tally
from samewise.runner.strategies.surroundings import Generators
from samewise.runner.strategies.sync_batch_norm import CURRENT, PATH, Meet


@final
class OwnState:
    """A micro-batch's own gradients, buffers and generators.

    `swap` exchanges them with the model's when the micro-batch goes on, and when it waits.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._parameters = device, list(model.parameters())
        self._gradients: list[Tensor | None] = [None] * len(self._parameters)
        # Assigning to a module's attribute takes twenty times as long
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = [
            (module._buffers, name, buffer.clone())  # pyright: ignore[reportPrivateUsage]
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._generators = Generators.now(device)

    def swap(self) -> None:
        """Exchange the own state with the current one."""
        generators, self._generators = self._generators, Generators.now(self._device)
        generators.set(self._device)
        for index, (buffers, name, value) in enumerate(self._buffers):
            self._buffers[index] = (buffers, name, buffers[name])
            buffers[name] = value
        gradients = [parameter.grad for parameter in self._parameters]
        # There are none in forward passes
        if any(x is not None for x in (*gradients, *self._gradients)):
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
            self._gradients = gradients

    def give(self) -> None:
        """Set the own buffers, and add the own gradients to the parameters'."""
        sums = [parameter.grad for parameter in self._parameters]
        self.swap()
        for parameter, total in zip(self._parameters, sums, strict=True):
            if total is not None:
                parameter.grad = total if parameter.grad is None else total.add_(parameter.grad)


def run_side_by_side(
    model: nn.Module, micro_batches: Sequence[MicroBatch], forward: Forward, share: Meet
) -> list[tuple[OwnState, Callable[[], Tally]]]:
    """Run the passes of micro-batches whose batch norms wait for each other, one at a time."""
    device = next(model.parameters()).device
    numbers = range(len(micro_batches))
    states = [OwnState(model, device) for _ in numbers]
    values: list[Tensor | None] = [None for _ in numbers]
    baton, everyone = Lock(), None

    def exchange() -> None:
        nonlocal everyone
        if len({None if value is None else value.shape for value in values}) > 1:
            raise ConfigError(
                Problem(
                    PATH,
                    "the micro-batches of a step call different batch norms, or in another order",
                    True,
                    "false, for this model",
                )
            )
        if values[0] is not None:
            everyone = share(torch.stack(values).double())  # pyright: ignore[reportArgumentType]

    barrier = Barrier(len(numbers), exchange)

    def meet(number: int, value: Tensor | None) -> Any:
        values[number] = value
        states[number].swap()
        baton.release()
        try:
            barrier.wait()
        finally:
            baton.acquire()
            states[number].swap()
        return everyone

    def run(number: int) -> Any:
        CURRENT.set(partial(meet, number))
        # Without autograd's threads, where the backward passes of a device could not wait
        with baton, torch.autograd.set_multithreading_enabled(False):
            states[number].swap()
            try:
                loss, first, tally = forward(micro_batches[number])
                loss.backward(first)
                # Raises an error where another micro-batch goes on
                meet(number, None)
            except BrokenBarrierError:
                return None
            except BaseException:
                barrier.abort()
                raise
            finally:
                states[number].swap()
        return tally

    set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    contexts = [copy_context() for _ in numbers]
    with ThreadPoolExecutor(len(numbers), initializer=set_device) as pool:
        tallies = list(pool.map(Context.run, contexts, [run for _ in numbers], numbers))
    return list(zip(states, tallies, strict=True))
