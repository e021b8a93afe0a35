"""Jobs on this machine: one new process each, as many at a time as there are cores and GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.base import Job, Launcher, Seen, Standing
from samewise.runner.launchers.parent import JobParent
from samewise.runner.launchers.submission import describe_exit_code
from samewise.runner.processes.memory import require_few
from samewise.runner.processes.this_process import ENDS_WITH_LAUNCHER
from samewise.runner.processes.variables import HASH_SEED
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.tracking.link import SHARED
from samewise.runner.tracking.sender_parent import SenderParent


@dataclass(frozen=True)
class _Share:
    """The resources that a job has to itself."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


@final
class Local(Launcher):
    """Starts processes. However the sweep's process ends, they save and end with it.

    Args:
        jobs: How many at a time; null: as many as there are cores and, if there are any, GPUs for.
            Each gets the GPUs with the fewest running jobs.
        pin: Keep each job to its own cores.
        preload: Start jobs as copies of a process that has imported torch already, and their
            senders of one that has imported mlflow; false: all from scratch.
    """

    def __init__(self, *, jobs: int | None = None, pin: bool = True, preload: bool = True) -> None:
        if jobs is not None and jobs < 1:
            raise ConfigError(Problem("jobs", "is too small", jobs, "at least 1, or null"))
        require_few("launcher.jobs", jobs or 1)
        self.most, self._pin, self._preload = jobs, pin, preload
        self._cores = sorted(os.sched_getaffinity(0))
        self._gpus = visible_gpus()
        self._shares = dict[int, _Share]()
        self._alone = dict[int, subprocess.Popen[bytes]]()
        self._parents = dict[tuple[tuple[str, str], ...], JobParent]()
        self._senders: SenderParent | None = None
        self._tracks = False

    def open(self, sweep: SweepFolder) -> None:
        self._tracks = bool(sweep.facts["tracking"]["enabled"])

    def room(self, running: Sequence[Job]) -> int:
        """One more if there are resources left: a job's needs are known only when it is submitted."""
        if not running:
            return 1
        if self.most is not None:
            return int(len(running) < self.most)
        needs = max(running, key=lambda job: job.threads)
        cores = len(self._cores) - sum(job.threads for job in running)
        free = set(self._gpus) - set(self._busy_gpus())
        enough_gpus = not (self._gpus and needs.wants_gpu) or len(free) >= needs.processes
        return int(cores >= needs.threads and enough_gpus)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            share = self._take(job)
            environment = {**_environment(job, share), **self._sender_variables(job)}
            cores = share.cores if self._pin and share.cores else None
            if self._preload and job.processes == 1:
                self._parent(job).start(job, environment, cores)
            else:
                self._alone[job.number] = _spawn(job, environment, cores)

    def look(self, numbers: Iterable[int]) -> dict[int, Seen]:
        ended = dict[int, int]()
        for parent in self._parents.values():
            ended |= parent.collect_ended()
        for number, process in list(self._alone.items()):
            if process.poll() is not None:
                ended[number] = process.returncode
        found = dict[int, Seen]()
        for number in numbers:
            if number in ended:
                self._shares.pop(number, None)
                self._alone.pop(number, None)
                found[number] = Seen(
                    Standing.gone, describe_exit_code(ended[number]) if ended[number] < 0 else ""
                )
            else:
                found[number] = Seen(Standing.running if number in self._shares else Standing.gone)
        return found

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        wanted = set(numbers)
        for parent in self._parents.values():
            parent.signal(wanted, signal.SIGKILL if kill else signal.SIGTERM)
        for number in wanted & set(self._alone):
            self._alone[number].send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()
        if self._senders is not None:
            self._senders.close()
            self._senders = None

    def _sender_variables(self, job: Job) -> dict[str, str]:
        """The address of a process that has imported mlflow, for the run."""
        if not (self._preload and self._tracks and hasattr(os, "pidfd_open")):
            return {}
        self._senders = self._senders or SenderParent(job.sweep / "logs" / "parent.log")
        return {SHARED: self._senders.address}

    def _parent(self, job: Job) -> JobParent:
        """The process that forks jobs with these variables."""
        key = tuple(
            sorted(
                (name, value)
                for name, value in job.environment.items()
                if not name.startswith("SAMEWISE_")
            )
        )
        if key not in self._parents or not self._parents[key].is_alive():
            self._parents[key] = JobParent(dict(key), log=job.sweep / "logs" / "parent.log")
        return self._parents[key]

    def _take(self, job: Job) -> _Share:
        taken = {core for share in self._shares.values() for core in share.cores}
        free = [core for core in self._cores if core not in taken]
        cores = tuple(free[: job.threads]) if len(free) >= job.threads else ()
        gpus = (
            tuple(sorted(self._gpus, key=self._busy_gpus().__getitem__)[: job.processes])
            if job.wants_gpu
            else ()
        )
        self._shares[job.number] = _Share(cores, gpus)
        return self._shares[job.number]

    def _busy_gpus(self) -> Counter[str]:
        """The number of running jobs on each device."""
        return Counter(gpu for share in self._shares.values() for gpu in share.gpus)


def visible_gpus() -> list[str]:
    """The CUDA devices available to this process, by number or UUID, without importing torch.

    None if there is no driver.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        told = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        str(number) for number in range(sum(line.startswith("GPU ") for line in told.splitlines()))
    ]


def _environment(job: Job, share: _Share) -> dict[str, str]:
    return {
        **job.environment,
        **({"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}),
    }


def _spawn(
    job: Job, environment: Mapping[str, str], cores: Sequence[int] | None
) -> subprocess.Popen[bytes]:
    command = [*(["taskset", "-c", ",".join(map(str, cores))] if cores else []), *job.command]
    with open(SweepFolder(job.sweep).log(job.number), "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **HASH_SEED, **environment, ENDS_WITH_LAUNCHER: "1"},
            start_new_session=True,
        )
