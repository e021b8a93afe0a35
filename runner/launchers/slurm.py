"""Jobs in SLURM's queue: one array for all, submitted at once.

This process need not keep running. `slurm_job.py` runs on the machines.

SWEEP/slurm/
  0001.json      a submission: which point each index of its array is, and what the machines need to
  know 0001.sh        its batch script 0001-3.log     a link to the log of the point with index 3
  cancelled/     an empty file for each job that was told to stop
SWEEP/code/      copies of the code, one for each state in which it was submitted
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.base import Job, Launcher, Seen, Standing
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
_WAITING = (
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
_ENDED = (
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
_BY_ITSELF = ("FAILED", "OUT_OF_MEMORY", "DEADLINE")
"""Ends that come from the job: started again, it would end so again."""
_AT_ONCE = 500
"""Names of jobs in one command line."""


@dataclass(frozen=True)
class _Needs:
    """What the jobs of one array share."""

    nodes: int
    tasks: int
    """On each node."""
    cpus: int
    """Of each task."""
    gpus: str | None


@final
class Slurm(Launcher):
    """Submits job arrays. A job that is preempted, or nears its time limit, saves and is requeued.

    Args:
        partition: Of the cluster; null: its default.
        time: Limit of each job, as sbatch takes it; null: the partition's.
        account: The account that is charged.
        qos: Quality of service.
        nodes: Machines for each job.
        cpus: Of each job on each machine; null: as many as it keeps busy.
        gpus: For each job on each machine, a number or TYPE:NUMBER; null: one per process, if the
            partition has any.
        mem: Of each job on each machine; null: the cluster's default.
        jobs: How many at a time; null: any number.
        setup: Shell lines before each job.
        extra: Further arguments of sbatch.
        python: The interpreter on the machines; null: this one.
        notice_s: Seconds before the time limit at which a run is told to save, and that a cancelled
            one has before it is ended.
        requeues: How often a job may be put back into the queue.
        poll_s: Seconds between two looks.
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
        least = {
            "nodes": (nodes, 1),
            "cpus": (cpus, 1),
            "jobs": (jobs, 1),
            "notice_s": (notice_s, 1),
            "requeues": (requeues, 0),
            "poll_s": (poll_s, 0.1),
        }
        found = too_small(least)
        if found:
            raise ConfigError(*found)
        self._partition, self._nodes, self._cpus, self._gpus, self.most = (
            partition,
            nodes,
            cpus,
            gpus,
            jobs,
        )
        self._setup, self._python, self._notice_s, self._requeues, self.poll_s = (
            tuple(setup),
            python or sys.executable,
            notice_s,
            requeues,
            poll_s,
        )
        given = {"partition": partition, "time": time, "account": account, "qos": qos, "mem": mem}
        self._arguments = [
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
            *extra,
        ]
        self._last = dict[str, Seen]()

    def open(self, sweep: SweepFolder) -> None:
        missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
        if missing:
            words = f"{' and '.join(missing)} cannot be found on this machine"
            raise ConfigError(
                Problem(
                    "launcher", words, "slurm", "a machine of a SLURM cluster", "launcher=local"
                )
            )
        self._sweep = sweep
        self._home = sweep.path.absolute() / HOME

    def submit(self, jobs: Sequence[Job]) -> None:
        (self._home / "cancelled").mkdir(parents=True, exist_ok=True)
        code = snapshot(self._sweep)
        for needs, some in group_jobs(jobs, self._needs, self._longest()):
            self._submit(some, needs, code)

    def look(self, numbers: Iterable[int]) -> dict[int, Seen]:
        where = self._where(numbers)
        if not where:
            return {}
        known = self._queue({name.partition("_")[0] for name in where.values()})
        if known is None:  # the controller is restarting
            return {
                number: self._last.get(name, Seen(Standing.waiting))
                for number, name in where.items()
            }
        self._last |= known
        return {
            number: known.get(name) or self._look_at_forgotten(name)
            for number, name in where.items()
        }

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        where = self._where(numbers)
        standing = {where[number]: seen.standing for number, seen in self.look(where).items()}
        live = [name for name, one in standing.items() if one is not Standing.gone]
        if not kill:
            for name in live:
                (self._home / "cancelled" / name).touch()  # used by a running job
        ended = live if kill else [name for name in live if standing[name] is Standing.waiting]
        for some in chunks(ended, _AT_ONCE):
            # Not with --state=PENDING: in SLURM 22.05 that ends all waiting jobs of the array
            _call("scancel", *some)

    def _look_at_forgotten(self, name: str) -> Seen:
        """The state of a job that SLURM no longer knows: it ended minutes ago, or was cancelled
        while waiting, of which SLURM keeps no record.
        """
        array, _, index = name.partition("_")
        links = [
            file.with_name(f"{file.stem}-{index}.log")
            for file in self._home.glob("*.json")
            if (read_json(file, shapes.SUBMISSION) or {}).get("job") == array
        ]
        began = any(
            link.exists() and link.stat().st_mtime >= link.lstat().st_mtime for link in links
        )
        return Seen(
            Standing.gone,
            f"SLURM has no record of its job {name}" if began else "CANCELLED while waiting",
        )

    def _needs(self, job: Job) -> _Needs:
        """What a job needs of each machine."""
        if self._nodes > 1 and job.spread is None:
            hint = "strategy=elastic replicas=N, launcher.nodes=1"
            raise ConfigError(
                Problem(
                    "launcher.nodes",
                    "the strategy has one process, which cannot run on several machines",
                    self._nodes,
                    "1",
                    hint,
                )
            )
        if self._nodes > 1 and job.spread == "whole" and job.processes % self._nodes:
            message = (
                f"{job.processes} processes cannot be divided equally among {self._nodes} machines"
            )
            raise ConfigError(
                Problem("launcher.nodes", message, self._nodes, f"a divisor of {job.processes}")
            )
        here = (
            job.processes // self._nodes
            if self._nodes > 1 and job.spread == "whole"
            else job.processes
        )
        tasks = here if self._nodes > 1 else 1  # on one machine the job starts its ranks itself
        cpus = self._cpus or job.threads * here // job.processes
        return _Needs(self._nodes, tasks, max(1, cpus // tasks), self._gpus_of(job, here))

    def _gpus_of(self, job: Job, here: int) -> str | None:
        if self._gpus is not None:
            return f"gpu:{self._gpus}" if self._gpus not in (0, "0") else None
        return f"gpu:{here}" if job.wants_gpu and self._has_gpus() else None

    def _has_gpus(self) -> bool:
        if not hasattr(self, "_gres"):
            self._gres = _call(
                "sinfo",
                "--noheader",
                "--format=%G",
                *([f"--partition={self._partition}"] if self._partition else []),
            ).stdout
        return "gpu" in self._gres

    def _longest(self) -> int:
        """The maximum number of jobs in an array."""
        found = re.search(
            r"^MaxArraySize\s*=\s*(\d+)", _call("scontrol", "show", "config").stdout, re.M
        )
        return int(found[1]) - 1 if found else 1000

    def _submit(self, jobs: Sequence[Job], needs: _Needs, code: Path) -> None:
        file = next_file(self._home)
        given = {
            "points": [job.number for job in jobs],
            "variables": [dict(job.environment) for job in jobs],
            "python": self._python,
            "nodes": needs.nodes,
            "tasks": needs.tasks,
            "cpus": needs.cpus,
            "notice_s": self._notice_s,
            "requeues": self._requeues,
        }
        write_json(file, given)
        script = file.with_suffix(".sh")
        script.write_text(self._script(file, code), encoding="utf-8")
        links = [self._home / f"{file.stem}-{index}.log" for index in range(len(jobs))]
        for link, job in zip(links, jobs, strict=True):
            link.unlink(missing_ok=True)
            link.symlink_to(self._sweep.log(job.number).absolute())
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
        done = _call(*command)
        if done.returncode:
            for one in (file, script, *links):
                one.unlink()
            words = f"SLURM refused the jobs: {_refusal(done)}"
            if "partition" in words.lower():
                named = "is not set" if self._partition is None else f"is {self._partition}"
                raise ConfigError(
                    Problem(
                        "launcher.partition",
                        f"{words}; launcher.partition {named}",
                        hint="`sinfo` lists the cluster's partitions",
                    )
                )
            raise ConfigError(Problem("launcher", words, shlex.join(command[1:-1])))
        write_json(file, {**given, "job": done.stdout.strip().partition(";")[0]})

    def _script(self, file: Path, code: Path) -> str:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables(code).items()]
        start = shlex.join(
            [self._python, "-P", "-m", "samewise.runner.launchers.slurm_job", str(file)]
        )
        return "\n".join(["#!/bin/bash", "set -e", *exports, *self._setup, f"exec {start}"]) + "\n"

    def _where(self, numbers: Iterable[int]) -> dict[int, str]:
        """The latest job of each submitted point, as `ARRAY_INDEX`."""
        return {
            number: f"{job.given['job']}_{job.index}"
            for number, job in newest(self._home, numbers, key="job").items()
        }

    def _queue(self, arrays: Iterable[str]) -> dict[str, Seen] | None:
        """All jobs of some arrays that SLURM still knows, by `ARRAY_INDEX`.

        None if it answered before and does not now.
        """
        columns = "ArrayJobID:24,ArrayTaskID:16,State:24,exit_code:16,Reason:200"
        found = dict[str, Seen]()
        for some in chunks(sorted(arrays), _AT_ONCE):
            done = _call(
                "squeue",
                "--noheader",
                "--array",
                "--states=all",
                f"--jobs={','.join(some)}",
                f"--Format={columns}",
            )
            if done.returncode and "Invalid job id" not in done.stderr:
                if self._last:
                    return None
                raise ConfigError(
                    Problem("launcher", f"SLURM does not answer: {_refusal(done)}", "slurm")
                )
            found |= (
                dict(map(_read, filter(str.strip, done.stdout.splitlines())))
                if not done.returncode
                else {}
            )
        return found


def _read(line: str) -> tuple[str, Seen]:
    """Interpret squeue's description of a job."""
    array, index, state, status, reason = (
        line[:24].strip(),
        line[24:40].strip(),
        line[40:64].strip(),
        line[64:80].strip(),
        line[80:].strip(),
    )
    name = f"{array}_{index}"
    if state in _WAITING:
        return name, Seen(Standing.waiting, "" if reason == "None" else reason)
    if state not in _ENDED:
        return name, Seen(Standing.running)
    if state == "COMPLETED":
        return name, Seen(Standing.gone, "")
    code = os.waitstatus_to_exitcode(int(status)) if status.isdigit() else 0
    how = f" with exit code {code}" if code > 0 and state == "FAILED" else ""
    why = f" ({reason})" if reason not in ("", "None", "NonZeroExitCode") else ""
    return name, Seen(Standing.gone, state + how + why, failed=state in _BY_ITSELF)


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command, without the variables of a surrounding job, which it would take for
    options.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in ("SLURM_CONF", "SLURM_CLUSTERS")
    }
    return call(*command, environment=kept)


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r"^\w+: ((error|fatal): )?", "", last_line(done.stderr)) or "no message"
