"""Connects the ranks of a run and creates their process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.processes.lost_connections import here, places
from samewise.runner.processes.meeting import is_one_machine, listen_locally, meeting_point, wait_for
from samewise.runner.processes.peers import Alone, Peers, Processes
from samewise.runner.processes.simulated import SimulatedPeers, is_simulated
from samewise.runner.processes.this_process import is_rank


def join(*, backend: str, join_timeout_s: float, timeout_s: float, init_method: str | None = None) -> Peers:
    """Wait for the other ranks, and create the process group; ConfigError if some, which it names, do not come, or the backend is not there.

    Args:
        backend: For tensors on the run's device: gloo, nccl or mpi. Tensors on the CPU are sent by gloo, except with mpi.
        join_timeout_s: Seconds to wait for all ranks to arrive.
        timeout_s: Seconds that a collective may take.
        init_method: As in `meeting_point`.
    """
    if not is_rank():
        return Alone()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if is_simulated():
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend too

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return SimulatedPeers(None, rank=rank, size=size, timeout_s=timeout_s)
    if is_one_machine():
        listen_locally()
    store = meeting_point(join_timeout_s, init_method)
    store.set(f"joined/{rank}", f"{here()} {os.getpid()}")
    expected = [f"joined/{number}" for number in range(size)]
    missing = wait_for(store, expected, join_timeout_s)
    if missing:
        numbers = ", ".join(str(expected.index(key)) for key in missing)
        reason = f"rank {numbers} of {size} did not join within {join_timeout_s:g} s"
        hint = "start WORLD_SIZE processes, all with the same MASTER_ADDR and MASTER_PORT"
        raise ConfigError(Problem("strategy.join_timeout_s", reason, expected=f"ranks 0 to {size - 1}", hint=hint))
    places.update({number: store.get(key).decode().split() for number, key in enumerate(expected)})
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")  # torch's flight recorder, so that a message can name the collective
        try:
            dist.init_process_group(
                f"cpu:gloo,cuda:{backend}" if backend == "nccl" else backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(Problem("strategy.backend", first_line(error), backend, "gloo, or nccl with CUDA")) from error
    return Processes(store, rank=rank, size=size, timeout_s=timeout_s)
