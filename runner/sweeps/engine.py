"""Run a sweep: ask the sweeper for settings, start jobs, watch them, report results.

A sweep can be interrupted at any time, and resumes.
"""

import dataclasses
import signal
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from samewise.runner.config import compose
from samewise.runner.config.project import Project
from samewise.runner.config.saved import satisfies
from samewise.runner.errors import ConfigError, Interrupted, Problem
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.processes.this_process import on_signals
from samewise.runner.records import kept_sources, locks, own_code, shapes, sources
from samewise.runner.records.files import read_mapping
from samewise.runner.records.sweep_folder import Point, SweepFolder, label
from samewise.runner.sweepers.base import Result, Setting, Sweeper
from samewise.runner.sweepers.space import Space
from samewise.runner.sweeps import soundness
from samewise.runner.sweeps.points import (
    Composer,
    compose_points,
    identity,
    same_runs,
    write_configs,
)
from samewise.runner.sweeps.progress import Watcher
from samewise.runner.sweeps.results import ENDED, PointResult, State, point_result, repeat_failure
from samewise.runner.sweeps.settings import distinct_runs

# A job that was killed for memory, or whose machine died, may do better the next time
MAX_TRIES = 3
"""Maximum number of starts per call of a job that ends without a reason."""


@dataclass
class Sweep:
    """Running sweep: points start in order, as many at a time as the launcher allows.

    Its sweeper and launcher are open.

    Args:
        folder: The sweep's folder.
        space: Dimensions to vary.
        sweeper: Chooses settings.
        launcher: Starts jobs.
        composer: Composes the points' configs.
        project: The user's project.
        watcher: Shows the progress.
        retry_failed: Whether to start points again that failed.
    """

    folder: SweepFolder
    space: Space
    sweeper: Sweeper
    launcher: Launcher
    composer: Composer
    project: Project
    watcher: Watcher
    retry_failed: bool = False

    _points: list[Point] = field(default_factory=list[Point])
    _pending: deque[Point] = field(default_factory=deque[Point])
    _running: dict[int, tuple[Point, Job]] = field(default_factory=dict[int, tuple[Point, Job]])
    _cautions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _reported: set[int] = field(default_factory=set[int])
    _pruned: set[int] = field(default_factory=set[int])
    _failed: dict[str, PointResult] = field(default_factory=dict[str, PointResult])
    _start_counts: Counter[int] = field(default_factory=Counter[int])
    _has_repeated: bool = False
    _should_wait: bool = False
    _other_holders: dict[int, str] = field(default_factory=dict[int, str])
    _stopping: int = 0

    def prepare(self) -> int:
        """Compose and check the points that are not written yet, and find those still to do.

        Returns:
            Number of points to do, with those that the sweeper will be asked for.

        Raises:
            ConfigError: The code has changed, or any of the points is wrong.
        """
        points = self.folder.points()
        ConfigError.raise_if(
            (changed := sources.list_changes(self.folder.sources)),
            self.folder.id,
            f"the code of some of its points has changed: {'; '.join(changed)}",
            hint="restore it, or start a new sweep with a different name=",
        )
        if self.sweeper.listed:
            settings = list(self.sweeper.settings())
            self._add(
                settings[len(points) // self._seeds :], points, seeds_done=len(points) % self._seeds
            )
            self._points = self.folder.points()[: len(settings) * self._seeds]
        else:
            self._points = points
            # After a crash, a setting may lack some of its seeds
            if seeds_done := len(points) % self._seeds:
                self._add(
                    [Setting(points[-1].setting, points[-1].values)], points, seeds_done=seeds_done
                )
        self._pruned = {
            point.setting for point in self._points if self.folder.word(point.number).get("pruned")
        }
        first_points = set(same_runs(self._points).values())
        states = (
            self.launcher.look([point.number for point in self._points])
            if self.launcher.detached
            else {}
        )
        outdated = dict[str, None]()
        for point in self._points:
            result = self._prune_with_setting(self._result(point, states.get(point.number)))
            expected_file, run_config = self.folder.config(point.number), point.run.config
            if (
                result.state is State.finished
                and not result.tries
                and not satisfies(
                    point.run, compose.load(run_config), compose.load(expected_file).cfg
                )
            ):
                # Trained on data in another place: the job compares their content
                result = dataclasses.replace(result, state=State.waiting)
            if result.state is State.failed and self.retry_failed:
                self.folder.note(
                    point.number,
                    ended=None,
                    exit_code=None,
                    said=None,
                    reason=None,
                    began=None,
                    refused=None,
                )
            elif result.state in ENDED or (
                result.state in (State.waiting, State.running) and point.number in states
            ):
                if result.state in ENDED:
                    environment = read_mapping(point.run.environment, shapes.ENVIRONMENT)
                    outdated.update(dict.fromkeys(own_code.changes(environment)))
                    self.watcher.count_ended(result)
                    self._record_failure(result)
                else:
                    self._running[point.number] = (point, self._job(point))
                continue
            # A listed point with the run of an earlier one has no job of its own
            if point.number in first_points or not self.sweeper.listed:
                self._pending.append(point)
        for change in outdated:
            self.watcher.say(f"warning: {change}; finished runs were trained with another version")
        to_ask = (
            (self.sweeper.count() or 0) * self._seeds - len(self._points)
            if not self.sweeper.listed
            else 0
        )
        return len(self._pending) + max(0, to_ask)

    def submit(self) -> int:
        """Submit everything to a detached launcher; return the number of jobs."""
        jobs = [self._job(point) for point in self._pending]
        self._pending.clear()
        if jobs:
            self.launcher.submit(jobs)
        return len(jobs)

    def run(self) -> None:
        """Start and watch jobs until nothing is left to do.

        Raises:
            Interrupted: A signal asked the sweep to stop; the jobs that ran have saved.
        """
        with on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._ask_stop):
            self._report_ended()
            while True:
                self._fill()
                if not self._running and (
                    self._stopping
                    or not any(point.number in self._other_holders for point in self._pending)
                ):
                    break
                self._collect()
                self.watcher.show(
                    [point for point, _ in self._running.values()], waiting=len(self._pending)
                )
                time.sleep(self.launcher.poll_s)
        if self._stopping:
            raise Interrupted(
                Problem(
                    self.folder.id,
                    "stopped; the running jobs have saved",
                    hint="run the same command again to resume",
                )
            )

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        """Start no more jobs, and ask the running ones to save and stop.

        On a second call, end them.
        """
        self.watcher.say(
            "stopping: running jobs finish their step and save. Press Ctrl-C again to stop them now"
        )
        self._stopping += 1
        self.launcher.cancel(list(self._running), kill=self._stopping > 1)

    def _fill(self) -> None:
        """Start jobs while there is room."""
        while not self._stopping:
            room = self.launcher.room([job for _, job in self._running.values()])
            if room is not None and room <= 0:
                return
            if not self._pending and (self._should_wait or not self._ask()):
                return
            if self._fail_repeated():
                # A running job's result may lead the sweeper to other values
                self._should_wait = bool(self._running)
                continue
            batch = self._next(room)
            if not batch:
                return
            jobs = [self._job(point) for point in batch]
            self._running |= {
                point.number: (point, job) for point, job in zip(batch, jobs, strict=True)
            }
            self._start_counts.update(point.number for point in batch)
            self.launcher.submit(jobs)

    def _next(self, room: int | None) -> list[Point]:
        """Return up to `room` points to start now."""
        busy_folders, points = {point.folder for point, _ in self._running.values()}, list[Point]()
        for point in list(self._pending):
            if room is not None and len(points) >= room:
                break
            # The same experiment as a running point, here or in another process, waits for its
            # result, and other points go first
            if point.folder not in busy_folders and not self._is_trained_elsewhere(point):
                busy_folders.add(point.folder)
                points.append(point)
                self._pending.remove(point)
        return points

    def _is_trained_elsewhere(self, point: Point) -> bool:
        """Whether another process trains the point's run, such as a job of another sweep."""
        holder = locks.holder(point.run.lock)
        if holder is None:
            self._other_holders.pop(point.number, None)
        elif point.number not in self._other_holders:
            self.watcher.say(f"{point.label} waits: its run is being written by {holder}")
            self._other_holders[point.number] = holder
        return holder is not None

    def _fail_repeated(self) -> bool:
        """Fail points that are the same run as one that failed in this sweep.

        Returns:
            Whether there were any.
        """
        repeated = [
            result
            for point in self._pending
            if point.folder in self._failed
            and (result := self._result(point)).state is State.failed
        ]
        for result in repeated:
            self._pending.remove(result.point)
            self.watcher.show_ended(result)
        if repeated:
            if not self._has_repeated:
                self.watcher.say(
                    f"warning: {repeated[0].point.label} failed in this sweep, so it is not run "
                    "again, though the sweeper chose it again. If this repeats, remove the cause "
                    "and use --retry-failed, or start another sweep without these values"
                )
            self._has_repeated = True
            self._report_ended()
        return bool(repeated)

    def _record_failure(self, result: PointResult) -> None:
        if result.state is State.failed:
            self._failed.setdefault(result.point.folder, result)

    def _result(self, point: Point, job_state: JobState | None = None) -> PointResult:
        return repeat_failure(
            point_result(self.folder, point, job_state), self._failed.get(point.folder)
        )

    def _ask(self) -> bool:
        """Ask the sweeper for one more setting, and return whether there is one."""
        setting = None if self.sweeper.listed else self.sweeper.ask()
        if setting is None:
            return False
        try:
            self._pending.extend(self._add([setting], self._points))
        except ConfigError as error:
            if not self._points:
                raise
            message = "; ".join(str(problem).partition("\n")[0] for problem in error.problems)
            self.watcher.say(f"{label(setting.values)}  cannot be run: {message}", "bold red")
            self.sweeper.tell(setting, Result("failed"))
            return self._ask()
        return True

    def _add(
        self, settings: Sequence[Setting], existing: Sequence[Point], *, seeds_done: int = 0
    ) -> list[Point]:
        """Compose, check and write the points of more settings.

        Args:
            settings: The settings.
            existing: Points of the sweep so far.
            seeds_done: Points of the first setting that exist already.
        """
        composed_points = compose_points(
            settings, self.space, self.folder, self.composer, first=len(existing) - seeds_done
        )[seeds_done:]
        soundness.require_sound(composed_points, self.project, elsewhere=self.launcher.detached)
        all_points = [*existing, *(x.point for x in composed_points)]
        note = soundness.require_separate(all_points, self.composer, start=len(existing))
        if note:
            self.watcher.say(f"note: {note}")
        for caution in soundness.cautions(composed_points, self._cautions):
            self.watcher.say(f"warning: {caution}")
        write_configs(composed_points, self.folder)
        points = [x.point for x in composed_points]
        files = {
            **sources.files_in(self.folder.sources),
            **{label: digests for x in composed_points for label, digests in x.code.files.items()},
        }
        if files:
            config, _ = identity(self.space, self.composer, with_code=False)
            kept_sources.write_record(self.folder.sources, config, files)
        # Comes last, so that every point in the list has its config
        self.folder.add_points(points)
        if existing is self._points:
            self._points.extend(points)
        return points

    @property
    def _seeds(self) -> int:
        """Number of runs of a setting."""
        return max(1, len(self.space.seeds))

    def _collect(self) -> None:
        """Show jobs that have ended, and restart those that died."""
        states = self.launcher.look(list(self._running))
        for number, job_state in states.items():
            if job_state.standing is not Standing.ended:
                continue
            point, _ = self._running.pop(number)
            self._should_wait = False
            # Recorded, since a cluster forgets its jobs
            if "ended" not in self.folder.word(number) and job_state.reason:
                self.folder.note(number, reason=job_state.reason)
            result = self._prune_with_setting(point_result(self.folder, point, job_state))
            # Another process trains the run, so the point waits for it
            if self.folder.word(number).get("busy") and not self._stopping:
                self._pending.append(point)
                continue
            has_died = result.state is State.interrupted and "ended" not in self.folder.word(number)
            if (
                has_died
                and not self.launcher.detached
                and not self._stopping
                and self._start_counts[number] < MAX_TRIES
            ):
                self.watcher.show_restart(result)
                self._pending.appendleft(point)
                continue
            self.watcher.show_ended(result)
            self._record_failure(result)
            # The setting's trial has ended without a value, whatever its other seeds give
            if result.state is State.pruned:
                self._skip_seeds(point)
        self._report_ended()

    def _skip_seeds(self, pruned: Point) -> None:
        """Skip the other seeds of a setting that was pruned with one."""
        if pruned.setting in self._pruned:
            return
        self._pruned.add(pruned.setting)
        for point in [point for point in self._pending if point.setting == pruned.setting]:
            self._pending.remove(point)
            self.watcher.show_ended(self._prune_with_setting(point_result(self.folder, point)))
        self.launcher.cancel(
            [
                number
                for number, (point, _) in self._running.items()
                if point.setting == pruned.setting
            ]
        )

    def _prune_with_setting(self, result: PointResult) -> PointResult:
        """Count a point that could resume as pruned if its setting was."""
        if result.state in ENDED or result.point.setting not in self._pruned:
            return result
        self.folder.note(result.point.number, pruned="as it was with another seed")
        return point_result(self.folder, result.point)

    def _report_ended(self) -> None:
        """Report settings to the sweeper once all their seeds have ended."""
        if self.sweeper.listed:
            return
        by_setting = dict[int, list[Point]]()
        for point in self._points:
            by_setting.setdefault(point.setting, []).append(point)
        pending = {point.number for point in self._pending} | set(self._running)
        for number, points in by_setting.items():
            if number in self._reported or any(point.number in pending for point in points):
                continue
            results = [self._result(point) for point in points]
            # Interrupted points resume with the sweep, and are reported then
            if any(x.state not in ENDED for x in results):
                continue
            self._reported.add(number)
            self.sweeper.tell(Setting(number, points[0].values), _combine(results))

    def _job(self, point: Point) -> Job:
        seed = (self.space.seeds or (None,)).index(point.seed)
        variables = {
            **point.needs["variables"],
            **self.sweeper.variables(Setting(point.setting, point.values), seed),
        }
        needs = {
            name: point.needs[name] for name in ("threads", "processes", "wants_gpu", "spread")
        }
        return Job(point.number, point.label, self.folder.path, environment=variables, **needs)


def _combine(results: Sequence[PointResult]) -> Result:
    """Return a setting's result from its seeds' results."""
    for state in (State.failed, State.pruned):
        if any(x.state is state for x in results):
            evaluations = [x.best for x in results if x.best]
            return Result(state.value, dict(evaluations[-1]) if evaluations else {})
    metrics = [x.metrics for x in distinct_runs(results)]
    return Result(
        "finished",
        {
            name: statistics.fmean(x[name] for x in metrics)
            for name in metrics[0]
            if all(name in x for x in metrics)
        },
    )


def refuse_unlisted(launcher: Launcher, sweeper: Sweeper) -> None:
    """Refuse to submit a sweep all at once if its sweeper chooses settings one by one.

    Raises:
        ConfigError: The launcher is detached, and the sweeper not listed.
    """
    ConfigError.raise_if(
        launcher.detached and not sweeper.listed,
        "sweeper",
        "chooses points by earlier results, so the sweep cannot be submitted all at once",
        type(sweeper).__name__,
        hint="add --wait: this process then asks the sweeper, submits one job at a time, "
        "and must stay running",
    )
