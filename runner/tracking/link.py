"""The trainer's connection to its sender, a child process.

Imports neither torch nor mlflow. The trainer sends its settings as one line of JSON, then nothing
until it is about to end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.tracking.address import describe_failure

_LOG = logging.getLogger("samewise.tracking")
LOG = "sender.log"
FAILING = "cannot send to"
TROUBLE = ", retrying:"
REACHED = "everything has reached"
_REPORT = re.compile(rf"(?:{FAILING} (.+?){TROUBLE} (.*)|{REACHED} (.+))$")
_TAIL = 1 << 16


def start(folder: Path, settings: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Start a sender, in milliseconds; its imports run during training.

    None, with a warning, if it cannot be started.
    """
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
    try:
        with open(folder / LOG, "ab") as log:
            sender = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                # A session of its own, so that Ctrl-C in the terminal does not reach it
                start_new_session=True,
            )
    except OSError as error:
        _LOG.warning("the process that sends metrics cannot be started: %s", error)
        return None
    _write(sender, json.dumps(settings))
    return sender


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


def _environment() -> dict[str, str]:
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


def wait_for_end(sender: subprocess.Popen[bytes], seconds: float) -> bool:
    """Tell a sender that the trainer ends, and wait; Ctrl-C stops the waiting.

    Returns:
        Whether it has sent everything in this time.
    """
    start_time = time.monotonic()
    # By a line, and not by end of file, since forked loader workers hold the pipe open
    _write(sender, "end")
    try:
        return sender.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    except KeyboardInterrupt:
        _LOG.warning("stopped waiting for MLflow after %.0f s", time.monotonic() - start_time)
        return False


def _write(sender: subprocess.Popen[bytes], line: str) -> None:
    assert sender.stdin is not None
    # It may have been killed
    with contextlib.suppress(OSError):
        sender.stdin.write(line.encode() + b"\n")
