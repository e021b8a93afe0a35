"""Run jobs in SLURM's queue: one array for all, submitted at once.

This process need not keep running. `slurm_job.py` runs on the machines.

    SWEEP/slurm/
      0001.json      a submission: the point of each index of its array, and what the machines need
      0001.sh        its batch script
      0001-3.log     a link to the log of the point with index 3
      cancelled/     an empty file for each job that was told to stop
    SWEEP/code/      copies of the code, one for each state in which it was submitted
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.launchers.snapshot import snapshot, variables
from samewise.runner.launchers.submission import (
    call,
    chunks,
    group_jobs,
    last_line,
    newest,
    next_file,
    too_small,
)
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.sweep_folder import SweepFolder

HOME = "slurm"
_WAITING_STATES = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "CONFIGURING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
)
_ENDED_STATES = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
)
_FINAL_STATES = ("FAILED", "OUT_OF_MEMORY", "DEADLINE")
"""States of a job that would end the same way again."""
_JOBS_PER_CALL = 500
"""Maximum number of job names in one command line."""


@dataclass(frozen=True)
class _Needs:
    """Resources that the jobs of one array share."""

    nodes: int
    tasks: int
    """Tasks on each node."""
    cpus: int
    """CPUs of each task."""
    gpus: str | None


@final
class Slurm(Launcher):
    """Submits job arrays. A job that is preempted, or nears its time limit, saves and is requeued.

    Args:
        partition: The cluster's partition; null: its default.
        time: Time limit of each job, as sbatch takes it; null: the partition's.
        account: The account that is charged.
        qos: Quality of service.
        nodes: Machines for each job.
        cpus: CPUs of each job on each machine; null: as many as it keeps busy.
        gpus: GPUs of each job on each machine, a number or TYPE:NUMBER; null: one per process, if
            the partition has any.
        mem: Memory of each job on each machine; null: the cluster's default.
        jobs: Maximum number of jobs at a time; null: any number.
        setup: Shell lines to run before each job.
        extra: Further arguments of sbatch.
        python: The interpreter on the machines; null: this one.
        notice_s: Seconds before the time limit at which a run is told to save, and that a cancelled
            one has before it is ended.
        requeues: How often a job may be put back into the queue.
        poll_s: Seconds between two looks at the jobs.

    Raises:
        ConfigError: A number is too small.
    """

    detached = True

    def __init__(
        self,
        *,
        partition: str | None = None,
        time: str | int | None = None,
        account: str | None = None,
        qos: str | None = None,
        nodes: int = 1,
        cpus: int | None = None,
        gpus: int | str | None = None,
        mem: str | int | None = None,
        jobs: int | None = None,
        setup: Sequence[str] = (),
        extra: Sequence[str] = (),
        python: str | None = None,
        notice_s: int = 120,
        requeues: int = 100,
        poll_s: float = 5.0,
    ) -> None:
        minimums = {
            "nodes": (nodes, 1),
            "cpus": (cpus, 1),
            "jobs": (jobs, 1),
            "notice_s": (notice_s, 1),
            "requeues": (requeues, 0),
            "poll_s": (poll_s, 0.1),
        }
        ConfigError.raise_all(too_small(minimums))
        self._partition, self._nodes, self._cpus, self._gpus = partition, nodes, cpus, gpus
        self._setup, self._python = tuple(setup), python or sys.executable
        self._notice_s, self._requeues = notice_s, requeues
        self.most, self.poll_s = jobs, poll_s
        options = {"partition": partition, "time": time, "account": account, "qos": qos, "mem": mem}
        self._arguments = [
            *(f"--{name}={value}" for name, value in options.items() if value is not None),
            *extra,
        ]
        self._last = dict[str, JobState]()

    def open(self, sweep: SweepFolder) -> None:
        missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
        ConfigError.raise_if(
            missing,
            "launcher",
            f"{' and '.join(missing)} cannot be found on this machine",
            "slurm",
            "a machine of a SLURM cluster",
            "launcher=local",
        )
        self._sweep = sweep
        self._home = sweep.path.absolute() / HOME

    def submit(self, jobs: Sequence[Job]) -> None:
        (self._home / "cancelled").mkdir(parents=True, exist_ok=True)
        code = snapshot(self._sweep)
        for needs, group in group_jobs(jobs, self._needs, self._max_array_size()):
            self._submit(group, needs, code)

    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        names = self._where(numbers)
        if not names:
            return {}
        states = self._queue({name.partition("_")[0] for name in names.values()})
        if states is None:
            # The controller is restarting
            return {
                number: self._last.get(name, JobState(Standing.waiting))
                for number, name in names.items()
            }
        self._last |= states
        return {
            number: states.get(name) or self._state_of_unknown(name)
            for number, name in names.items()
        }

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        names = self._where(numbers)
        standing = {names[number]: state.standing for number, state in self.look(names).items()}
        live = [name for name, x in standing.items() if x is not Standing.ended]
        if not kill:
            for name in live:
                # A running job looks for this mark
                (self._home / "cancelled" / name).touch()
        cancelled = live if kill else [name for name in live if standing[name] is Standing.waiting]
        for group in chunks(cancelled, _JOBS_PER_CALL):
            # Not with --state=PENDING: in SLURM 22.05 that ends all waiting jobs of the array
            _call("scancel", *group)

    def _state_of_unknown(self, name: str) -> JobState:
        """Return the state of a job that SLURM no longer knows."""
        # SLURM forgets jobs some minutes after their end, and keeps no record of those cancelled
        # while waiting. A job that started has written to its log, the target of the link
        array, _, index = name.partition("_")
        links = [
            file.with_name(f"{file.stem}-{index}.log")
            for file in self._home.glob("*.json")
            if (read_json(file, shapes.SUBMISSION) or {}).get("job") == array
        ]
        has_started = any(
            link.exists() and link.stat().st_mtime >= link.lstat().st_mtime for link in links
        )
        return JobState(
            Standing.ended,
            f"SLURM has no record of its job {name}" if has_started else "CANCELLED while waiting",
        )

    def _needs(self, job: Job) -> _Needs:
        """Return the resources that a job needs on each machine."""
        ConfigError.raise_if(
            self._nodes > 1 and job.spread is None,
            "launcher.nodes",
            "the strategy has one process, which cannot run on several machines",
            self._nodes,
            "1",
            "strategy=elastic replicas=N, launcher.nodes=1",
        )
        ConfigError.raise_if(
            self._nodes > 1 and job.spread == "whole" and job.processes % self._nodes,
            "launcher.nodes",
            f"{job.processes} processes cannot be divided equally among {self._nodes} machines",
            self._nodes,
            f"a divisor of {job.processes}",
        )
        processes = (
            job.processes // self._nodes
            if self._nodes > 1 and job.spread == "whole"
            else job.processes
        )
        # On one machine the job starts its ranks itself
        tasks = processes if self._nodes > 1 else 1
        cpus = self._cpus or job.threads * processes // job.processes
        return _Needs(self._nodes, tasks, max(1, cpus // tasks), self._gpus_of(job, processes))

    def _gpus_of(self, job: Job, processes: int) -> str | None:
        """Return the generic resources (GRES) of a job with this many processes on each machine."""
        if self._gpus is not None:
            return f"gpu:{self._gpus}" if self._gpus not in (0, "0") else None
        return f"gpu:{processes}" if job.wants_gpu and self._has_gpus else None

    @cached_property
    def _has_gpus(self) -> bool:
        partition = [f"--partition={self._partition}"] if self._partition else []
        return "gpu" in _call("sinfo", "--noheader", "--format=%G", *partition).stdout

    def _max_array_size(self) -> int:
        """Return the maximum number of jobs in an array."""
        match = re.search(
            r"^MaxArraySize\s*=\s*(\d+)", _call("scontrol", "show", "config").stdout, re.M
        )
        # Indices must be below MaxArraySize, by default 1001
        return int(match[1]) - 1 if match else 1000

    def _submit(self, jobs: Sequence[Job], needs: _Needs, code: Path) -> None:
        """Submit an array of jobs with the same needs.

        Raises:
            ConfigError: SLURM refuses it.
        """
        file = next_file(self._home)
        submission = {
            "points": [job.number for job in jobs],
            "variables": [dict(job.environment) for job in jobs],
            "python": self._python,
            "nodes": needs.nodes,
            "tasks": needs.tasks,
            "cpus": needs.cpus,
            "notice_s": self._notice_s,
            "requeues": self._requeues,
        }
        write_json(file, submission)
        script = file.with_suffix(".sh")
        script.write_text(self._script(file, code), encoding="utf-8")
        links = [self._home / f"{file.stem}-{index}.log" for index in range(len(jobs))]
        for link, job in zip(links, jobs, strict=True):
            link.unlink(missing_ok=True)
            link.symlink_to(self._sweep.log(job.number).absolute())
        # sbatch expands %a to the index, and %% to %
        logs = str(self._home / f"{file.stem}-").replace("%", "%%") + "%a.log"
        command = [
            "sbatch",
            "--parsable",
            f"--array=0-{len(jobs) - 1}" + (f"%{self.most}" if self.most else ""),
            f"--job-name={self._sweep.id}",
            "--requeue",
            "--open-mode=append",
            f"--signal=USR1@{self._notice_s}",
            f"--output={logs}",
            f"--nodes={needs.nodes}",
            f"--ntasks-per-node={needs.tasks}",
            f"--cpus-per-task={needs.cpus}",
            *([f"--gres={needs.gpus}"] if needs.gpus else []),
            *self._arguments,
            str(script),
        ]
        result = _call(*command)
        if result.returncode:
            for path in (file, script, *links):
                path.unlink()
            message = f"SLURM refused the jobs: {_refusal(result)}"
            if "partition" in message.lower():
                setting = "is not set" if self._partition is None else f"is {self._partition}"
                raise ConfigError(
                    Problem(
                        "launcher.partition",
                        f"{message}; launcher.partition {setting}",
                        hint="`sinfo` lists the cluster's partitions",
                    )
                )
            raise ConfigError(Problem("launcher", message, shlex.join(command[1:-1])))
        # With --parsable sbatch prints JOB, or JOB;CLUSTER
        write_json(file, {**submission, "job": result.stdout.strip().partition(";")[0]})

    def _script(self, file: Path, code: Path) -> str:
        """Return the batch script, which starts `slurm_job.py` with the copied code."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables(code).items()]
        start = shlex.join(
            [self._python, "-P", "-m", "samewise.runner.launchers.slurm_job", str(file)]
        )
        return "\n".join(["#!/bin/bash", "set -e", *exports, *self._setup, f"exec {start}"]) + "\n"

    def _where(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the latest job of each submitted point, as `ARRAY_INDEX`."""
        return {
            number: f"{job.record['job']}_{job.index}"
            for number, job in newest(self._home, numbers, key="job").items()
        }

    def _queue(self, arrays: Iterable[str]) -> dict[str, JobState] | None:
        """Return all jobs of some arrays that SLURM still knows, by `ARRAY_INDEX`.

        None if SLURM answered an earlier call and does not answer now.
        """
        # Columns of fixed width, since a reason may contain spaces
        columns = "ArrayJobID:24,ArrayTaskID:16,State:24,exit_code:16,Reason:200"
        states = dict[str, JobState]()
        for group in chunks(sorted(arrays), _JOBS_PER_CALL):
            result = _call(
                "squeue",
                "--noheader",
                "--array",
                "--states=all",
                f"--jobs={','.join(group)}",
                f"--Format={columns}",
            )
            # SLURM answers so about arrays that it has forgotten
            if result.returncode and "Invalid job id" not in result.stderr:
                if self._last:
                    return None
                raise ConfigError(
                    Problem("launcher", f"SLURM does not answer: {_refusal(result)}", "slurm")
                )
            states |= (
                dict(map(_read, filter(str.strip, result.stdout.splitlines())))
                if not result.returncode
                else {}
            )
        return states


def _read(line: str) -> tuple[str, JobState]:
    """Parse squeue's description of a job."""
    array, index, state, status, reason = (
        line[:24].strip(),
        line[24:40].strip(),
        line[40:64].strip(),
        line[64:80].strip(),
        line[80:].strip(),
    )
    name = f"{array}_{index}"
    if state in _WAITING_STATES:
        return name, JobState(Standing.waiting, "" if reason == "None" else reason)
    if state not in _ENDED_STATES:
        return name, JobState(Standing.running)
    if state == "COMPLETED":
        return name, JobState(Standing.ended, "")
    code = os.waitstatus_to_exitcode(int(status)) if status.isdigit() else 0
    code_text = f" with exit code {code}" if code > 0 and state == "FAILED" else ""
    reason_text = f" ({reason})" if reason not in ("", "None", "NonZeroExitCode") else ""
    return name, JobState(
        Standing.ended, state + code_text + reason_text, failed=state in _FINAL_STATES
    )


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command."""
    # SLURM's commands would take the variables of a surrounding job for options
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in ("SLURM_CONF", "SLURM_CLUSTERS")
    }
    return call(*command, environment=environment)


def _refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Return SLURM's message, without the command's name."""
    return re.sub(r"^\w+: ((error|fatal): )?", "", last_line(result.stderr)) or "no message"
