"""Start, connection and devices of a run's processes."""

import abc
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_line, nearest
from samewise.runner.processes.this_process import is_rank
from samewise.runner.strategies.base import Strategy, choose_device
from samewise.runner.strategies.layout import Layout
from samewise.runner.strategies.lost_connections import machine_name, places
from samewise.runner.strategies.meeting import (
    is_one_machine,
    listen_locally,
    meeting_point,
    wait_for,
)
from samewise.runner.strategies.packing import from_rank
from samewise.runner.strategies.peers import Alone, Peers, Processes
from samewise.runner.strategies.simulated import SimulatedPeers, is_simulated
from samewise.runner.strategies.tree import copy_buffers

BACKENDS = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
}
"""Functions that tell whether this torch is built with a backend."""
PLACE = re.compile(r"env://|tcp://.+:\d+|file:///.+")
LEAST = {"nproc": 1, "join_timeout_s": 1, "timeout_s": 1, "max_restarts": 0, "grace_s": 0}
"""Smallest value of each number."""


@dataclass(kw_only=True, eq=False)
class RankStrategy(Strategy):
    """Strategy with several processes. Its fields are the settings that a config may set.

    Args:
        nproc: Processes that `samewise train` starts on this machine; null: the strategy's own
            choice. Under torchrun, the number that it has started.
        backend: gloo, nccl, or mpi if torch is built with it; null: nccl if each process has its
            own CUDA device, otherwise gloo.
        init_method: Rendezvous of the processes: tcp://HOST:PORT, or file:///PATH of a new file;
            env:// or null: MASTER_ADDR and MASTER_PORT.
        share_devices: Whether several processes may compute on one CUDA device, over gloo.
        join_timeout_s: Seconds to wait for all processes to arrive.
        timeout_s: Seconds that an exchange may take before the run ends with an error.
        max_restarts: Number of restarts from the last checkpoint when a process dies.
        grace_s: Seconds in which processes finish their step and save when the run is asked to
            stop.

    Raises:
        ConfigError: A setting is out of its range or not supported.
    """

    nproc: int | None = None
    backend: str | None = None
    init_method: str | None = None
    share_devices: bool = False
    join_timeout_s: float = 60.0
    timeout_s: float = 600.0
    max_restarts: int = 0
    grace_s: float = 120.0

    def __post_init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")
        self._accumulate = 1
        for name, least in LEAST.items():
            value = getattr(self, name)
            ConfigError.raise_if(
                value is not None and value < least,
                name,
                "is too small",
                value,
                f"at least {least}",
            )
        available = [name for name, is_available in BACKENDS.items() if is_available()]
        if self.backend is not None and self.backend not in available:
            raise ConfigError(
                Problem(
                    "backend",
                    f"this torch is built without {self.backend.upper()}"
                    if self.backend in BACKENDS
                    else "no such backend",
                    self.backend,
                    " or ".join(available),
                    "" if self.backend in BACKENDS else nearest(self.backend, available),
                )
            )
        ConfigError.raise_if(
            self.init_method is not None and not PLACE.fullmatch(self.init_method),
            "init_method",
            "is not a rendezvous address",
            self.init_method,
            "tcp://HOST:PORT, file:///PATH, env:// or null",
        )

    @property
    def size(self) -> int:
        """Number of the run's processes, whoever started them.

        A process that was started alone does all the work.
        """
        return int(os.environ["WORLD_SIZE"]) if is_rank() else 1

    def count_processes(self, device: str, *, otherwise: int) -> int:
        """Return the number of processes that `samewise train` starts on this machine.

        Args:
            device: The config's device.
            otherwise: Number with `nproc=null`.

        Raises:
            ConfigError: There are too few devices, another number was started than the config says,
                or srun started several processes that do not know of each other.
        """
        tasks = 1 if is_rank() or self.nproc else int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        ConfigError.raise_if(
            tasks > 1,
            "strategy.nproc",
            f"srun has started {tasks} tasks, and each would train alone",
            self.nproc,
            "a number",
            "launcher=slurm starts ranks; in a job of your own, let srun start `torchrun "
            "-m samewise train` once on each machine",
        )
        count = self.nproc or otherwise
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if is_rank() else 0
        ConfigError.raise_if(
            local and self.nproc and local != self.nproc,
            "strategy.nproc",
            f"{local} processes were started on this machine",
            self.nproc,
            f"{local}, or null",
        )
        # A check may be for a machine with other devices
        devices = torch.cuda.device_count() if device != "cpu" and not is_simulated() else 0
        ConfigError.raise_if(
            devices and count > devices and not self.share_devices,
            "strategy.nproc",
            f"there are {devices} CUDA devices for {count} processes",
            count,
            f"at most {devices}",
            "strategy.share_devices=true lets several processes share a device",
        )
        return count

    def _meet(self, device: str, accumulate: int) -> None:
        """Connect to the other processes, and choose this one's device.

        Raises:
            ConfigError: Other processes do not come, or there are too few devices.
        """
        if device != "cpu" and is_rank() and torch.cuda.is_available():
            torch.cuda.set_device(
                # With `share_devices` there are more processes than devices
                int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            )
        chosen_device = choose_device(device)
        backend = self.backend or (
            "nccl" if chosen_device.type == "cuda" and not self.share_devices else "gloo"
        )
        self.peers = _join(
            backend=backend,
            join_timeout_s=self.join_timeout_s,
            timeout_s=self.timeout_s,
            init_method=self.init_method,
        )
        self.layout = Layout(self.peers)
        self._device, self._accumulate = chosen_device, accumulate

    @property
    def device(self) -> torch.device:
        return self._device


