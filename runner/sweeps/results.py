"""Read the result of each point of a sweep from its run's folder and its job's record.

Imports neither torch nor mlflow.
"""

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
from samewise.runner.launchers.base import JobState, Launcher, Standing
from samewise.runner.records import shapes, trust
from samewise.runner.records.files import open_to_read, read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.tracking import journal
from samewise.runner.tracking.best import best_so_far


class State(enum.StrEnum):
    """State of a point."""

    waiting = enum.auto()
    running = enum.auto()
    finished = enum.auto()
    pruned = enum.auto()
    failed = enum.auto()
    interrupted = enum.auto()


ENDED = (State.finished, State.pruned, State.failed)
"""States in which nothing more happens. Interrupted points resume when the sweep does."""


@dataclass(frozen=True)
class PointResult:
    """A point and its result.

    Args:
        point: The point.
        state: Whether it waits, runs, or how it has ended.
        reason: The reason, if it is not obvious: the error's first line, "killed by SIGKILL".
        best: Metrics at the step that was best by `evaluate.monitor`, so far if the run has not
            finished.
        final: Metrics of the last evaluation.
        steps: Optimizer steps taken.
        seconds: Seconds of training; for an unfinished run, of its jobs.
        weights_sha256: Digest of the final weights.
        mlflow_run_id: Id of the run in MLflow.
        tries: Number of starts of the job.
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
        """Metric by which points are ranked: the first of `objectives`, or `evaluate.monitor`."""
        return next(iter(self.objectives), self.point.monitor)

    @property
    def mode(self) -> str:
        """Whether the least or the most of `objective` is best: min or max."""
        return self.objectives.get(self.objective, self.point.mode)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics at the best step, and those at the last with the prefix `final/`."""
        return {**self.best, **{f"final/{name}": value for name, value in self.final.items()}}

    @property
    def value(self) -> float:
        """Value of `objective`; NaN if there is none."""
        return float(self.metrics.get(self.objective, math.nan))


def point_result(
    folder: SweepFolder, point: Point, job_state: JobState | None = None
) -> PointResult:
    """Return the result of a point.

    Args:
        folder: The sweep's folder.
        point: The point.
        job_state: State of its job, if its launcher was asked.
    """
    record = folder.word(point.number)
    tries = int(record.get("tries", 0))
    run_id = read_mapping(point.run.tracking, shapes.TRACKING).get("run_id")
    summary = read_mapping(point.run.summary, shapes.SUMMARY)
    state, reason = _state(record, job_state)
    # The finished run was trained on other data, or on another device
    if record.get("refused"):
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
            summary.get("mlflow_run_id") or run_id,
            tries,
            folder.objectives,
        )
    steps, final = latest(point.run, point.monitor)
    best = best_evaluations(point.run, {point.monitor: point.mode}).get(point.monitor, {})
    return PointResult(
        point,
        state,
        reason,
        best,
        final,
        steps,
        folder.spent_s(point),
        mlflow_run_id=run_id,
        tries=tries,
        objectives=folder.objectives,
    )


def point_results(
    folder: SweepFolder, job_states: Mapping[int, JobState] | None = None
) -> list[PointResult]:
    """Return the results of all points, in order.

    Args:
        folder: The sweep's folder.
        job_states: States of the jobs by number, if the launcher was asked.
    """
    states = job_states or {}
    results = [point_result(folder, point, states.get(point.number)) for point in folder.points()]
    first_results = {result.point.folder: result for result in reversed(results)}
    return [repeat_failure(result, first_results[result.point.folder]) for result in results]


def repeat_failure(result: PointResult, first: PointResult | None) -> PointResult:
    """Return the result of a point, failed if the first point with the same run has failed.

    Args:
        result: The point's own result.
        first: Result of the first point with the same run.
    """
    # A run that failed is not started again for another point
    if result.state is not State.waiting or first is None or first.state is not State.failed:
        return result
    return dataclasses.replace(
        result,
        state=State.failed,
        reason=f"the same run as point {first.point.number + 1}, which failed: {first.reason}",
    )


