"""Runs a whole sweep, from the overrides or the call in Python until it has ended or is submitted."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.runner.config.check import commands, components
from samewise.runner.config.compose import Composed
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, number_of
from samewise.runner.launchers.base import Launcher
from samewise.runner.records import sources
from samewise.runner.records import trust as trusted
from samewise.runner.records.files import require_writable
from samewise.runner.records.sweep_folder import HOME, SweepFolder, below, find, is_named
from samewise.runner.sweepers.base import Sweeper
from samewise.runner.sweepers.space import Space, read_space
from samewise.runner.sweeps.engine import Sweep, refuse_unlisted
from samewise.runner.sweeps.points import Composer, identity
from samewise.runner.sweeps.progress import Watcher
from samewise.runner.sweeps.shared_runs import require_same_data


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep before anything is written or started; its sweeper is open, its launcher is not."""

    given: Sequence[str]
    project: Project
    space: Space
    folder: SweepFolder
    shared: Composed
    composer: Composer
    sweeper: Sweeper
    launcher: Launcher


def prepare_sweep(
    asked: Sequence[str], project: Project, *, run_root: Path, trust: bool, wait: bool
) -> PreparedSweep:
    """Prepare a sweep from overrides, or from an existing sweep's name.

    ConfigError with what is wrong with it.

    Args:
        asked: Overrides, or the id or folder of a sweep.
        project: The user's own.
        run_root: Where to look for sweeps by id.
        trust: Use a folder that someone else has made.
        wait: Stay until the jobs have ended, even if the launcher does not need it.
    """
    given, named = _overrides(asked, run_root=run_root, trust=trust)
    space, folder, shared, composer = open_sweep(given, project)
    if shared.code.files and not folder.made_by.exists():
        _report_code_changes(space, folder, shared, composer, named)
    if named is not None and named.path.resolve() != folder.path.resolve():
        words = (
            "is a copy, or was started in a folder other than the current one: its command "
            f"would act on {folder.path}"
        )
        raise ConfigError(
            Problem(
                str(named.path),
                words,
                hint="change to the folder where it was started, or name the sweep by its id",
            )
        )
    if folder.facts:
        trusted.require(folder.made_by, trust=trust, uses=trusted.RUNS)
        require_same_data(folder, space, composer)
    settings = {path: plain(shared.cfg[path]) for path in ("sweeper", "launcher")}
    if found := [*commands.problems(shared, project), *components.problems_in(settings, project)]:
        raise ConfigError(*found)
    sweeper, launcher = (
        instantiate(shared.cfg[path], path, allowed=project.packages)
        for path in ("sweeper", "launcher")
    )
    if not wait:
        refuse_unlisted(launcher, sweeper)
    sweeper.open(
        space,
        folder.path,
        monitor=str(shared.cfg.evaluate.monitor),
        mode=str(shared.cfg.evaluate.mode.value),
    )
    return PreparedSweep(given, project, space, folder, shared, composer, sweeper, launcher)


def _report_code_changes(
    space: Space,
    folder: SweepFolder,
    shared: Composed,
    composer: Composer,
    named: SweepFolder | None,
) -> None:
    """Report what has changed in the code since the same sweep was made.

    ConfigError if it is the earlier sweep that was asked for.
    """
    config, _ = identity(space, composer, with_code=False)
    made = [
        one
        for one in ([named] if named else below(folder.path.parents[1]))
        if sources.config_in(one.sources) == config and one.id != folder.id
    ]
    if not made:
        return
    before = max(made, key=lambda one: one.sources.stat().st_mtime)
    changed = "; ".join(
        sources.describe_changes(sources.files_in(before.sources), shared.code.files)
    )
    if named:
        status = (
            f"`samewise sweep {before.id} --status` shows its jobs: jobs already submitted "
            "continue with the earlier code"
        )
        hint = (
            "restore it; or run `samewise sweep` with the same overrides, which makes another "
            f"sweep. {status}"
        )
        raise ConfigError(
            Problem(
                before.id, f"the code has changed since this sweep was made: {changed}", hint=hint
            )
        )
    print(
        "the code has changed since the earlier sweep with these overrides, so this is "
        f"another sweep: {changed}",
        file=sys.stderr,
    )
    print(f"    before: {before.path}\n    now:    {folder.path}", file=sys.stderr)


