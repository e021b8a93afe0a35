"""A process that has imported what every job needs and forks one process per job, which saves the
seconds of importing.

    python -m samewise.runner.launchers.parent

Safe because it does nothing else: it has one thread, has computed nothing, has not touched CUDA,
and its variables are those that the jobs' configs ask for. On its standard input: a line of JSON
for each job; on its standard output: one for each that has ended. It ends when its standard input
does.

multiprocessing's forkserver would not do: there is one for each process, where jobs with other
variables need another, since torch reads them as it is imported; its children import the launcher's
main module, and are killed, or waited for, as the launcher ends, where a job has to be told to
save.
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
from types import FrameType
from typing import Any, NoReturn

from samewise.runner.launchers.base import Job
from samewise.runner.processes.this_process import REPORTER, close_input, end_with_parent
from samewise.runner.processes.variables import HASH_SEED, thread_variables
from samewise.runner.records.sweep_folder import SweepFolder

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
    """The launcher's handle of such a process.

    `variables` are set before it imports torch; it logs its own errors to `log`.
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
                    **thread_variables(1),
                    **variables,
                },  # each job sets its own number
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""
        self._live = set[int]()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, job: Job, environment: Mapping[str, str], cores: Sequence[int] | None) -> None:
        """Fork a job."""
        self._live.add(job.number)
        self._say(
            {
                "start": job.number,
                "sweep": str(job.sweep),
                "environment": dict(environment),
                "cores": cores,
                "cwd": str(Path.cwd()),
            }
        )

    def collect_ended(self) -> dict[int, int]:
        """The exit codes of jobs that have ended since the last call (negative: signals).

        Of all jobs if the process itself has died.
        """
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._heard += os.read(self._process.stdout.fileno(), 1 << 16)
        *lines, self._heard = self._heard.split(b"\n")
        found = {int(number): int(code) for number, code in map(json.loads, lines)}
        self._live -= set(found)
        if not lines and not self.is_alive():
            found = dict.fromkeys(self._live, -signal.SIGKILL)
            self._live.clear()
        return found

    def signal(self, numbers: set[int], number: signal.Signals) -> None:
        """Send a signal to some jobs."""
        for job in numbers & self._live:
            self._say({"signal": job, "number": int(number)})

    def close(self) -> None:
        """Let it end once its jobs have."""
        close_input(self._process)

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def main() -> int:
    """Run as the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher signals each job
    end_with_parent(signal.SIGKILL)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # so that its forks need not scan everything that was imported
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _wake)
    jobs, heard, is_open = dict[int, int](), b"", True
    while is_open or jobs:
        ready, _, _ = select.select([waker, *([0] if is_open else [])], [], [])
        if waker in ready:
            os.read(waker, 4096)
        if 0 in ready:
            read = os.read(0, 1 << 16)
            is_open = bool(read)
            *lines, heard = (heard + read).split(b"\n")
            for line in lines:
                _obey(json.loads(line), jobs)
        _reap(jobs)
    return 0


def _obey(message: Mapping[str, Any], jobs: dict[int, int]) -> None:
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


def _wake(number: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD: the wakeup descriptor makes `select` return."""


def _preload(environment: Mapping[str, str]) -> None:
    """Import the parts of the job's reporter; the job itself reports any error in them."""
    target = str(json.loads(environment.get(REPORTER, "{}")).get("_target_", ""))
    with contextlib.suppress(Exception):
        importlib.import_module(target.rpartition(".")[0] or "samewise")


def _reap(jobs: dict[int, int]) -> None:
    while jobs:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
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
        for end, file in ((0, null), (1, log), (2, log)):
            os.dup2(file, end)
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
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
