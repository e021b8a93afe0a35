"""Metrics over the steps of a sweep's runs, and the runs' cost, from their journals.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.tracking import journal

_MOST = 400
"""Points of a curve; a longer one is reduced to every n-th point and its last."""


def curve(one: PointResult, metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, by step; empty if the run never logged it."""
    path = one.point.run.metrics
    if not path.is_file():
        return []
    found = {
        entry.step: entry.metrics[metric]
        for entry, _ in journal.read_entries(path)
        if metric in entry.metrics
    }
    line = sorted(found.items())
    stride = -(-len(line) // _MOST) or 1
    return [*line[:-1:stride], line[-1]] if line else []


@dataclass(frozen=True)
class Cost:
    """The time and work that a sweep has taken.

    Args:
        training_s: Seconds of training, summed over its runs that did not fail; of an unfinished
            run, the time that its jobs took.
        span_s: From the first job's beginning to the last one's end.
        steps: Optimizer steps of all runs.
        tries: Jobs started.
        lost_s: Seconds of jobs whose run failed.
    """

    training_s: float
    span_s: float
    steps: int
    tries: int
    lost_s: float


def cost(folder: SweepFolder, found: Sequence[PointResult]) -> Cost:
    """The cost of all points so far."""
    words = [(one, folder.word(one.point.number)) for one in found]
    began = [float(word.get("first_began", word["began"])) for _, word in words if "began" in word]
    ended = [float(word["ended"]) for _, word in words if "ended" in word]
    lost = sum(one.seconds for one in found if one.state is State.failed)
    once = {one.point.folder: one for one in found}.values()
    span = max(0.0, max(ended) - min(began)) if began and ended else 0.0
    trained = sum(one.seconds for one in once if one.state is not State.failed)
    return Cost(
        trained, span, sum(one.steps for one in once), sum(one.tries for one in found), lost
    )
