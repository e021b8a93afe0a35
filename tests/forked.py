"""A command of samewise in a process of its own, which may be killed: a fork of one that has imported torch, eight seconds quicker than a fresh interpreter.

Tests import this as `samewise_forked`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])
COMMAND = """
import multiprocessing, os, sys
multiprocessing.set_start_method(None, force=True)  # loader workers are forked, as those of a command are
os.environ.clear()
os.environ.update({variables!r})
os.chdir({folder!r})
for number, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(f"{said}.{{name}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
{before}
from samewise.runner.cli import main
sys.exit(main({arguments!r}))
"""
STARTED: list[Forked] = []
"""Killed when the test that started them is over."""


def start(code: str, given: dict[str, Any]) -> multiprocessing.context.ForkServerProcess:
    """Start a fork that executes code with these names. The server, which the first of them starts, finds preloaded.py by its PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    process = FORKS.Process(target=exec, args=(code, given))
    process.start()
    return process


class Forked:
    """One command, started.

    Args:
        arguments: What a user would type after `samewise`.
        said: The beginning of the names of two files, which get its stdout and stderr.
        variables: Beside those of this process's environment.
        before: Code that it runs first.
        folder: Its current folder; None: this process's.
    """

    def __init__(self, *arguments: str, said: Path, variables: Mapping[str, str] | None = None, before: str = "", folder: Path | None = None) -> None:
        self._said, self.arguments = said, arguments
        said.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **(variables or {})}
        code = COMMAND.format(variables=environment, folder=str(folder or os.getcwd()), said=said, arguments=list(arguments), before=before)
        self._process = start(code, {})
        STARTED.append(self)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None where it still runs then."""
        self._process.join(seconds)
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, where it still runs."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    @property
    def output(self) -> str:
        return self._read("stdout")

    @property
    def errors(self) -> str:
        return self._read("stderr")

    @property
    def done(self) -> subprocess.CompletedProcess[str]:
        """What came of it, once it has ended."""
        code = self.wait(0)
        assert code is not None
        return subprocess.CompletedProcess(self.arguments, code, self.output, self.errors)

    def _read(self, name: str) -> str:
        path = Path(f"{self._said}.{name}")
        return path.read_text() if path.exists() else ""


def run(*arguments: object, folder: Path, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    """Run a command in this folder to its end."""
    with tempfile.TemporaryDirectory() as place:
        process = Forked(*map(str, arguments), said=Path(place, "said"), folder=folder)
        assert process.wait(seconds) is not None, process.errors
        return process.done
