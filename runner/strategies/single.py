"""One process on one device that runs all replicas one after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import nn

from samewise.runner.strategies.base import Strategy, Tally, add_tallies, choose_device
from samewise.runner.strategies.replicas import Carried, Exchange, Replicas
from samewise.runner.strategies.sync_batch_norm import refuse


@final
class Single(Strategy):
    """All replicas in this process, with the bits of many processes.

    Args:
        rank_invariant: Whether the fingerprint ignores the number of processes.
        sync_batch_norm: False: batch statistics are each replica's own.

    Raises:
        ConfigError: `sync_batch_norm` is set.
    """

    # The same computation as `strategy=elastic` on any number of ranks, with the same fingerprint.
    level = "R2"
    unfreezes = True
    compiles = True

    def __init__(self, *, rank_invariant: bool = True, sync_batch_norm: bool = False) -> None:
        super().__init__()
        refuse(sync_batch_norm, "strategy=single")
        self._device = torch.device("cpu")
        self._replicas = 1
        self._accumulate = 1
        self._carried = Carried()

    @property
    def device(self) -> torch.device:
        return self._device

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self._device = choose_device(device)
        self._replicas = replicas
        self._accumulate = accumulate

    def wrap(self, model: nn.Module) -> nn.Module:
        if self._replicas > 1:
            self._carried = Replicas(
                model,
                range(self._replicas),
                accumulate=self._accumulate,
                exchange=Exchange(),
                # Nothing is exchanged, so nothing is gained by several buckets
                bucket_mb=float("inf"),
            )
        return self.compiled(model)

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self._replicas * self._accumulate)

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        return self._carried.micro_batch(number)

    def buffer_bytes(self) -> int:
        return self._carried.buffer_bytes()

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        self._carried.give_back([self._carried.close()])
        return add_tallies(tallies)
