"""The trainer's connection to its sender: a child process, or one forked by a process that a sweep
shares. Imports neither torch nor mlflow.

The trainer sends its settings as one line of JSON, then nothing until it is about to end.
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
"""Set by a sweep: the socket of a process that forks senders; see `sender_parent`."""


LOG = "sender.log"
FAILING = "cannot send to"
TROUBLE = ", retrying:"
REACHED = "everything has reached"
_TOLD = re.compile(rf"(?:{FAILING} (.+?){TROUBLE} (.*)|{REACHED} (.+))$")
_TAIL = 1 << 16
_LAST_S = 10.0
"""The longest time from a sender's last message to its end."""


def start(folder: Path, settings: Mapping[str, Any]) -> Link | None:
    """Start a sender, which takes milliseconds.

    It starts up during training. None, with a warning, if it cannot be started.
    """
    told = json.dumps(settings).encode() + b"\n"
    shared = os.environ.get(SHARED)
    if shared:
        with contextlib.suppress(OSError):
            # It ended with the launcher
            return _ask_for_one(shared, folder, told)
    try:
        return _start_one(folder, told)
    except OSError as error:
        _LOG.warning("the process that sends metrics cannot be started: %s", error)
        return None


def last_trouble(folder: Path, *, since: int = 0) -> str:
    """Why a run's sender could not send, from the end of its log (after byte `since`), to be
    appended to a sentence; empty if unknown.
    """
    _, found, told = _end_of_log(folder, since).rpartition(TROUBLE)
    return f": {describe_failure(told.split(chr(10))[0])}" if found else ""


def troubles(folder: Path, *, since: int = 0) -> dict[str, str]:
    """Why a run's sender could not send, from the end of its log (after byte `since`), by the
    backend's title; empty where everything has arrived since.
    """
    found = dict[str, str]()
    for told in filter(None, map(_TOLD.search, _end_of_log(folder, since).splitlines())):
        failing, why, reached = told.groups("")
        found[failing or reached] = describe_failure(why)
    return found


def _end_of_log(folder: Path, since: int) -> str:
    try:
        with open(folder / LOG, "rb") as log:
            log.seek(max(since, os.fstat(log.fileno()).st_size - _TAIL))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def log_size(folder: Path) -> int:
    """The size of the sender's log in bytes."""
    try:
        return (folder / LOG).stat().st_size
    except OSError:
        return 0


def _start_one(folder: Path, told: bytes) -> Link:
    """Start a child process.

    It has its own session, so that Ctrl-C in the terminal does not reach it.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "samewise.runner.tracking.sender",
        str(folder.absolute()),
        "--trainer",
        str(os.getpid()),
    ]
    mine, its = socket.socketpair()
    with its, open(folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=its.fileno(),
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    mine.sendall(told)
    return Link(mine, process)


def _ask_for_one(address: str, folder: Path, told: bytes) -> Link:
    """Ask the shared process for a sender."""
    asking = socket.socket(socket.AF_UNIX)
    try:
        asking.settimeout(5)
        asking.connect(address)
        asking.sendall(
            json.dumps({"folder": str(folder.absolute()), "trainer": os.getpid()}).encode()
            + b"\n"
            + told
        )
    except OSError:
        asking.close()
        raise
    return Link(asking)


@final
class Link:
    """A running sender at the other end of a socket.

    It sends its exit code as a line; end of file without one means that it was killed.
    """

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self._process = end, process
        self._heard: bytes | None = None

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._listen(0) is not None

    def tell_end(self) -> bool:
        """Tell it that the trainer is about to end. False if it no longer listens."""
        try:
            # Not by end of file, since forked loader workers hold the socket open
            self._socket.sendall(b"end\n")
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for it to end. False if not everything was sent, or it takes longer."""
        return self._listen(seconds) == b"0"

    def _listen(self, seconds: float) -> bytes | None:
        """Its exit code; empty if it has ended without one, None if it has not ended."""
        if self._heard is None:
            self._socket.settimeout(seconds)
            try:
                self._heard = self._socket.recv(16).strip()
            except (TimeoutError, BlockingIOError):
                return None
            except OSError:
                self._heard = b""
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAST_S)
        return self._heard


def environment() -> dict[str, str]:
    """A sender's environment variables: the same samewise, and one thread."""
    import samewise

    home = os.path.dirname(os.path.dirname(os.path.abspath(samewise.__file__)))
    given = os.environ.get("PYTHONPATH", "")
    path = (
        given
        if "site-packages" in home or home in given.split(os.pathsep)
        else os.pathsep.join(filter(None, [given, home]))
    )
    return {**os.environ, **({"PYTHONPATH": path} if path else {}), "OMP_NUM_THREADS": "1"}


def wait_for(link: Link, seconds: float) -> bool:
    """`Link.wait`, stopped by Ctrl-C."""
    began = time.monotonic()
    try:
        return link.wait(seconds)
    except KeyboardInterrupt:
        _LOG.warning("stopped waiting for MLflow after %.0f s", time.monotonic() - began)
        return False
