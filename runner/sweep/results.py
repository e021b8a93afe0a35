"""The result of each point of a sweep, from its run's folder and its job's record. Imports neither torch nor mlflow."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samewise.runner.config.project import Project
from samewise.runner.errors import INTERRUPTED, ConfigError, strip_heading
from samewise.runner.launchers.base import Launcher, Seen, Standing
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
"""States in which nothing more happens on its own. Interrupted points resume when the sweep does."""


@dataclass(frozen=True)
class PointResult:
    """A point and its result.

    Args:
        point: Which.
        state: Where it stands.
        reason: The reason, if it is not obvious: the error's first line, "killed by SIGKILL".
        best: Metrics at the step that was best by `evaluate.monitor`, so far if it has not finished.
        final: Metrics of the last evaluation.
        steps: Optimizer steps taken.
        seconds: Spent training; of an unfinished run, the time that its jobs took.
        weights_sha256: Of the final weights.
        mlflow_run_id: The MLflow run's.
        tries: How often the job was started.
        objectives: `sweeper.objectives`: metrics, each with min or max; empty if `evaluate.monitor` is the objective.
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
        """The metrics by the names that objectives have: at the best step, and with the prefix `final/` at the last."""
        return {**self.best, **{f"final/{name}": value for name, value in self.final.items()}}

    @property
    def value(self) -> float:
        """The value of `objective`; NaN if there is none."""
        return float(self.metrics.get(self.objective, math.nan))


def point_result(folder: SweepFolder, point: Point, seen: Seen | None = None) -> PointResult:
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
        best = {name: value for name, value in (metrics["best"] or metrics["final"]).items() if name != "step"}
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
    return PointResult(point, state, reason, best, last, steps, folder.spent_s(point), mlflow_run_id=tracked, tries=tries, objectives=folder.objectives)


def point_results(folder: SweepFolder, seen: Mapping[int, Seen] | None = None) -> list[PointResult]:
    """The results of all points, in order."""
    known = seen or {}
    found = [point_result(folder, point, known.get(point.number)) for point in folder.points()]
    firsts = {one.point.folder: one for one in reversed(found)}
    return [repeat_failure(one, firsts[one.point.folder]) for one in found]


def repeat_failure(one: PointResult, first: PointResult | None) -> PointResult:
    """The result of a point; failed if it has none of its own yet, and the first point that is the same run has failed: it is not run again."""
    if one.state is not State.waiting or first is None or first.state is not State.failed:
        return one
    return dataclasses.replace(one, state=State.failed, reason=f"the same run as point {first.point.number + 1}, which failed: {first.reason}")


def current_results(folder: SweepFolder, project: Project, *, trusted: bool = True) -> list[PointResult]:
    """The results of all points, in order, with the launcher's information about jobs; a launcher named by someone else is not asked."""
    if folder.facts["launcher"]["_target_"] != LOCAL:
        if not trusted:
            print(f"warning: {folder.path} {trust.NOT_YOURS}. Its launcher is not asked for the state of its jobs; --trust allows it", file=sys.stderr)
            return point_results(folder)
        launcher = open_launcher(folder, project)
        if launcher.detached:
            seen = launcher.look([point.number for point in folder.points()])
            found = point_results(folder, seen)
            return found if folder.holder() is not None else _name_unsubmitted(found, seen)
    found = point_results(folder)
    if folder.holder() is not None:
        return found
    return [dataclasses.replace(one, state=State.interrupted) if one.state is State.running else one for one in found]  # its jobs ended with it


UNSUBMITTED = "not submitted"
"""Why a point waits that the cluster does not know, as it refused its job."""


def _name_unsubmitted(found: Sequence[PointResult], seen: Mapping[int, Seen]) -> list[PointResult]:
    """The results, with the reason for points that wait, but for no job; those that are the same run as an earlier one have none of their own."""
    firsts = {one.point.folder: one.point.number for one in reversed(found)}
    left = {number for number in firsts.values() if number not in seen}
    return [dataclasses.replace(one, reason=UNSUBMITTED) if one.state is State.waiting and one.point.number in left else one for one in found]


LOCAL = "samewise.runner.launchers.local.Local"


def open_launcher(folder: SweepFolder, project: Project) -> Launcher:
    """The launcher of a trusted sweep; only a detached one knows jobs that another process has submitted.

    Args:
        folder: The sweep's.
        project: The user's, whose packages may contain the launcher: packages that the folder names are not trusted.
    """
    from samewise.runner.config.instantiate import instantiate

    launcher: Launcher = instantiate(folder.facts["launcher"], "launcher", allowed=project.packages)
    if launcher.detached:
        launcher.open(folder)
    return launcher


