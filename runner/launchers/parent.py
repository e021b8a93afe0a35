"""Fork one process per job from a process that has imported what every job needs.

    python -m samewise.runner.launchers.parent

This saves the seconds of importing. It is safe because the process does nothing else: it has one
thread, has computed nothing, has not touched CUDA, and its variables are those that the jobs'
configs ask for. Its standard input has a line of JSON for each job, its standard output one for
each job that has ended. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samewise.runner.launchers.base import Job
from samewise.runner.processes.this_process import REPORTER, close_input, end_with_parent
from samewise.runner.processes.variables import HASH_SEED, thread_variables
from samewise.runner.records.sweep_folder import SweepFolder

# Why not multiprocessing's forkserver: a process has a single one, but jobs with other variables
# need another, since torch reads them as it is imported. Its children also import the launcher's
# main module, and are killed or waited for as the launcher ends, where a job has to save
_PRELOAD = (
    "torch",
    "torchvision",
    "samewise.runner.config.check.components",
    "samewise.runner.training.build",
    "samewise.runner.training.loop",
    "samewise.runner.strategies.single",
    "samewise.runner.training.launch",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)


class JobParent:
    """Handle of such a process.

    Args:
        variables: Environment variables to set before the process imports torch.
        log: File for the process's own errors.
    """

    def __init__(self, variables: Mapping[str, str], *, log: Path) -> None:
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "samewise.runner.launchers.parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={
                    **os.environ,
                    **HASH_SEED,
                    # Each job sets its own number of threads
                    **thread_variables(1),
                    **variables,
                },
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._buffer = b""
        self._live = set[int]()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, job: Job, environment: Mapping[str, str], cores: Sequence[int] | None) -> None:
        """Fork a job."""
        self._live.add(job.number)
        self._send(
            {
                "start": job.number,
                "sweep": str(job.sweep),
                "environment": dict(environment),
                "cores": cores,
                "cwd": str(Path.cwd()),
            }
        )

    def collect_ended(self) -> dict[int, int]:
        """Return the exit codes of jobs that ended since the last call; negative ones are signals.

        If the process itself has died, all its jobs have ended.
        """
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self._process.stdout.fileno(), 1 << 16)
        *lines, self._buffer = self._buffer.split(b"\n")
        exit_codes = {int(number): int(code) for number, code in map(json.loads, lines)}
        self._live -= set(exit_codes)
        # Ends that it reported before it died come first
        if not lines and not self.is_alive():
            exit_codes = dict.fromkeys(self._live, -signal.SIGKILL)
            self._live.clear()
        return exit_codes

    def signal(self, numbers: set[int], number: signal.Signals) -> None:
        """Send a signal to some jobs."""
        for job in numbers & self._live:
            self._send({"signal": job, "number": int(number)})

    def close(self) -> None:
        """Let the process end once its jobs have."""
        close_input(self._process)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def main() -> int:
    """Run as the parent, until standard input and all jobs have ended."""
    # The launcher signals each job
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    for name in _PRELOAD:
        importlib.import_module(name)
    # The garbage collector of a fork need not scan everything that was imported
    gc.freeze()
    # A job that ends wakes `select` below by this descriptor, if its signal has a handler
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    jobs, buffer, is_open = dict[int, int](), b"", True
    while is_open or jobs:
        ready, _, _ = select.select([waker, *([0] if is_open else [])], [], [])
        if waker in ready:
            os.read(waker, 4096)
        if 0 in ready:
            chunk = os.read(0, 1 << 16)
            is_open = bool(chunk)
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                _obey(json.loads(line), jobs)
        _reap(jobs)
    return 0


def _obey(message: Mapping[str, Any], jobs: dict[int, int]) -> None:
    """Start a job, or send a signal to one."""
    if "signal" in message:
        pid = next((pid for pid, job in jobs.items() if job == message["signal"]), None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, message["number"])
        return
    _preload(message["environment"])
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _become_job(message)
    jobs[pid] = message["start"]


def _preload(environment: Mapping[str, str]) -> None:
    """Import the parts of the job's reporter."""
    target = str(json.loads(environment.get(REPORTER, "{}")).get("_target_", ""))
    # The job itself reports any error
    with contextlib.suppress(Exception):
        importlib.import_module(target.rpartition(".")[0] or "samewise")


def _reap(jobs: dict[int, int]) -> None:
    """Report the jobs that have ended on standard output."""
    while jobs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in jobs:
            os.write(
                1, json.dumps([jobs.pop(pid), os.waitstatus_to_exitcode(status)]).encode() + b"\n"
            )


def _become_job(message: Mapping[str, Any]) -> NoReturn:
    """Become the job: set its variables, cores and files, then run `launchers.job`."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        # A fork inherits the parent's handlers, which do nothing or ignore the signal
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        end_with_parent(signal.SIGTERM)
        log = os.open(
            SweepFolder(Path(message["sweep"])).log(message["start"]),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            0o644,
        )
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, file in ((0, null), (1, log), (2, log)):
            os.dup2(file, descriptor)
        os.environ.update(message["environment"])
        if message["cores"]:
            os.sched_setaffinity(0, message["cores"])
        os.chdir(message["cwd"])
        from samewise.runner.launchers.job import main as train

        code = train(Path(message["sweep"]), message["start"])
    except BaseException as error:
        print(f"error:\n  {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The parent's exit handlers are not the job's
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
