"""The result of each point of a sweep, from its run's folder and its job's record.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samewise.runner.config.project import Project
from samewise.runner.errors import INTERRUPTED, ConfigError, strip_heading
from samewise.runner.launchers.base import Launcher, JobState, Standing
from samewise.runner.records import shapes, trust
from samewise.runner.records.files import open_to_read, read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.tracking import journal
from samewise.runner.tracking.best import best_so_far


class State(enum.StrEnum):
    """The state of a point."""

    waiting = enum.auto()
    running = enum.auto()
    finished = enum.auto()
    pruned = enum.auto()
    failed = enum.auto()
    interrupted = enum.auto()


ENDED = (State.finished, State.pruned, State.failed)
"""States in which nothing more happens on its own. Interrupted points resume when the sweep does.
"""


@dataclass(frozen=True)
class PointResult:
    """A point and its result.

    Args:
        point: Which.
        state: Where it stands.
        reason: The reason, if it is not obvious: the error's first line, "killed by SIGKILL".
        best: Metrics at the step that was best by `evaluate.monitor`, so far if it has not
            finished.
        final: Metrics of the last evaluation.
        steps: Optimizer steps taken.
        seconds: Spent training; of an unfinished run, the time that its jobs took.
        weights_sha256: Of the final weights.
        mlflow_run_id: The MLflow run's.
        tries: How often the job was started.
        objectives: `sweeper.objectives`: metrics, each with min or max; empty if `evaluate.monitor`
            is the objective.
    """

    point: Point
    state: State
    reason: str = ""
    best: Mapping[str, float] = field(default_factory=dict[str, float])
    final: Mapping[str, float] = field(default_factory=dict[str, float])
    steps: int = 0
    seconds: float = 0.0
    weights_sha256: str = ""
    mlflow_run_id: str | None = None
    tries: int = 0
    objectives: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def objective(self) -> str:
        """The metric by which points are ranked: the first of `objectives`, or `evaluate.monitor`."""
        return next(iter(self.objectives), self.point.monitor)

    @property
    def mode(self) -> str:
        """Whether the least or the most of `objective` is best: min or max."""
        return self.objectives.get(self.objective, self.point.mode)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics by the names that objectives have: at the best step, and with the prefix
        `final/` at the last.
        """
        return {**self.best, **{f"final/{name}": value for name, value in self.final.items()}}

    @property
    def value(self) -> float:
        """The value of `objective`; NaN if there is none."""
        return float(self.metrics.get(self.objective, math.nan))


def point_result(folder: SweepFolder, point: Point, seen: JobState | None = None) -> PointResult:
    """The result of a point, with its launcher's information if that was asked."""
    word = folder.word(point.number)
    tries = int(word.get("tries", 0))
    tracked = read_mapping(point.run.tracking, shapes.TRACKING).get("run_id")
    summary = read_mapping(point.run.summary, shapes.SUMMARY)
    state, reason = _state(word, seen)
    if word.get("refused"):  # the finished run was trained on other data, or another device
        return PointResult(point, state, reason, tries=tries, objectives=folder.objectives)
    if summary.get("status") == "finished":
        metrics: Mapping[str, Any] = summary["metrics"]
        best = {
            name: value
            for name, value in (metrics["best"] or metrics["final"]).items()
            if name != "step"
        }
        return PointResult(
            point,
            State.finished,
            str(summary.get("stopped_early") or ""),
            best,
            metrics["final"],
            summary["steps"],
            summary["timings"]["training_s"],
            summary["weights_sha256"],
            summary.get("mlflow_run_id") or tracked,
            tries,
            folder.objectives,
        )
    steps, last = latest(point.run, point.monitor)
    best = best_evaluations(point.run, {point.monitor: point.mode}).get(point.monitor, {})
    return PointResult(
        point,
        state,
        reason,
        best,
        last,
        steps,
        folder.spent_s(point),
        mlflow_run_id=tracked,
        tries=tries,
        objectives=folder.objectives,
    )


def point_results(folder: SweepFolder, seen: Mapping[int, JobState] | None = None) -> list[PointResult]:
    """The results of all points, in order."""
    known = seen or {}
    found = [point_result(folder, point, known.get(point.number)) for point in folder.points()]
    firsts = {one.point.folder: one for one in reversed(found)}
    return [repeat_failure(one, firsts[one.point.folder]) for one in found]


def repeat_failure(one: PointResult, first: PointResult | None) -> PointResult:
    """The result of a point.

    Failed if it has none of its own yet, and the first point that is the same run has failed: it is
    not run again.
    """
    if one.state is not State.waiting or first is None or first.state is not State.failed:
        return one
    return dataclasses.replace(
        one,
        state=State.failed,
        reason=f"the same run as point {first.point.number + 1}, which failed: {first.reason}",
    )


