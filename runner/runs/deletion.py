"""Delete runs' folders, and find what depends on them. Imports neither torch nor mlflow."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from samewise.runner.config.schema import SOURCES
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import kept_sources, locks
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import candidates
from samewise.runner.runs.listing import ListedRun, setting_lines, value_at
from samewise.runner.tracking.backends import backends_of
from samewise.runner.tracking.progress import is_behind


def trained_from(runs: Sequence[ListedRun], run_root: Path) -> list[str]:
    """Return the folders of other runs whose config names a checkpoint of one of these runs.

    Args:
        runs: Runs to delete; the run roots that they are in are searched too.
        run_root: Run root to search.
    """
    deleted = {Path(run.folder).resolve() for run in runs}
    # The last root decides how a folder is written: as in `run_root`
    roots = [*dict.fromkeys(run.parent.parent for run in deleted), run_root]
    naming = {
        os.path.realpath(folder): folder
        for root in roots
        if deleted
        for folder, lines in setting_lines(root, candidates(root)).items()
        if _names_checkpoint(lines, deleted)
    }
    return [folder for path, folder in naming.items() if Path(path) not in deleted]


def _names_checkpoint(lines: str, deleted: Collection[Path]) -> bool:
    values = [x for key in SOURCES if isinstance(x := value_at(lines, key), str)]
    # A link may lead to a checkpoint
    checkpoints = [Path(os.path.realpath(os.path.expanduser(value))) for value in values]
    # The path may be relative to another folder
    is_possible = bool(checkpoints) or "/checkpoints/" in lines
    return is_possible and any(
        f"{json.dumps(path.name)[1:-1]}/checkpoints/" in lines
        or any(checkpoint.is_relative_to(path) for checkpoint in checkpoints)
        for path in deleted
    )


def unsent(runs: Sequence[ListedRun], run_root: Path) -> list[ListedRun]:
    """Return the runs that are tracked in MLflow, which does not have everything yet."""
    lines = setting_lines(run_root, [run.folder for run in runs])
    return [
        run
        for run in runs
        if "mlflow"
        in backends_of(
            {
                key: value_at(lines[run.folder], f"tracking.{key}")
                for key in ("enabled", "report_to")
            }
        )
        and is_behind(RunFolder(Path(run.folder)))
    ]


def require_no_links(runs: Sequence[ListedRun]) -> None:
    """Require that no run's folder, nor its experiment's, is a link. A run root may be one.

    Raises:
        ConfigError: One is; what is deleted would be in another place.
    """
    folders = [Path(run.folder).absolute() for run in runs]
    links = dict.fromkeys(
        path for folder in folders for path in (folder.parent, folder) if path.is_symlink()
    )
    hint = (
        "nothing has been deleted; remove the link, or name the run by the folder to which it leads"
    )
    ConfigError.raise_all(
        Problem(str(link), f"is a link to {link.resolve()}", hint=hint) for link in links
    )


def delete(runs: Sequence[ListedRun], run_root: Path) -> None:
    """Delete runs' folders with their checkpoints, and code in the run roots that no run names.

    Records in MLflow stay.

    Raises:
        ConfigError: A run is being written or sent; then none is deleted.
    """
    folders = [Path(run.folder).resolve() for run in runs]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each lock is an open file
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(soft + 2 * len(runs), hard)), hard))
    # All locks are held before the first run is deleted: either all runs are, or none
    with contextlib.ExitStack() as stack:
        for run in runs:
            folder = RunFolder(Path(run.folder))
            for lock, activity in ((folder.lock, "written"), (folder.sending, "sent")):
                try:
                    stack.enter_context(locks.hold(lock, sign=False))
                except locks.LockHeld as holder:
                    raise ConfigError(
                        Problem(
                            run.folder,
                            f"is being {activity} by {holder}",
                            hint="wait for it, or stop it; nothing has been deleted",
                        )
                    ) from None
        for folder in folders:
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    for root in {run_root.resolve(), *(folder.parents[1] for folder in folders)}:
        kept_sources.remove_unnamed(root)


def size_of(run: ListedRun) -> int:
    """Return the size of a run's folder in bytes; links count as 0."""
    return sum(
        path.lstat().st_size
        for path in Path(run.folder).rglob("*")
        if path.is_file() and not path.is_symlink()
    )
