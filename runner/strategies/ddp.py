"""torch's own DistributedDataParallel, one replica a process. Quick, and its bits depend on how many processes there are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.strategies.base import Strategy, Tally, added
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import Ranks

HOOKS = ("fp16", "bf16", "powersgd")


@final
class DDP(Strategy):
    """Gradients are averaged by all-reduce, in whatever order that adds: `replicas` is the number of processes and part of what the result is.

    Run again on as many processes it gives the same bits; resumed on three or more it need not, since DDP arranges its buckets anew after the first step.

    Args:
        rank_invariant: False: all of these settings belong to the fingerprint.
        nproc: Processes that `samewise train` starts on this machine; null: `replicas`.
        backend: gloo or nccl; null: nccl where each process has a CUDA device of its own, else gloo.
        share_devices: Let several processes compute on one CUDA device, over gloo.
        bucket_mb: MiB of gradients that are exchanged at a time.
        static_graph: The same parameters are used in every step, in the same order.
        find_unused_parameters: Look in each step for parameters that the loss does not depend on.
        hook: Compress gradients as they are exchanged: fp16, bf16 or powersgd (Vogels et al. 2019, arXiv 1905.13727); null: not at all.
        powersgd_rank: Rank of PowerSGD's approximation.
        powersgd_start_step: Steps before PowerSGD begins.
        join_timeout_s: Seconds to wait for all processes to arrive.
        timeout_s: Seconds that an exchange may take before the run ends with an error.
        max_restarts: How often to start again, from the last checkpoint, when a process dies.
        grace_s: Seconds that processes have to finish their step and save when the run is asked to stop.
    """

    level = "R0"

    def __init__(
        self,
        *,
        rank_invariant: bool = False,
        nproc: int | None = None,
        backend: str | None = None,
        share_devices: bool = False,
        bucket_mb: float = 25.0,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        hook: str | None = None,
        powersgd_rank: int = 1,
        powersgd_start_step: int = 1000,
        join_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
        max_restarts: int = 0,
        grace_s: float = 120.0,
    ) -> None:
        super().__init__()
        if rank_invariant:
            raise ConfigError(Problem("rank_invariant", "DDP's result depends on the number of processes", True, "false", "strategy=elastic"))
        if hook is not None and hook not in HOOKS:
            raise ConfigError(Problem("hook", "no such hook", hook, ", ".join(HOOKS), nearest(hook, HOOKS)))
        self._ranks = Ranks(
            nproc=nproc,
            backend=backend,
            share_devices=share_devices,
            join_timeout_s=join_timeout_s,
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            grace_s=grace_s,
        )
        self._options: dict[str, Any] = {"bucket_cap_mb": bucket_mb, "static_graph": static_graph, "find_unused_parameters": find_unused_parameters}
        self._register: Callable[[DistributedDataParallel], None] = partial(_register, hook=hook, rank=powersgd_rank, start_step=powersgd_start_step)
        self._device = torch.device("cpu")
        self._accumulate = 1
        self._without_exchange: Callable[[], Any] = nullcontext

    @property
    def device(self) -> torch.device:
        return self._device

    def processes(self, device: str, replicas: int) -> int:
        wanted = self._ranks.wanted(device, otherwise=replicas)
        if wanted > replicas:
            raise ConfigError(Problem("strategy.nproc", "more processes than replicas", wanted, str(replicas), f"replicas={wanted}"))
        return wanted

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        if self._ranks.size != replicas:
            raise ConfigError(
                Problem(
                    "strategy",
                    f"DDP carries one replica in each process: {replicas} replicas cannot be carried by {self._ranks.size}",
                    "ddp",
                    f"{replicas} processes",
                    f"`samewise train` starts them; strategy=elastic carries {replicas} replicas in any number of processes",
                )
            )
        self.peers, self._device = self._ranks.join(device)
        self._accumulate = accumulate

    def wrap(self, model: nn.Module) -> nn.Module:
        if not isinstance(self.peers, Processes):
            return model
        devices = [self._device.index] if self._device.type == "cuda" else None
        network = DistributedDataParallel(model, device_ids=devices, **self._options)
        self._register(network)
        self._without_exchange = network.no_sync
        return network

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self.peers.rank * self._accumulate, (self.peers.rank + 1) * self._accumulate)

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        with nullcontext() if number % self._accumulate == self._accumulate - 1 else self._without_exchange():
            yield

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        everyone, _ = self.gathered(tallies)
        total = added(everyone)
        total.nominal *= self.peers.size  # DDP has divided by the number of processes
        return total


def _register(network: DistributedDataParallel, *, hook: str | None, rank: int, start_step: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    if hook == "fp16":
        network.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        network.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "powersgd":
        state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step)
        network.register_comm_hook(state, power.powerSGD_hook)
