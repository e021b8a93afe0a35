"""Runs a sweep: asks the sweeper for settings, starts jobs, watches them, reports results.

It can be interrupted at any time and resumes.
"""

from __future__ import annotations

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
from samewise.runner.launchers.base import Job, Launcher, JobState, Standing
from samewise.runner.processes.this_process import on_signals
from samewise.runner.records import kept_sources, locks, own_code, shapes, sources
from samewise.runner.records.files import read_mapping
from samewise.runner.records.sweep_folder import Point, SweepFolder, label
from samewise.runner.sweepers.base import Result, Setting, Sweeper
from samewise.runner.sweepers.space import Space
from samewise.runner.sweeps import shared_runs
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
from samewise.runner.sweeps.soundness import cautions, require_sound

MOST_TRIES = 3
"""How often a job that ends without a reason (killed for memory, a dead machine) is started per
call."""


@dataclass
class Sweep:
    """A running sweep: points are started in order, as many at a time as the launcher allows.

    Its sweeper and launcher are open.
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
    _todo: deque[Point] = field(default_factory=deque[Point])
    _running: dict[int, tuple[Point, Job]] = field(default_factory=dict[int, tuple[Point, Job]])
    _cautions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _shared: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    _told: set[int] = field(default_factory=set[int])
    _pruned: set[int] = field(default_factory=set[int])
    _failed: dict[str, PointResult] = field(default_factory=dict[str, PointResult])
    _starts: Counter[int] = field(default_factory=Counter[int])
    _is_repeating: bool = False
    _is_held: bool = False
    _elsewhere: dict[int, str] = field(default_factory=dict[int, str])
    _stopping: int = 0

    def prepare(self) -> int:
        """Compose and check the points that are known but not written yet, and find those still to
        do; ConfigError with what is wrong with any of them.

        Returns how many are to do now, those included that the sweeper will be asked for.
        """
        known = self.folder.points()
        if changed := sources.list_changes(self.folder.sources):
            hint = "restore it, or start a new sweep with a different name="
            raise ConfigError(
                Problem(
                    self.folder.id,
                    f"the code of some of its points has changed: {'; '.join(changed)}",
                    hint=hint,
                )
            )
        if self.sweeper.listed:
            settings = list(self.sweeper.settings())
            self._add(settings[len(known) // self._seeds :], known, some=len(known) % self._seeds)
            self._points = self.folder.points()[: len(settings) * self._seeds]
        else:
            self._points = known
            some = len(known) % self._seeds  # after a crash, a setting may lack some of its seeds
            if some:
                self._add([Setting(known[-1].setting, known[-1].values)], known, some=some)
        self._pruned = {
            point.setting for point in self._points if self.folder.word(point.number).get("pruned")
        }
        firsts = set(same_runs(self._points).values())
        standing = (
            self.launcher.look([point.number for point in self._points])
            if self.launcher.detached
            else {}
        )
        outdated = dict[str, None]()
        for point in self._points:
            now = self._prune_with_setting(self._result(point, standing.get(point.number)))
            wanted, trained = self.folder.config(point.number), point.run.config
            if (
                now.state is State.finished
                and not now.tries
                and not satisfies(point.run, compose.load(trained), compose.load(wanted).cfg)
            ):
                # Trained on data elsewhere: its job compares their content
                now = dataclasses.replace(now, state=State.waiting)
            if now.state is State.failed and self.retry_failed:
                self.folder.note(
                    point.number,
                    ended=None,
                    exit_code=None,
                    said=None,
                    reason=None,
                    began=None,
                    refused=None,
                )
            elif now.state in ENDED or (
                now.state in (State.waiting, State.running) and point.number in standing
            ):
                if now.state in ENDED:
                    environment = read_mapping(point.run.environment, shapes.ENVIRONMENT)
                    outdated.update(dict.fromkeys(own_code.changes(environment)))
                    self.watcher.show_found(now)
                    self._keep_failure(now)
                else:
                    self._running[point.number] = (point, self._job(point))
                continue
            if point.number in firsts or not self.sweeper.listed:
                self._todo.append(point)
        for change in outdated:
            self.watcher.say(f"warning: {change}; finished runs were trained with another version")
        to_ask = (
            (self.sweeper.count() or 0) * self._seeds - len(self._points)
            if not self.sweeper.listed
            else 0
        )
        return len(self._todo) + max(0, to_ask)

    def submit(self) -> int:
        """Submit everything to a detached launcher; return the number of jobs."""
        jobs = [self._job(point) for point in self._todo]
        self._todo.clear()
        if jobs:
            self.launcher.submit(jobs)
        return len(jobs)

    def run(self) -> None:
        """Start and watch jobs until nothing is left to do.

        Interrupted if asked to stop, once the jobs that ran have saved.
        """
        with on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._ask_stop):
            self._report_ended()
            while True:
                self._fill()
                if not self._running and (
                    self._stopping
                    or not any(point.number in self._elsewhere for point in self._todo)
                ):
                    break
                self._collect()
                self.watcher.show(
                    [point for point, _ in self._running.values()], waiting=len(self._todo)
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
            "stopping: running jobs will finish their step and save; press Ctrl-C again to "
            "stop them immediately"
        )
        self._stopping += 1
        self.launcher.cancel(list(self._running), kill=self._stopping > 1)

    def _fill(self) -> None:
        """Start jobs while there is room.

        Points whose runs another process trains wait, and others go first.
        """
        while not self._stopping:
            room = self.launcher.room([job for _, job in self._running.values()])
            if room is not None and room <= 0:
                return
            if not self._todo and (self._is_held or not self._ask()):
                return
            if self._drop_failed():
                # A running job's result may lead the sweeper elsewhere
                self._is_held = bool(self._running)
                continue
            batch = self._next(room)
            if not batch:
                return
            jobs = [self._job(point) for point in batch]
            self._running |= {
                point.number: (point, job) for point, job in zip(batch, jobs, strict=True)
            }
            self._starts.update(point.number for point in batch)
            self.launcher.submit(jobs)

    def _next(self, room: int | None) -> list[Point]:
        """Up to `room` points to start now.

        A point that is the same experiment as a running one, here or in another process, waits for
        its result.
        """
        busy, found = {point.folder for point, _ in self._running.values()}, list[Point]()
        for point in list(self._todo):
            if room is not None and len(found) >= room:
                break
            if point.folder not in busy and not self._is_elsewhere(point):
                busy.add(point.folder)
                found.append(point)
                self._todo.remove(point)
        return found

    def _is_elsewhere(self, point: Point) -> bool:
        """Whether another process trains the point's run, such as a job of another sweep."""
        holder = locks.holder(point.run.lock)
        if holder is None:
            self._elsewhere.pop(point.number, None)
        elif point.number not in self._elsewhere:
            self.watcher.say(f"{point.label} waits: its run is being written by {holder}")
            self._elsewhere[point.number] = holder
        return holder is not None

    def _drop_failed(self) -> bool:
        """Let points fail that are the same run as one that failed in this sweep, without starting
        it again. True if there were some.
        """
        again = [
            now
            for point in self._todo
            if point.folder in self._failed and (now := self._result(point)).state is State.failed
        ]
        for now in again:
            self._todo.remove(now.point)
            self.watcher.show_ended(now)
        if again:
            if not self._is_repeating:
                hint = (
                    "if it goes on, leave these values out, which makes another sweep, or "
                    "remove the cause and use --retry-failed"
                )
                self.watcher.say(
                    f"warning: {again[0].point.label} failed in this sweep, and was chosen "
                    f"again: it is not run again; {hint}"
                )
            self._is_repeating = True
            self._report_ended()
        return bool(again)

    def _keep_failure(self, now: PointResult) -> None:
        if now.state is State.failed:
            self._failed.setdefault(now.point.folder, now)

    def _result(self, point: Point, seen: JobState | None = None) -> PointResult:
        return repeat_failure(
            point_result(self.folder, point, seen), self._failed.get(point.folder)
        )

    def _ask(self) -> bool:
        """Ask the sweeper for one more setting. False if there is none now."""
        setting = None if self.sweeper.listed else self.sweeper.ask()
        if setting is None:
            return False
        try:
            self._todo.extend(self._add([setting], self._points))
        except ConfigError as error:
            if not self._points:
                raise
            said = "; ".join(str(problem).partition("\n")[0] for problem in error.problems)
            self.watcher.say(f"{label(setting.values)}  cannot be run: {said}", "bold red")
            self.sweeper.tell(setting, Result("failed"))
            return self._ask()
        return True

    def _add(
        self, settings: Sequence[Setting], known: Sequence[Point], *, some: int = 0
    ) -> list[Point]:
        """Compose, check and write the points of more settings.

        Of the first setting, `some` exist already.
        """
        made = compose_points(
            settings, self.space, self.folder, self.composer, first=len(known) - some
        )[some:]
        require_sound(made, self.project, elsewhere=self.launcher.detached)
        composed = {one.point.number: one.composed for one in made}
        every = [*known, *(one.point for one in made)]
        found = shared_runs.require_separate(
            every,
            lambda point: composed.get(point.number) or self.composer.compose(point.overrides),
        )
        for note in shared_runs.notes(found, self._shared, start=len(known)):
            self.watcher.say(f"note: {note}")
        for caution in cautions(made, self._cautions):
            self.watcher.say(f"warning: {caution}")
        write_configs(made, self.folder)
        points = [one.point for one in made]
        files = {
            **sources.files_in(self.folder.sources),
            **{
                label: digests for one in made for label, digests in one.composed.code.files.items()
            },
        }
        if files:
            config, _ = identity(self.space, self.composer, with_code=False)
            kept_sources.write_record(self.folder.sources, config, files)
        self.folder.add_points(points)
        if known is self._points:
            self._points.extend(points)
        return points

    @property
    def _seeds(self) -> int:
        return max(1, len(self.space.seeds))

    def _collect(self) -> None:
        seen = self.launcher.look(list(self._running))
        for number, known in seen.items():
            if known.standing is not Standing.ended:
                continue
            point, _ = self._running.pop(number)
            self._is_held = False
            if "ended" not in self.folder.word(number) and known.reason:
                self.folder.note(number, reason=known.reason)
            now = self._prune_with_setting(point_result(self.folder, point, known))
            if self.folder.word(number).get("busy") and not self._stopping:
                self._todo.append(point)
                continue
            silent = now.state is State.interrupted and "ended" not in self.folder.word(number)
            if (
                silent
                and not self.launcher.detached
                and not self._stopping
                and self._starts[number] < MOST_TRIES
            ):
                self.watcher.show_restart(now)
                self._todo.appendleft(point)
                continue
            self.watcher.show_ended(now)
            self._keep_failure(now)
            if now.state is State.pruned:
                self._drop_seeds(point)
        self._report_ended()

    def _drop_seeds(self, pruned: Point) -> None:
        """Skip the other seeds of a setting that was pruned with one."""
        if pruned.setting in self._pruned:
            return
        self._pruned.add(pruned.setting)
        for point in [point for point in self._todo if point.setting == pruned.setting]:
            self._todo.remove(point)
            self.watcher.show_ended(self._prune_with_setting(point_result(self.folder, point)))
        self.launcher.cancel(
            [
                number
                for number, (point, _) in self._running.items()
                if point.setting == pruned.setting
            ]
        )

    def _prune_with_setting(self, now: PointResult) -> PointResult:
        """Count a point that could resume as pruned if its setting was."""
        if now.state in ENDED or now.point.setting not in self._pruned:
            return now
        self.folder.note(now.point.number, pruned="as it was with another seed")
        return point_result(self.folder, now.point)

    def _report_ended(self) -> None:
        """Report settings of which all seeds have ended to the sweeper.

        Interrupted points resume with the sweep, and are reported then.
        """
        if self.sweeper.listed:
            return
        by_setting = dict[int, list[Point]]()
        for point in self._points:
            by_setting.setdefault(point.setting, []).append(point)
        pending = {point.number for point in self._todo} | set(self._running)
        for number, points in by_setting.items():
            if number in self._told or any(point.number in pending for point in points):
                continue
            ends = [self._result(point) for point in points]
            if any(one.state not in ENDED for one in ends):
                continue
            self._told.add(number)
            self.sweeper.tell(Setting(number, points[0].values), _together(ends))

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


def _together(ends: Sequence[PointResult]) -> Result:
    """A setting's result from its seeds'."""
    for state in (State.failed, State.pruned):
        if any(one.state is state for one in ends):
            known = [one.best for one in ends if one.best]
            return Result(state.value, dict(known[-1]) if known else {})
    several = [one.metrics for one in distinct_runs(ends)]
    return Result(
        "finished",
        {
            name: statistics.fmean(one[name] for one in several)
            for name in several[0]
            if all(name in one for one in several)
        },
    )


def refuse_unlisted(launcher: Launcher, sweeper: Sweeper) -> None:
    """Raise a ConfigError if a sweeper that chooses settings one by one is to be submitted as a
    whole.
    """
    if launcher.detached and not sweeper.listed:
        hint = (
            "add --wait: this process then asks the sweeper, submits one job at a time, and "
            "must stay running"
        )
        words = "chooses points by earlier results, so the sweep cannot be submitted all at once"
        raise ConfigError(Problem("sweeper", words, type(sweeper).__name__, hint=hint))
