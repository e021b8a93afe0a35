"""The interface of trackers: MLflow, TensorBoard, Weights & Biases.

Each copies the run folder's journal separately. Imports none of them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from samewise.runner.errors import Problem, nearest

TITLES = {"mlflow": "MLflow", "tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
"""What `tracking.report_to` may name; each is also the package that it needs."""


@dataclass
class Sent:
    """What a backend has been sent.

    `status`: the change of the run's status, in words. `moved`: when it last received anything
    (`time.monotonic`).
    """

    metrics: int = 0
    refused: int = 0
    files: int = 0
    status: str = ""
    moved: float = -math.inf


class RunGone(Exception):
    """The copy was deleted; the next pass creates a new one and sends everything."""


class Backend(Protocol):
    """A copy of one run, used only by the process that holds `RunFolder.sending`."""

    sent: Sent

    def synchronise(self, *, alive: bool) -> Sent:
        """Send everything that has not been sent.

        RunGone if the copy was deleted. After an error of the backend a later call continues where
        this one stopped.

        Args:
            alive: Whether the trainer is at work; if not, the copy is ended as the journal says.
        """
        ...


def backends_of(settings: Mapping[str, Any]) -> list[str]:
    """The backends in a run's `tracking`: none if it is off, MLflow if an older config does not
    say.
    """
    named = settings.get("report_to")
    return [] if not settings["enabled"] else ["mlflow"] if named is None else list(named)


def problems(names: Sequence[str], *, path: str = "tracking.report_to") -> list[Problem]:
    """What is wrong with a choice of backends: unknown names, and packages that are not installed."""
    found = [
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
    found += [
        Problem(
            path,
            f"{TITLES[name]} needs the package {name}, which is not installed",
            name,
            hint=f"pip install 'samewise[{name}]'",
        )
        for name in names
        if name in TITLES and importlib.util.find_spec(name) is None
    ]
    return found
