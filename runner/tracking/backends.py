"""The interface of the backends: MLflow, TensorBoard, Weights & Biases, a CSV file.

Each copies the run folder's journal separately. Imports none of them.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from samewise.runner.errors import Problem, nearest
from samewise.runner.tracking.address import describe_failure

LOG = "sender.log"
FAILING = "cannot send to"
TROUBLE = ", retrying:"
REACHED = "everything has reached"
_REPORT = re.compile(rf"(?:{FAILING} (.+?){TROUBLE} (.*)|{REACHED} (.+))$")
_TAIL = 1 << 16


TITLES = {
    "mlflow": "MLflow",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "csv": "metrics.csv",
}
"""Titles of the backends, by the names in `tracking.report_to`, which are also their packages."""


@dataclass
class Sent:
    """Counts of what a backend has received.

    Args:
        metrics: Values.
        refused: Entries that the backend refused.
        files: Files.
        status: The change of the run's status, as text.
        moved: Time of the last change (`time.monotonic`, in seconds).
    """

    metrics: int = 0
    refused: int = 0
    files: int = 0
    status: str = ""
    moved: float = -math.inf


class RunGone(Exception):
    """Raised if the copy was deleted; the next pass creates a new one and sends everything."""


class Backend(Protocol):
    """A copy of one run, used only by the process that holds `RunFolder.sending`."""

    sent: Sent

    def synchronise(self, *, alive: bool) -> Sent:
        """Send everything that has not been sent.

        After an error of the backend, a later call continues where this one stopped.

        Args:
            alive: Whether the trainer is running; if not, the copy is ended as the journal says.

        Raises:
            RunGone: The copy was deleted.
        """
        ...


def backends_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the backends in a run's `tracking`; none if it is off."""
    # Configs of older versions do not have the key, and mean MLflow
    names = settings.get("report_to")
    return [] if not settings["enabled"] else ["mlflow"] if names is None else list(names)


def problems(names: Sequence[str], *, path: str = "tracking.report_to") -> list[Problem]:
    """Return a problem for each backend that is unknown, or whose package is not installed."""
    unknown = [
        Problem(
            path,
            "is not a tracking backend",
            name,
            f"any of: {', '.join(TITLES)}",
            nearest(name, TITLES),
        )
        for name in names
        if name not in TITLES
    ]
    return unknown + [
        Problem(
            path,
            f"{TITLES[name]} needs the package {name}, which is not installed",
            name,
            hint=f"pip install '.[{name}]' in samewise's folder",
        )
        for name in names
        if name in TITLES and importlib.util.find_spec(name) is None
    ]


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