def _state(word: Mapping[str, Any], seen: Seen | None) -> tuple[State, str]:
    reason = str(word.get("reason") or (seen.reason if seen else ""))
    said = str(word.get("said") or "")
    if word.get("pruned"):
        return State.pruned, str(word["pruned"])
    if seen is not None and seen.standing is not Standing.gone:
        return State(seen.standing.value), seen.reason
    if "ended" in word:
        code = word.get("exit_code")
        how = seen.reason if seen is not None and code == INTERRUPTED else ""
        why = "; ".join(filter(None, [how, strip_heading(said).partition("\n")[0].partition("; hint: ")[0]]))
        return (State.interrupted if code == INTERRUPTED else State.failed), why or reason or f"exit code {code}"
    if seen is not None and seen.failed:
        return State.failed, reason
    if "began" in word:
        return (State.running, "") if seen is None and not reason else (State.interrupted, reason or "it ended without a message")
    return (State.interrupted, reason) if seen is not None and reason else (State.waiting, "")


_NOT_EVALUATED = ("train/", "system/")


def latest(run: RunFolder, monitor: str, *, window: int = 1 << 16) -> tuple[int, dict[str, float]]:
    """The last logged step of a run and its last evaluation, from the last `window` bytes of its journal."""
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
            evaluated = {name: value for name, value in entry.metrics.items() if not name.startswith(_NOT_EVALUATED)}
        if step and evaluated:
            break
    return step, evaluated


def best_evaluations(run: RunFolder, modes: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """A run's best evaluation so far by each of these metrics, if it has one and its journal can be read."""
    with contextlib.suppress(ConfigError):
        found = best_so_far(run.metrics, modes)
        return {by: {name: one[name] for name in one if name == by or not (name == "step" or name.startswith(_NOT_EVALUATED))} for by, one in found.items()}
    return {}


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of a setting.

    Args:
        count: How many runs.
        mean: Their mean.
        deviation: Their standard deviation (n - 1); NaN for one run, or if a value is infinite.
        margin: Half the width of the 95 % confidence interval of the mean, by Student's t; NaN likewise.
    """

    count: int
    mean: float
    deviation: float = math.nan
    margin: float = math.nan

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Computed from the values that are numbers."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < 2:
            return cls(len(known), known[0] if known else math.nan)
        if not all(map(math.isfinite, known)):
            return cls(len(known), sum(known) / len(known))
        deviation = statistics.stdev(known)
        return cls(len(known), statistics.fmean(known), deviation, _student(len(known) - 1) * deviation / math.sqrt(len(known)))

    def interval(self, metric: str) -> tuple[float, float]:
        """The mean's 95 % confidence interval; limited to 0 and 1 for a share. NaN for one run."""
        low, high = self.mean - self.margin, self.mean + self.margin
        return (max(low, 0.0), min(high, 1.0)) if _SHARE.search(metric) and 0.0 <= self.mean <= 1.0 else (low, high)


_SHARE = re.compile(r"(^|[/_])(accuracy|top\d+|precision|recall|f1|map)$")
"""Metrics from 0 to 1."""


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def group_by_setting(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """The results by setting, over its seeds, in order; a setting that was drawn several times is one, and so are seeds that are the same run."""
    numbered = dict[int, list[PointResult]]()
    for one in found:
        numbered.setdefault(one.point.setting, []).append(one)
    settings = dict[tuple[Any, ...], list[PointResult]]()
    for setting in map(distinct_runs, numbered.values()):
        settings.setdefault((*setting[0].point.values.items(), *(one.point.folder for one in setting)), setting)
    return list(settings.values())


def distinct_runs(found: Iterable[PointResult]) -> list[PointResult]:
    """The results without those of a run that is there already."""
    firsts = dict[str, PointResult]()
    for one in found:
        firsts.setdefault(one.point.folder, one)
    return list(firsts.values())


def spread(of_setting: Sequence[PointResult], objective: str = "") -> Spread:
    """An objective of a setting over its finished seeds; if none is named, the one by which settings are ranked."""
    return Spread.of(one.metrics.get(objective or one.objective, math.nan) for one in of_setting if one.state is State.finished)


def lacks_seeds(of_setting: Sequence[PointResult]) -> bool:
    """Whether a seed has ended without a value: it failed, was pruned or gave NaN, so the setting has no mean, and its trial in Optuna no value."""
    return any(
        one.state in (State.failed, State.pruned)
        or (one.state is State.finished and any(math.isnan(one.metrics.get(name, math.nan)) for name in one.objectives or (one.objective,)))
        for one in of_setting
    )


def objective_means(of_setting: Sequence[PointResult]) -> dict[str, float]:
    """The mean of each of the sweeper's objectives over a setting's finished seeds."""
    return {name: spread(of_setting, name).mean for name in of_setting[0].objectives}


def goals(found: Sequence[PointResult]) -> list[str]:
    """The objectives by which points are ranked, each with its mode. Several, if points have different ones, which cannot be compared."""
    return list(dict.fromkeys(f"{one.objective} ({one.mode})" for one in found))


def rank_settings(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """Sort settings by mean, the best first; then those that lack seeds, by the mean over the others, then those without a result.

    If the settings have different objectives, they stay in their order.
    """
    settings = group_by_setting(found)
    if len(goals(found)) > 1:
        return settings
    sign = -1.0 if settings and settings[0][0].mode == "max" else 1.0

    def place(one: Sequence[PointResult]) -> tuple[bool, bool, float]:
        mean = spread(one).mean
        return (math.isnan(mean), lacks_seeds(one), sign * mean)

    return sorted(settings, key=place)