@dataclass(kw_only=True, eq=False)
class OneReplicaEach(RankStrategy):
    """Strategy with one replica per process, so that `replicas` is the number of processes."""

    rank_invariant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            self.rank_invariant,
            "rank_invariant",
            f"{type(self).__name__}'s result depends on the number of processes",
            True,
            "false",
            "strategy=elastic",
        )

    def processes(self, device: str, replicas: int) -> int:
        count = self.count_processes(device, otherwise=replicas)
        ConfigError.raise_if(
            count > replicas,
            "strategy.nproc",
            "more processes than replicas",
            count,
            str(replicas),
            f"replicas={count}",
        )
        return count

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        name = type(self).__name__
        ConfigError.raise_if(
            self.size != replicas,
            "strategy",
            f"{name} carries one replica in each process: {replicas} replicas cannot be "
            f"carried by {self.size}",
            name.lower(),
            f"{replicas} processes",
            f"`samewise train` starts them; strategy=elastic carries {replicas} replicas "
            "in any number of processes",
        )
        self._meet(device, accumulate)

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self.peers.rank * self._accumulate, (self.peers.rank + 1) * self._accumulate)

    def _follow_first(self, model: nn.Module, doing: str) -> None:
        """Copy rank 0's buffers, which checkpoints contain, to every process."""
        buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        if isinstance(self.peers, Processes) and buffers:
            self.peers.doing = doing
            copy_buffers(buffers, from_rank(0, buffers))


@dataclass(kw_only=True, eq=False)
class OneReplica(RankStrategy):
    """Strategy whose processes share a model's computation, and carry one replica together."""

    pretends = False

    @property
    @abc.abstractmethod
    def parts(self) -> int:
        """Number of parts into which the model is divided, one for each process."""

    def processes(self, device: str, replicas: int) -> int:
        name = f"strategy={type(self).__module__.rpartition('.')[2]}"
        # Each replica would need its own processes.
        ConfigError.raise_if(
            replicas > 1,
            "replicas",
            f"{name} divides the model, not the batch: it carries one replica",
            replicas,
            "1",
            "replicas=1, and accumulate=N for micro-batches",
        )
        size = self.size if is_rank() else self.count_processes(device, otherwise=self.parts)
        ConfigError.raise_if(
            size != self.parts,
            "strategy.nproc",
            f"{name} with a model in {self.parts} parts needs a process for each",
            size,
            f"{self.parts}, or null",
        )
        return size

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        self._meet(device, accumulate)


def _join(
    *, backend: str, join_timeout_s: float, timeout_s: float, init_method: str | None
) -> Peers:
    """Wait for the other ranks, and create the process group.

    The backend is for tensors on the run's device. Tensors on the CPU are sent by gloo, except with
    mpi.

    Raises:
        ConfigError: Some ranks do not come, or the backend does not work.
    """
    if not is_rank():
        return Alone()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if is_simulated():
        from samewise.runner.torch_private import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return SimulatedPeers(None, rank=rank, size=size, timeout_s=timeout_s)
    if is_one_machine():
        listen_locally()
    store = meeting_point(join_timeout_s, init_method)
    store.set(f"joined/{rank}", f"{machine_name()} {os.getpid()}")
    expected = [f"joined/{number}" for number in range(size)]
    missing = wait_for(store, expected, join_timeout_s)
    numbers = ", ".join(str(expected.index(key)) for key in missing)
    ConfigError.raise_if(
        missing,
        "strategy.join_timeout_s",
        f"rank {numbers} of {size} did not join within {join_timeout_s:g} s",
        expected=f"ranks 0 to {size - 1}",
        hint="start WORLD_SIZE processes, all with the same MASTER_ADDR and MASTER_PORT",
    )
    places.update({number: store.get(key).decode().split() for number, key in enumerate(expected)})
    if not dist.is_initialized():
        # Size of torch's flight recorder, from which a message names the collective
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
        try:
            dist.init_process_group(
                f"cpu:gloo,cuda:{backend}" if backend == "nccl" else backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                Problem("strategy.backend", first_line(error), backend, "gloo, or nccl with CUDA")
            ) from error
    return Processes(store, rank=rank, size=size, timeout_s=timeout_s)
