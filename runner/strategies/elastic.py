"""Data parallelism whose bits do not depend on the number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import RankStrategy
from samewise.runner.strategies.replicas import Exchange, ReplicaStrategy, TreeExchange
from samewise.runner.strategies.sync_batch_norm import require_none
from samewise.runner.strategies.tree import subtrees


@final
@dataclass(kw_only=True, eq=False)
class Elastic(ReplicaStrategy, RankStrategy):
    """Data parallelism with the same bits on any number of processes, including one.

    The processes share `replicas` logical workers equally. Each adds up its replicas' gradients,
    and the processes' sums are added, in one fixed binary tree (`runner/strategies/tree.py`).
    `ReplicaStrategy` and `RankStrategy` have the other settings; `nproc=null` means one.

    Args:
        rank_invariant: Whether the fingerprint ignores the number of processes.
        uneven: Whether some processes may have more replicas than others, which wait for them.
        bucket_mb: MiB of gradients that are exchanged at a time.
        overlap: Whether to exchange a bucket as soon as the last backward pass has filled it,
            instead of after it.
        shrink: Whether to go on with half the processes, to the same bits, if one dies again before
            the next checkpoint or no restart is left.

    Raises:
        ConfigError: A setting is out of its range or not supported.
    """

    rank_invariant: bool = True
    uneven: bool = False
    bucket_mb: float = 25.0
    overlap: bool = True
    shrink: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            not self.bucket_mb > 0, "bucket_mb", "must be greater than 0", self.bucket_mb
        )
        self._parts = [range(1)]

    def processes(self, device: str, replicas: int) -> int:
        count = self.count_processes(device, otherwise=1)
        self._require(replicas, count)
        return count

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        self._require(replicas, self.size)
        self._meet(device, accumulate)
        self._parts = subtrees(replicas, self.peers.size)

    def _require(self, replicas: int, ranks: int) -> None:
        """Refuse more processes than replicas, or processes with unequal numbers of them."""
        possible = _equal_shares(replicas)
        choices = (
            ", ".join(map(str, possible[:-1])) + f" or {possible[-1]}" if len(possible) > 1 else "1"
        )
        ConfigError.raise_if(
            ranks > replicas,
            "strategy.nproc",
            f"{ranks} processes cannot share {replicas} replica{'s' * (replicas > 1)}",
            ranks,
            choices,
            f"replicas={ranks} makes it a different experiment, which they can share",
        )
        if ranks not in possible and not self.uneven:
            most = max(map(len, subtrees(replicas, ranks)))
            raise ConfigError(
                Problem(
                    "strategy.nproc",
                    f"{ranks} processes cannot share {replicas} replicas equally",
                    ranks,
                    choices,
                    "strategy.uneven=true gives the same bits; a step then lasts as long as "
                    f"{most} replicas in one process",
                )
            )

    def describe(self) -> list[str]:
        sizes = self._carried.bucket_bytes() if self._carried else []
        return (
            [
                f"gradients are exchanged in {len(sizes)} bucket{'s' * (len(sizes) > 1)}, "
                f"the largest of {max(sizes) / 2**20:.3g} MiB"
            ]
            if sizes
            else []
        )

    def cautions(self) -> list[Problem]:
        devices = (
            torch.cuda.device_count()
            if self._device.type == "cuda" and self.nproc is None and self.size == 1
            else 0
        )
        most = max(
            number for number in _equal_shares(self._parts[-1].stop) if number <= max(devices, 1)
        )
        hint = f"strategy.nproc={most} trains on {most}, to the same bits"
        return (
            [
                Problem(
                    "strategy.nproc",
                    f"null starts one process, which uses one of {devices} CUDA devices",
                    hint=hint,
                )
            ]
            if most > 1
            else []
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        require_none(model, "strategy=elastic")
        own_replicas = self._parts[self.peers.rank]
        if self._parts[-1].stop > 1:
            exchange = (
                TreeExchange(self.peers, self._parts, overlap=self.overlap)
                if isinstance(self.peers, Processes)
                else Exchange()
            )
            self._carry(
                model,
                own_replicas,
                exchange,
                accumulate=self._accumulate,
                bucket_mb=self.bucket_mb,
            )
        return self.compiled(model)

    @property
    def micro_batches(self) -> Sequence[int]:
        own_replicas = self._parts[self.peers.rank]
        return range(own_replicas.start * self._accumulate, own_replicas.stop * self._accumulate)


def _equal_shares(replicas: int) -> list[int]:
    """Return the numbers of processes that can share the replicas equally, a subtree each."""
    return [
        number
        for number in range(1, replicas + 1)
        if number == 1 or (replicas % number == 0 and (replicas // number).bit_count() == 1)
    ]
