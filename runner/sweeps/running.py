"""Run a whole sweep, from its overrides until it has ended or is submitted."""

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
from samewise.runner.sweeps.soundness import require_same_data


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep before anything is written or started; its sweeper is open, its launcher is not."""

    overrides: Sequence[str]
    project: Project
    space: Space
    folder: SweepFolder
    shared: Composed
    composer: Composer
    sweeper: Sweeper
    launcher: Launcher


def prepare_sweep(
    arguments: Sequence[str], project: Project, *, run_root: Path, trust: bool, wait: bool
) -> PreparedSweep:
    """Prepare a sweep from overrides, or from an existing sweep's name.

    Args:
        arguments: Overrides, or the id or folder of a sweep.
        project: The user's project.
        run_root: Folder in which to look for sweeps by id.
        trust: Whether to use a folder that someone else has made.
        wait: Whether this process stays until the jobs have ended.

    Raises:
        ConfigError: The overrides are wrong, or do not fit the existing sweep.
    """
    overrides, named_sweep = _overrides(arguments, run_root=run_root, trust=trust)
    space, folder, shared, composer = open_sweep(overrides, project)
    if shared.code.files and not folder.made_by.exists():
        _report_code_changes(space, folder, shared, composer, named_sweep)
    if named_sweep is not None and named_sweep.path.resolve() != folder.path.resolve():
        raise ConfigError(
            Problem(
                str(named_sweep.path),
                "is a copy, or was started in a folder other than the current one: its command "
                f"would act on {folder.path}",
                hint="change to the folder where it was started, or name the sweep by its id",
            )
        )
    if folder.facts:
        trusted.require(folder.made_by, trust=trust, uses=trusted.RUNS)
        require_same_data(folder, space, composer)
    settings = {path: plain(shared.cfg[path]) for path in ("sweeper", "launcher")}
    ConfigError.raise_all(
        [
            *commands.problems(shared, project),
            *components.problems_in(settings, project),
        ]
    )
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
    return PreparedSweep(overrides, project, space, folder, shared, composer, sweeper, launcher)


def _report_code_changes(
    space: Space,
    folder: SweepFolder,
    shared: Composed,
    composer: Composer,
    named_sweep: SweepFolder | None,
) -> None:
    """Report what has changed in the code since the same sweep was made.

    Raises:
        ConfigError: The user named the earlier sweep.
    """
    config, _ = identity(space, composer, with_code=False)
    earlier_sweeps = [
        sweep
        for sweep in ([named_sweep] if named_sweep else below(folder.path.parents[1]))
        if sources.config_in(sweep.sources) == config and sweep.id != folder.id
    ]
    if not earlier_sweeps:
        return
    earlier = max(earlier_sweeps, key=lambda sweep: sweep.sources.stat().st_mtime)
    changes = "; ".join(
        sources.describe_changes(sources.files_in(earlier.sources), shared.code.files)
    )
    if named_sweep:
        status = (
            f"`samewise sweep {earlier.id} --status` shows its jobs: jobs already submitted "
            "continue with the earlier code"
        )
        raise ConfigError(
            Problem(
                earlier.id,
                f"the code has changed since this sweep was made: {changes}",
                hint="restore it; or run `samewise sweep` with the same overrides, which makes "
                f"another sweep. {status}",
            )
        )
    print(
        "the code has changed since the earlier sweep with these overrides, so this is "
        f"another sweep: {changes}",
        file=sys.stderr,
    )
    print(f"    before: {earlier.path}\n    now:    {folder.path}", file=sys.stderr)


def run_sweep(prepared: PreparedSweep, *, wait: bool, retry_failed: bool) -> bool:
    """Train every point, or resume the sweep.

    Returns:
        Whether the sweep has ended; if not, its jobs are submitted.

    Raises:
        ConfigError: A point is wrong.
        Interrupted: A signal asked the sweep to stop; the jobs that ran have saved.
    """
    folder, space, launcher = prepared.folder, prepared.space, prepared.launcher
    is_new, is_first = not folder.made_by.exists(), not Path(prepared.shared.cfg.run_root).exists()
    require_writable("run_root", folder.path, hint="run_root=FOLDER")
    folder.write_facts(
        {
            # The cluster is asked again
            **{name: value for name, value in folder.facts.items() if name != "refused"},
            **_facts(prepared),
        }
    )
    with folder.hold_lock():
        settings = prepared.sweeper.count()
        total = settings * max(1, len(space.seeds)) if settings is not None else None
        watcher = Watcher(folder, total=total)
        sweep = Sweep(
            folder,
            space,
            prepared.sweeper,
            launcher,
            prepared.composer,
            prepared.project,
            watcher,
            retry_failed=retry_failed,
        )
        try:
            launcher.open(folder)
            remaining = sweep.prepare()
            count_text = f"{number_of(total, 'point')}, " if total is not None else ""
            watcher.say(f"{folder.id}: {count_text}{remaining} to run; {folder.path}")
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
            # No point was written, so the sweep leaves nothing behind
            if is_new and not folder.points():
                folder.discard(root=is_first)
            raise
        finally:
            launcher.close()
            prepared.sweeper.close()
    return True


def _submit(sweep: Sweep, folder: SweepFolder) -> int:
    """Submit the jobs."""
    try:
        return sweep.submit()
    except ConfigError as error:
        # For `--status`: why the cluster refused the jobs
        folder.write_facts(
            {**folder.facts, "refused": f"{error.problems[0].path}: {error.problems[0].message}"}
        )
        raise


def open_sweep(
    overrides: Sequence[str], project: Project
) -> tuple[Space, SweepFolder, Composed, Composer]:
    """Return the space, the folder, the shared config and the composer for overrides."""
    space, composer = read_space(overrides, project=project), Composer(project)
    name, shared = identity(space, composer)
    return space, SweepFolder(Path(shared.cfg.run_root) / HOME / name), shared, composer


def _overrides(
    arguments: Sequence[str], *, run_root: Path, trust: bool
) -> tuple[list[str], SweepFolder | None]:
    """Return the overrides, and the folder of the sweep whose id or folder was named instead."""
    if is_named(arguments):
        sweep = find(arguments[0], run_root=run_root)
        # Read before the folder is signed
        overrides = list(sweep.facts["overrides"])
        trusted.require(sweep.made_by, trust=trust, uses=trusted.RUNS)
        return overrides, sweep
    return list(arguments), None


def _facts(ready: PreparedSweep) -> dict[str, Any]:
    folder, project, shared = ready.folder, ready.project, ready.shared
    return {
        "id": folder.id,
        "name": shared.name,
        "overrides": list(ready.overrides),
        # A resumed sweep keeps it, as the ids of jobs on Ray contain it
        "made": folder.facts.get("made", time.time()),
        "root": str(project.root),
        "packages": list(project.packages),
        "configs": [str(x) for x in project.configs],
        "launcher": plain(shared.cfg.launcher),
        "sweeper": plain(shared.cfg.sweeper),
        "tracking": plain(shared.cfg.tracking),
        "run_root": str(shared.cfg.run_root),
    }
