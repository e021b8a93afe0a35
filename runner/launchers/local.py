"""Run jobs on this machine: a new process each, as many at a time as there are cores and GPUs."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from samewise.runner.errors import ConfigError
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.launchers.parent import JobParent
from samewise.runner.launchers.submission import describe_exit_code
from samewise.runner.processes.memory import require_few
from samewise.runner.processes.this_process import ENDS_WITH_LAUNCHER
from samewise.runner.processes.variables import HASH_SEED
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.tracking.system import visible_gpus


@dataclass(frozen=True)
class _Share:
    """Resources that a job has to itself."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


@final
class Local(Launcher):
    """Starts processes, which save and end with the sweep's process however that ends.

    Args:
        jobs: Maximum number of jobs at a time; null: as many as there are cores and, if there are
            any, GPUs for. Each gets the GPUs with the fewest running jobs.
        pin: Keep each job to its own cores.
        preload: Start jobs as copies of a process that has imported torch already; false: all from
            scratch.

    Raises:
        ConfigError: `jobs` is below 1, or more than this machine can hold.
    """

    def __init__(self, *, jobs: int | None = None, pin: bool = True, preload: bool = True) -> None:
        ConfigError.raise_if(
            jobs is not None and jobs < 1, "jobs", "is too small", jobs, "at least 1, or null"
        )
        require_few("launcher.jobs", jobs or 1)
        self.most, self._pin, self._preload = jobs, pin, preload
        self._cores = sorted(os.sched_getaffinity(0))
        self._gpus = visible_gpus()
        self._shares = dict[int, _Share]()
        self._processes = dict[int, subprocess.Popen[bytes]]()
        self._parents = dict[tuple[tuple[str, str], ...], JobParent]()

    def open(self, sweep: SweepFolder) -> None:
        pass

    def room(self, running: Sequence[Job]) -> int:
        """Return 1 if there are resources left for another job, otherwise 0."""
        # One job starts even if it needs more than there is
        if not running:
            return 1
        if self.most is not None:
            return int(len(running) < self.most)
        # A job's needs are known only when it is submitted: the largest running one stands for it
        needs = max(running, key=lambda job: job.threads)
        cores = len(self._cores) - sum(job.threads for job in running)
        free_gpus = set(self._gpus) - set(self._busy_gpus())
        enough_gpus = not (self._gpus and needs.wants_gpu) or len(free_gpus) >= needs.processes
        return int(cores >= needs.threads and enough_gpus)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            share = self._take(job)
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}
            environment = {**job.environment, **devices}
            cores = share.cores if self._pin and share.cores else None
            if self._preload and job.processes == 1:
                self._parent(job).start(job, environment, cores)
            else:
                self._processes[job.number] = _spawn(job, environment, cores)

    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        ended = dict[int, int]()
        for parent in self._parents.values():
            ended |= parent.collect_ended()
        for number, process in list(self._processes.items()):
            if process.poll() is not None:
                ended[number] = process.returncode
        for number in ended:
            self._shares.pop(number, None)
            self._processes.pop(number, None)
        return {
            number: JobState(Standing.running)
            if number in self._shares
            else JobState(
                Standing.ended,
                describe_exit_code(ended[number]) if ended.get(number, 0) < 0 else "",
            )
            for number in numbers
        }

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        chosen_jobs = set(numbers)
        for parent in self._parents.values():
            parent.signal(chosen_jobs, signal.SIGKILL if kill else signal.SIGTERM)
        for number in chosen_jobs & set(self._processes):
            self._processes[number].send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()

    def _parent(self, job: Job) -> JobParent:
        """Return the process that forks jobs with these variables, started on first use."""
        # Variables of samewise differ from job to job, and torch does not read them
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
        """Reserve cores and GPUs for a job."""
        busy_cores = {core for share in self._shares.values() for core in share.cores}
        free_cores = [core for core in self._cores if core not in busy_cores]
        cores = tuple(free_cores[: job.threads]) if len(free_cores) >= job.threads else ()
        gpus = (
            tuple(sorted(self._gpus, key=self._busy_gpus().__getitem__)[: job.processes])
            if job.wants_gpu
            else ()
        )
        self._shares[job.number] = _Share(cores, gpus)
        return self._shares[job.number]

    def _busy_gpus(self) -> Counter[str]:
        """Return the number of running jobs on each device."""
        return Counter(gpu for share in self._shares.values() for gpu in share.gpus)


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
            # Ctrl-C in a terminal reaches the sweep's process, which asks its jobs to save
            start_new_session=True,
        )
