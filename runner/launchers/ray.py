"""Run jobs on a running Ray cluster, by its Jobs API and without importing Ray.

This process need not keep running. A job's submission id is SWEEP-MADE-NUMBER-TRY, with the time
when the sweep was made as MADE, so that any process finds earlier submissions.

    SWEEP/ray/cancelled/   an empty file for each job that was told to stop while it waited
    SWEEP/code/            copies of the code, one for each state in which it was submitted
"""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.launchers.ray_jobs import NoAnswer, Refused, Server, address_from
from samewise.runner.launchers.snapshot import snapshot, variables
from samewise.runner.launchers.submission import too_small
from samewise.runner.records.sweep_folder import SweepFolder

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MAX_REASON = 200
"""Maximum length of a reason."""


@final
class Ray(Launcher):
    """Submits jobs to a running cluster that shares this machine's file system.

    Args:
        address: Address of the cluster's dashboard, http://HOST:8265; null: RAY_API_SERVER_ADDRESS,
            else RAY_ADDRESS.
        cpus: CPUs of each job; null: as many as it keeps busy.
        gpus: GPUs of each job, also a fraction (0.5); null: one per process, if the cluster has
            any.
        mem: Memory of each job, in bytes or as "16G"; null: not counted.
        resources: The cluster's own resources for each job: {"accelerator_type:A100": 0.01}.
        jobs: Maximum number of jobs at a time, with --wait; null: any number.
        python: The interpreter on the machines; null: this one.
        stop_s: Seconds that a job has to save when it is stopped.
        poll_s: Seconds between two looks at the jobs.

    Raises:
        ConfigError: A number is too small, or `mem` is not an amount of memory.
    """

    detached = True

    def __init__(
        self,
        *,
        address: str | None = None,
        cpus: float | None = None,
        gpus: float | None = None,
        mem: str | int | None = None,
        resources: Mapping[str, float] | None = None,
        jobs: int | None = None,
        python: str | None = None,
        stop_s: int = 120,
        poll_s: float = 2.0,
    ) -> None:
        minimums = {
            "cpus": (cpus, 0.001),
            "gpus": (gpus, 0),
            "jobs": (jobs, 1),
            "stop_s": (stop_s, 1),
            "poll_s": (poll_s, 0.1),
        }
        problems = too_small(minimums)
        size = re.fullmatch(r"(\d+)([KMGT]?)", str(mem)) if mem is not None else None
        if mem is not None and size is None:
            problems.append(
                Problem(
                    "mem",
                    "is not a valid amount of memory",
                    mem,
                    "bytes, or a number with K, M, G or T: 16G",
                )
            )
        ConfigError.raise_all(problems)
        self._address, self._cpus, self._gpus = address, cpus, gpus
        self._resources, self.most = dict(resources or {}), jobs
        self._mem = int(size[1]) * _UNITS[size[2]] if size else None
        self._python, self._stop_s, self.poll_s = python or sys.executable, stop_s, poll_s
        self._last = dict[int, JobState]()

    def open(self, sweep: SweepFolder) -> None:
        self._server = Server(address_from(self._address))
        self._sweep = sweep
        self._home = sweep.path.absolute()
        self._prefix = f"{sweep.id}-{round(sweep.facts['made'] * 1000):x}-"
        self._ask("/api/version")

    def submit(self, jobs: Sequence[Job]) -> None:
        ConfigError.raise_if(
            self.most is not None and len(jobs) > self.most,
            "launcher.jobs",
            "Ray cannot limit how many jobs of a sweep run at a time",
            self.most,
            "null",
            "add --wait: this process then submits one job at a time, and must stay "
            "running; or raise launcher.cpus or launcher.resources",
        )
        code = snapshot(self._sweep)
        tries = {number: _try(job) for number, job in self._jobs().items()}
        for job in jobs:
            self._ask(
                "/api/jobs/", self._request(job, tries.get(job.number, 0) + 1, code), post=True
            )
            self._last[job.number] = JobState(Standing.waiting)

    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        points = set(numbers)
        try:
            jobs = self._jobs(wait=bool(self._last))
        except NoAnswer:
            # The head node is restarting
            return {number: self._last[number] for number in points & self._last.keys()}
        for number in points:
            if number in jobs:
                self._last[number] = self._read(jobs[number])
            elif number in self._last or self._has_started(number):
                self._last[number] = JobState(Standing.ended, "Ray has no record of its job")
        return {number: self._last[number] for number in points & self._last.keys()}

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        jobs = self._jobs()
        for number in numbers:
            job = jobs.get(number)
            if job is None or self._read(job).standing is Standing.ended:
                continue
            # Ray would still start a pending job once there is room, and then stop it
            if job["status"] == "PENDING":
                mark = self._mark(job["submission_id"])
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            self._ask(f"/api/jobs/{quote(job['submission_id'])}/stop", post=True)

    def _request(self, job: Job, attempt: int, code: Path) -> dict[str, Any]:
        """Return the body of a submission: the command, its variables and its resources."""
        name = f"{self._prefix}{job.number:04d}-{attempt}"
        start = shlex.join([self._python, *Job(job.number, job.name, self._home).arguments])
        log = shlex.quote(str(self._sweep.log(job.number).absolute()))
        mark = shlex.quote(str(self._mark(name)))
        # A job that was cancelled while it waited ends before it trains
        command = f"cd {shlex.quote(str(Path.cwd()))} && test ! -e {mark} && exec {start}"
        environment = {
            **job.environment,
            **variables(code),
            # By default Ray kills a job 3 seconds after asking it to stop
            "RAY_JOB_STOP_WAIT_TIME_S": str(self._stop_s),
        }
        return {
            "submission_id": name,
            "entrypoint": f"{command} >> {log} 2>&1",
            "runtime_env": {"env_vars": environment},
            "metadata": {"sweep": self._sweep.id, "point": job.name},
            "entrypoint_num_cpus": self._cpus if self._cpus is not None else job.threads,
            "entrypoint_num_gpus": self._gpus_of(job),
            **({"entrypoint_memory": self._mem} if self._mem else {}),
            **({"entrypoint_resources": self._resources} if self._resources else {}),
        }

    def _gpus_of(self, job: Job) -> float:
        if self._gpus is not None:
            return self._gpus
        return job.processes if job.wants_gpu and self._has_gpus else 0

    @cached_property
    def _has_gpus(self) -> bool:
        try:
            nodes = self._ask("/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
            return any(
                node["resources_total"].get("GPU") for node in nodes if node["state"] == "ALIVE"
            )
        except (ConfigError, KeyError, TypeError, AttributeError):
            # Ray may change the path of this API
            raise ConfigError(
                Problem(
                    "launcher.gpus",
                    "this Ray does not say whether its cluster has GPUs",
                    "null",
                    "a number",
                    "0, or the number each job needs",
                )
            ) from None

    def _jobs(self, *, wait: bool = False) -> dict[int, Mapping[str, Any]]:
        """Return the latest job of each point, as Ray reports it.

        Args:
            wait: Raise NoAnswer instead of ConfigError if the server is away.
        """
        own_jobs = (
            job
            for job in self._ask("/api/jobs/", wait=wait)
            if str(job.get("submission_id")).startswith(self._prefix)
        )
        return {int(job["submission_id"].split("-")[-2]): job for job in sorted(own_jobs, key=_try)}

    def _read(self, job: Mapping[str, Any]) -> JobState:
        """Interpret Ray's description of a job."""
        status = str(job["status"])
        if status == "RUNNING":
            return JobState(Standing.running)
        # Whatever Ray reports: it may fail to stop a job that ends at once
        if self._mark(job["submission_id"]).exists():
            return JobState(Standing.ended, "STOPPED while waiting")
        if status == "PENDING":
            return JobState(Standing.waiting)
        if status == "SUCCEEDED":
            return JobState(Standing.ended)
        if status == "STOPPED":
            return JobState(Standing.ended, status)
        code, error = int(job.get("driver_exit_code") or 0), str(job.get("error_type") or "")
        lines = [
            line.strip() for line in str(job.get("message") or "").splitlines() if line.strip()
        ]
        if code:
            outcome = (
                f"FAILED with exit code {code}" if code > 0 else f"FAILED, killed by signal {-code}"
            )
            last_line = (
                lines[-1]
                if len(lines) > 1 and not lines[-1].startswith("Running entrypoint")
                else ""
            )
            return JobState(
                Standing.ended,
                f"{outcome}{last_line and f': {last_line[:_MAX_REASON]}'}",
                # A killed job may do better the next time
                failed=code > 0,
            )
        # A traceback's last line is its error; other messages begin with theirs
        reason = (
            lines[-1]
            if lines and lines[0].startswith("Traceback")
            else lines[0]
            if lines
            else error
        )
        return JobState(
            Standing.ended,
            f"FAILED: {reason[:_MAX_REASON]}",
            failed=error == "RUNTIME_ENV_SETUP_FAILURE",
        )

    def _has_started(self, number: int) -> bool:
        """Whether a job has started and not recorded its end."""
        record = self._sweep.word(number)
        return "began" in record and "ended" not in record

    def _mark(self, name: str) -> Path:
        """Return the file that exists if the job was told to stop while it waited."""
        return self._home / "ray" / "cancelled" / name

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        post: bool = False,
        wait: bool = False,
    ) -> Any:
        """Send a request and return the answer.

        Raises:
            ConfigError: The request was refused or not answered.
            NoAnswer: The server is away, and `wait` is set.
        """
        try:
            return self._server.ask(path, body, post=post)
        except Refused as refusal:
            if wait and refusal.code >= 500:
                raise NoAnswer(str(refusal)) from None
            raise ConfigError(
                Problem(
                    "launcher",
                    f"Ray refused the request: {refusal}",
                    self._server.address,
                    hint="RAY_AUTH_TOKEN, or the file ~/.ray/auth_token: `ray get-auth-token`"
                    if refusal.code in (401, 403)
                    else "",
                )
            ) from None
        except NoAnswer as error:
            if wait:
                raise
            raise ConfigError(
                Problem(
                    "launcher.address",
                    f"no Ray cluster answers: {error}",
                    self._server.address,
                    "a running cluster with its dashboard: `pip install 'ray[default]'` and `ray "
                    "start --head`",
                )
            ) from None


def _try(job: Mapping[str, Any]) -> int:
    return int(str(job["submission_id"]).rsplit("-", 1)[-1])
