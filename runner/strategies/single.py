"""One process on one device that runs all replicas one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from samewise.runner.strategies.base import Strategy, Tally, add_tallies, choose_device
from samewise.runner.strategies.replicas import Exchange, ReplicaStrategy


# The same computation as `strategy=elastic` on any number of ranks, with the same fingerprint.
@final
@dataclass(kw_only=True, eq=False)
class Single(ReplicaStrategy):
    """All replicas in this process, with the bits of many processes.

    Args:
        rank_invariant: Whether the fingerprint ignores the number of processes.
        sync_batch_norm: Whether batch norms use the mean and variance of the whole batch, instead
            of each replica's own. All replicas then run side by side.
    """

    rank_invariant: bool = True

    def __post_init__(self) -> None:
        Strategy.__init__(self)
        self._device = torch.device("cpu")
        self._replicas = 1
        self._accumulate = 1

    @property
    def device(self) -> torch.device:
        return self._device

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self._device = choose_device(device)
        self._replicas = replicas
        self._accumulate = accumulate

    def wrap(self, model: nn.Module) -> nn.Module:
        if self._replicas > 1:
            self._carry(
                model,
                range(self._replicas),
                Exchange(),
                accumulate=self._accumulate,
                # Nothing is exchanged, so nothing is gained by several buckets
                bucket_mb=float("inf"),
            )
        return self.compiled(model)

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self._replicas * self._accumulate)

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        # Nothing is gathered, which would wait for the device
        if self._carried:
            self._carried.give_back([self._carried.close()])
        return add_tallies(tallies)
