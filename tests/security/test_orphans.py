"""Processes that a command has started end with it, even if it is killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from samewise_forked import Forked
from samewise_tiny import DIGITS

from samewise.runner.commands.ui import _command, _listening

TINY = [*DIGITS, "model.width=4", "max_epochs=100000"]


def descendants(process: int) -> set[int]:
    """The processes that a process has started, and those that they have started."""
    found = set[int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = status.read_text().partition(" (")
            if int(rest.rpartition(") ")[2].split()[1]) == process:
                found |= {int(number), *descendants(int(number))}
    return found


def alive(processes: set[int]) -> set[int]:
    """Those that exist and are not zombies."""
    return {number for number in processes if (path := Path(f"/proc/{number}/stat")).exists() and path.read_text().rpartition(") ")[2][0] != "Z"}


@pytest.mark.parametrize(
    ("overrides", "children", "trained"),
    [
        pytest.param(["loader.num_workers=2"], 2, True, marks=pytest.mark.slow),
        pytest.param(  # killed while its ranks still import torch
            ["strategy=elastic", "strategy.nproc=2", "replicas=2", "strategy.join_timeout_s=100000"], 2, False, marks=pytest.mark.slow
        ),
        pytest.param(["strategy=elastic", "strategy.nproc=2", "replicas=2", "loader.num_workers=1"], 4, True, marks=pytest.mark.slow),
    ],
)
def test_processes_end_when_the_one_that_started_them_is_killed(overrides: list[str], children: int, trained: bool, tmp_path: Path) -> None:
    command = ["train", *TINY, *overrides, f"run_root={tmp_path}"]
    kill_and_require_end(
        command, tmp_path, lambda started: len(started) >= children and (not trained or bool(list(tmp_path.glob("*/*/trace.jsonl")))), signal.SIGKILL
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "number"),
    [
        pytest.param(False, signal.SIGKILL, id="killed as it starts"),
        pytest.param(True, signal.SIGTERM, id="stopped once it serves"),
        pytest.param(False, signal.SIGTERM, id="stopped as it starts", marks=pytest.mark.long),
        pytest.param(True, signal.SIGKILL, id="killed once it serves", marks=pytest.mark.long),
    ],
)
def test_the_mlflow_server_ends_with_the_ui_command(number: signal.Signals, served: bool, tmp_path: Path) -> None:
    """The server has no password, and nobody would know that it is still running."""
    made = f"import mlflow; mlflow.MlflowClient('sqlite:///{tmp_path}/mlflow.db').create_experiment('one', artifact_location='{tmp_path}/mlartifacts')"
    subprocess.run([sys.executable, "-c", made], check=True, capture_output=True, cwd=tmp_path)
    kill_and_require_end(["ui", "--run-root", str(tmp_path)], tmp_path, lambda started: len(started) >= (3 if served else 2), number)


def kill_and_require_end(arguments: list[str], folder: Path, is_ready: Callable[[set[int]], bool], number: signal.Signals) -> None:
    """Start a command, kill it once `is_ready` holds for its processes, and wait until all of them have ended."""
    main = Forked(*arguments, said=folder / "said")
    started = set[int]()
    try:
        until = time.monotonic() + 200
        while not is_ready(started := descendants(main.pid)):
            assert main.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        if number == signal.SIGKILL:
            main.send(signal.SIGSTOP)  # so that it starts no more
            started = descendants(main.pid)
        main.send(number)
        main.wait(200)
        until = time.monotonic() + 200
        while left := alive(started):
            assert time.monotonic() < until, [Path(f"/proc/{number}/cmdline").read_text() for number in left]
            time.sleep(0.05)
    finally:
        for number in {main.pid, *alive(started)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_nobody_can_take_the_port_of_the_ui_while_its_server_starts(option: int) -> None:
    """The server inherits the socket: a stranger's, bound in the meantime, would be announced and opened as the user's own MLflow."""
    with _listening(None) as listening, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, option, 1)
        for address in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"):
                other.bind((address, listening.getsockname()[1]))


def test_the_ui_server_is_started_on_the_socket_that_it_inherits() -> None:
    """uvicorn's --fd goes before host and port; `tests/runner/test_tracking_commands.py` sends requests to the server that this starts."""
    assert "--fd 0 " in _command("sqlite:///x.db", 5000)[_command("sqlite:///x.db", 5000).index("--uvicorn-opts") + 1]