def current_results(
    folder: SweepFolder, project: Project, *, trusted: bool = True
) -> list[PointResult]:
    """Return the results of all points, in order, with what the launcher knows about jobs.

    Args:
        folder: The sweep's folder.
        project: The user's project.
        trusted: Whether the launcher that the folder names may be asked.
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
            job_states = launcher.look([point.number for point in folder.points()])
            results = point_results(folder, job_states)
            return (
                results if folder.holder() is not None else _name_unsubmitted(results, job_states)
            )
    results = point_results(folder)
    if folder.holder() is not None:
        return results
    # The jobs ended with the sweep's process
    return [
        dataclasses.replace(x, state=State.interrupted) if x.state is State.running else x
        for x in results
    ]


UNSUBMITTED = "not submitted"
"""Reason of a point that waits without a job, as the cluster refused it."""


def _name_unsubmitted(
    results: Sequence[PointResult], job_states: Mapping[int, JobState]
) -> list[PointResult]:
    """Return the results, with the reason of points that wait without a job."""
    # Points with the same run as an earlier one have no job of their own
    first_points = {x.point.folder: x.point.number for x in reversed(results)}
    unsubmitted = {number for number in first_points.values() if number not in job_states}
    return [
        dataclasses.replace(x, reason=UNSUBMITTED)
        if x.state is State.waiting and x.point.number in unsubmitted
        else x
        for x in results
    ]


LOCAL = "samewise.runner.launchers.local.Local"


def open_launcher(folder: SweepFolder, project: Project) -> Launcher:
    """Return the launcher of a trusted sweep, opened if it is detached.

    Args:
        folder: The sweep's folder.
        project: The user's project, whose packages may contain the launcher.
    """
    from samewise.runner.config.instantiate import instantiate

    # Packages that the folder names are not trusted
    launcher: Launcher = instantiate(folder.facts["launcher"], "launcher", allowed=project.packages)
    # Only a detached launcher knows jobs that another process has submitted
    if launcher.detached:
        launcher.open(folder)
    return launcher


def _state(record: Mapping[str, Any], job_state: JobState | None) -> tuple[State, str]:
    """Return a point's state and the reason, from its job's record and its launcher."""
    reason = str(record.get("reason") or (job_state.reason if job_state else ""))
    message = str(record.get("said") or "")
    # Comes before the exit code, as a pruned run stops like an interrupted one
    if record.get("pruned"):
        return State.pruned, str(record["pruned"])
    if job_state is not None and job_state.standing is not Standing.ended:
        return State(job_state.standing.value), job_state.reason
    if "ended" in record:
        code = record.get("exit_code")
        job_reason = job_state.reason if job_state is not None and code == INTERRUPTED else ""
        cause = "; ".join(
            filter(
                None,
                [job_reason, strip_heading(message).partition("\n")[0].partition("; hint: ")[0]],
            )
        )
        return (
            State.interrupted if code == INTERRUPTED else State.failed
        ), cause or reason or f"exit code {code}"
    if job_state is not None and job_state.failed:
        return State.failed, reason
    if "began" in record:
        return (
            (State.running, "")
            if job_state is None and not reason
            else (State.interrupted, reason or "it ended without a message")
        )
    return (State.interrupted, reason) if job_state is not None and reason else (State.waiting, "")


_NOT_EVALUATED = ("train/", "system/")


def latest(run: RunFolder, monitor: str, *, window: int = 1 << 16) -> tuple[int, dict[str, float]]:
    """Return a run's last logged step, and the metrics of its last evaluation.

    Args:
        run: The run's folder.
        monitor: Metric that every evaluation has.
        window: Bytes at the end of the journal to read.
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
        # The window may begin within a line, which is then no entry
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
    """Return a run's best evaluation so far by each metric; empty if its journal cannot be read.

    Args:
        run: The run's folder.
        modes: Mode, min or max, of each metric.
    """
    with contextlib.suppress(ConfigError):
        evaluations = best_so_far(run.metrics, modes)
        return {
            monitor: {
                name: metrics[name]
                for name in metrics
                if name == monitor or not (name == "step" or name.startswith(_NOT_EVALUATED))
            }
            for monitor, metrics in evaluations.items()
        }
    return {}