def current_results(
    folder: SweepFolder, project: Project, *, trusted: bool = True
) -> list[PointResult]:
    """The results of all points, in order, with the launcher's information about jobs.

    A launcher named by someone else is not asked.
    """
    if folder.facts["launcher"]["_target_"] != LOCAL:
        if not trusted:
            print(
                f"warning: {folder.path} {trust.NOT_YOURS}. Its launcher is not asked for "
                "the state of its jobs; --trust allows it",
                file=sys.stderr,
            )
            return point_results(folder)
        launcher = open_launcher(folder, project)
        if launcher.detached:
            seen = launcher.look([point.number for point in folder.points()])
            found = point_results(folder, seen)
            return found if folder.holder() is not None else _name_unsubmitted(found, seen)
    found = point_results(folder)
    if folder.holder() is not None:
        return found
    # Its jobs ended with it
    return [
        dataclasses.replace(one, state=State.interrupted) if one.state is State.running else one
        for one in found
    ]


UNSUBMITTED = "not submitted"
"""Why a point waits that the cluster does not know, as it refused its job."""


def _name_unsubmitted(found: Sequence[PointResult], seen: Mapping[int, JobState]) -> list[PointResult]:
    """The results, with the reason for points that wait, but for no job.

    Those that are the same run as an earlier one have none of their own.
    """
    firsts = {one.point.folder: one.point.number for one in reversed(found)}
    left = {number for number in firsts.values() if number not in seen}
    return [
        dataclasses.replace(one, reason=UNSUBMITTED)
        if one.state is State.waiting and one.point.number in left
        else one
        for one in found
    ]


LOCAL = "samewise.runner.launchers.local.Local"


def open_launcher(folder: SweepFolder, project: Project) -> Launcher:
    """The launcher of a trusted sweep.

    Only a detached one knows jobs that another process has submitted.

    Args:
        folder: The sweep's.
        project: The user's, whose packages may contain the launcher: packages that the folder names
            are not trusted.
    """
    from samewise.runner.config.instantiate import instantiate

    launcher: Launcher = instantiate(folder.facts["launcher"], "launcher", allowed=project.packages)
    if launcher.detached:
        launcher.open(folder)
    return launcher


def _state(word: Mapping[str, Any], seen: JobState | None) -> tuple[State, str]:
    reason = str(word.get("reason") or (seen.reason if seen else ""))
    said = str(word.get("said") or "")
    if word.get("pruned"):
        return State.pruned, str(word["pruned"])
    if seen is not None and seen.standing is not Standing.ended:
        return State(seen.standing.value), seen.reason
    if "ended" in word:
        code = word.get("exit_code")
        how = seen.reason if seen is not None and code == INTERRUPTED else ""
        why = "; ".join(
            filter(None, [how, strip_heading(said).partition("\n")[0].partition("; hint: ")[0]])
        )
        return (
            State.interrupted if code == INTERRUPTED else State.failed
        ), why or reason or f"exit code {code}"
    if seen is not None and seen.failed:
        return State.failed, reason
    if "began" in word:
        return (
            (State.running, "")
            if seen is None and not reason
            else (State.interrupted, reason or "it ended without a message")
        )
    return (State.interrupted, reason) if seen is not None and reason else (State.waiting, "")


_NOT_EVALUATED = ("train/", "system/")


def latest(run: RunFolder, monitor: str, *, window: int = 1 << 16) -> tuple[int, dict[str, float]]:
    """The last logged step of a run and its last evaluation, from the last `window` bytes of its
    journal.
    """
    try:
        handle = open_to_read(run.metrics)
        if handle is None:
            return 0, {}
        with handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - window))
            lines = handle.read().splitlines()
    except (ConfigError, OSError):
        return 0, {}
    step, evaluated = 0, dict[str, float]()
    for line in reversed(lines):
        entry = journal.parse_line(line)
        if entry is None or entry.status is not None:
            continue
        step = max(step, entry.step)
        if not evaluated and monitor in entry.metrics:
            evaluated = {
                name: value
                for name, value in entry.metrics.items()
                if not name.startswith(_NOT_EVALUATED)
            }
        if step and evaluated:
            break
    return step, evaluated


def best_evaluations(run: RunFolder, modes: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """A run's best evaluation so far by each of these metrics, if it has one and its journal can be
    read.
    """
    with contextlib.suppress(ConfigError):
        found = best_so_far(run.metrics, modes)
        return {
            by: {
                name: one[name]
                for name in one
                if name == by or not (name == "step" or name.startswith(_NOT_EVALUATED))
            }
            for by, one in found.items()
        }
    return {}
