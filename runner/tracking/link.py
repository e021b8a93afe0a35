"""The trainer's connection to its sender: a child process, or a fork of a sweep's shared process.

Imports neither torch nor mlflow. The trainer sends its settings as one line of JSON, then nothing
until it is about to end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from samewise.runner.tracking.address import describe_failure

_LOG = logging.getLogger("samewise.tracking")
SHARED = "SAMEWISE_SENDERS"
"""Environment variable that a sweep sets: the socket of a process that forks senders.

See `sender_parent`.
"""


LOG = "sender.log"
FAILING = "cannot send to"
TROUBLE = ", retrying:"
REACHED = "everything has reached"
_REPORT = re.compile(rf"(?:{FAILING} (.+?){TROUBLE} (.*)|{REACHED} (.+))$")
_TAIL = 1 << 16
_LAST_S = 10.0
"""Maximum seconds from a sender's last message to its end."""


def start(folder: Path, settings: Mapping[str, Any]) -> Link | None:
    """Start a sender, in milliseconds; its imports run during training.

    None, with a warning, if it cannot be started.
    """
    request = json.dumps(settings).encode() + b"\n"
    shared = os.environ.get(SHARED)
    if shared:
        # The shared process ends with the launcher, which this run may outlive
        with contextlib.suppress(OSError):
            return _ask_shared_process(shared, folder, request)
    try:
        return _start_child(folder, request)
    except OSError as error:
        _LOG.warning("the process that sends metrics cannot be started: %s", error)
        return None


def last_trouble(folder: Path, *, since: int = 0) -> str:
    """Return why a run's sender could not send, to be appended to a sentence; empty if unknown.

    Reads the end of the sender's log, after byte `since`.
    """
    _, separator, reason = _end_of_log(folder, since).rpartition(TROUBLE)
    return f": {describe_failure(reason.partition(chr(10))[0])}" if separator else ""


def troubles(folder: Path, *, since: int = 0) -> dict[str, str]:
    """Return why a run's sender could not send to each backend, by the backend's title.

    Reads the end of the sender's log, after byte `since`. A reason is empty if everything has
    arrived since.
    """
    reasons = dict[str, str]()
    for report in filter(None, map(_REPORT.search, _end_of_log(folder, since).splitlines())):
        failing, reason, reached = report.groups("")
        reasons[failing or reached] = describe_failure(reason)
    return reasons


def _end_of_log(folder: Path, since: int) -> str:
    try:
        with open(folder / LOG, "rb") as log:
            log.seek(max(since, os.fstat(log.fileno()).st_size - _TAIL))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def log_size(folder: Path) -> int:
    """Return the size of the sender's log in bytes."""
    try:
        return (folder / LOG).stat().st_size
    except OSError:
        return 0


def _start_child(folder: Path, request: bytes) -> Link:
    command = [
        sys.executable,
        # No module of the current folder is imported
        "-P",
        "-m",
        "samewise.runner.tracking.sender",
        str(folder.absolute()),
        "--trainer",
        str(os.getpid()),
    ]
    own_end, child_end = socket.socketpair()
    # A session of its own, so that Ctrl-C in the terminal does not reach it
    with child_end, open(folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=child_end.fileno(),
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    own_end.sendall(request)
    return Link(own_end, process)


def _ask_shared_process(address: str, folder: Path, request: bytes) -> Link:
    connection = socket.socket(socket.AF_UNIX)
    run = {"folder": str(folder.absolute()), "trainer": os.getpid()}
    try:
        connection.settimeout(5)
        connection.connect(address)
        connection.sendall(json.dumps(run).encode() + b"\n" + request)
    except OSError:
        connection.close()
        raise
    return Link(connection)


@final
class Link:
    """A running sender at the other end of a socket.

    The sender writes its exit code as a line; an end of file without one means that it was killed.
    """

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self._process = end, process
        self._exit_code: bytes | None = None

    def has_ended(self) -> bool:
        """Whether the sender has ended."""
        return self._listen(0) is not None

    def tell_end(self) -> bool:
        """Tell the sender that the trainer is about to end; return whether it still listens."""
        try:
            # By a line, and not by end of file, since forked loader workers hold the socket open
            self._socket.sendall(b"end\n")
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the sender to end; return whether it has sent everything in this time."""
        return self._listen(seconds) == b"0"

    def _listen(self, seconds: float) -> bytes | None:
        """Return the sender's exit code; empty if it ended without one, None if it is running."""
        if self._exit_code is None:
            self._socket.settimeout(seconds)
            try:
                self._exit_code = self._socket.recv(16).strip()
            except (TimeoutError, BlockingIOError):
                return None
            except OSError:
                self._exit_code = b""
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAST_S)
        return self._exit_code


def environment() -> dict[str, str]:
    """Return a sender's environment variables: the same samewise, and one thread."""
    import samewise

    home = os.path.dirname(os.path.dirname(os.path.abspath(samewise.__file__)))
    python_path = os.environ.get("PYTHONPATH", "")
    path = (
        python_path
        # An installed samewise is found without PYTHONPATH
        if "site-packages" in home or home in python_path.split(os.pathsep)
        else os.pathsep.join(filter(None, [python_path, home]))
    )
    return {**os.environ, **({"PYTHONPATH": path} if path else {}), "OMP_NUM_THREADS": "1"}


def wait_for(link: Link, seconds: float) -> bool:
    """Call `Link.wait`; Ctrl-C stops the waiting."""
    start_time = time.monotonic()
    try:
        return link.wait(seconds)
    except KeyboardInterrupt:
        _LOG.warning("stopped waiting for MLflow after %.0f s", time.monotonic() - start_time)
        return False