def run_sweep(ready: PreparedSweep, *, wait: bool, retry_failed: bool) -> bool:
    """Train every point, or resume the sweep.

    Return whether it has ended: if not, its jobs are submitted.

    ConfigError with what is wrong with any of its points; Interrupted if asked to stop, once the
    jobs that ran have saved.
    """
    folder, space, launcher = ready.folder, ready.space, ready.launcher
    is_new, is_first = not folder.made_by.exists(), not Path(ready.shared.cfg.run_root).exists()
    require_writable("run_root", folder.path, hint="run_root=FOLDER")
    folder.write_facts(
        {
            **{name: value for name, value in folder.facts.items() if name != "refused"},
            **_facts(ready),
        }
    )
    with folder.hold_lock():
        settings = ready.sweeper.count()
        total = settings * max(1, len(space.seeds)) if settings is not None else None
        watcher = Watcher(folder, total=total)
        sweep = Sweep(
            folder,
            space,
            ready.sweeper,
            launcher,
            ready.composer,
            ready.project,
            watcher,
            retry_failed=retry_failed,
        )
        try:
            launcher.open(folder)
            todo = sweep.prepare()
            of = f"{number_of(total, 'point')}, " if total is not None else ""
            watcher.say(f"{folder.id}: {of}{todo} to run; {folder.path}")
            if launcher.detached and not wait:
                count = _submit(sweep, folder)
                watcher.say(
                    f"{number_of(count, 'job')} submitted; `samewise sweep --status "
                    f"{folder.path}` shows their progress"
                )
                return False
            with watcher:
                sweep.run()
        except ConfigError:
            if is_new and not folder.points():
                folder.discard(root=is_first)
            raise
        finally:
            launcher.close()
            ready.sweeper.close()
    return True


def _submit(sweep: Sweep, folder: SweepFolder) -> int:
    """Submit the jobs.

    Keep the reason in sweep.json if the cluster refuses them, for `--status`.
    """
    try:
        return sweep.submit()
    except ConfigError as error:
        folder.write_facts(
            {**folder.facts, "refused": f"{error.problems[0].path}: {error.problems[0].message}"}
        )
        raise


def open_sweep(
    given: Sequence[str], project: Project
) -> tuple[Space, SweepFolder, Composed, Composer]:
    """The space, the folder and the shared config for overrides, and the composer of their points."""
    space, composer = read_space(given, project=project), Composer(project)
    name, shared = identity(space, composer)
    return space, SweepFolder(Path(shared.cfg.run_root) / HOME / name), shared, composer


def _overrides(
    asked: Sequence[str], *, run_root: Path, trust: bool
) -> tuple[list[str], SweepFolder | None]:
    """The given overrides; or those of the sweep whose id or folder was given, with its folder."""
    if is_named(asked):
        found = find(asked[0], run_root=run_root)
        given = list(found.facts["overrides"])  # read before it is signed
        trusted.require(found.made_by, trust=trust, uses=trusted.RUNS)
        return given, found
    return list(asked), None


def _facts(ready: PreparedSweep) -> dict[str, Any]:
    folder, project, shared = ready.folder, ready.project, ready.shared
    return {
        "id": folder.id,
        "name": shared.name,
        "overrides": list(ready.given),
        "made": folder.facts.get("made", time.time()),
        "root": str(project.root),
        "packages": list(project.packages),
        "configs": [str(one) for one in project.configs],
        "launcher": plain(shared.cfg.launcher),
        "sweeper": plain(shared.cfg.sweeper),
        "tracking": plain(shared.cfg.tracking),
        "run_root": str(shared.cfg.run_root),
    }
