"""Simulates all ranks but one, for `samewise check`."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Generator
from typing import Any, final

import torch.distributed as dist

from samewise.runner.strategies.peers import Processes

_pretending = contextvars.ContextVar("pretending", default=False)


@final
class SimulatedPeers(Processes):
    """Ranks of which only this one exists, for checks and not for training.

    In torch's fake process group, collectives leave tensors unchanged.
    """

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def first(self, make: Callable[[], Any]) -> Any:
        return make()

    def explain(self, error: BaseException, *, step: int) -> BaseException:
        return error

    def abandon(self, error: BaseException) -> None:
        self.leave()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def simulate_ranks(rank: int, size: int) -> Generator[None]:
    """Make this process one of `size` ranks within the context.

    `join` returns `SimulatedPeers`, and the other ranks need no devices.
    """
    variables = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    previous = {name: os.environ.get(name) for name in (*variables, "LOCAL_WORLD_SIZE")}
    os.environ.update(variables)
    # torchrun's number would contradict the simulated one
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    _pretending.set(True)
    try:
        yield
    finally:
        _pretending.set(False)
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if dist.is_initialized():
            dist.destroy_process_group()


def is_simulated() -> bool:
    """Return whether the process is within `simulate_ranks`."""
    return _pretending.get()
