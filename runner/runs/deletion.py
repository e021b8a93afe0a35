"""Deletes runs' folders, and names what depends on them. Imports neither torch nor mlflow."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from samewise.runner.config.tree import at
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import kept_sources, locks, shapes
from samewise.runner.records.files import read_mapping, read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import below
from samewise.runner.runs.listing import ListedRun, settings_of
from samewise.runner.tracking.backends import backends_of
from samewise.runner.tracking.progress import is_behind


def trained_from(runs: Sequence[ListedRun], run_root: Path) -> list[str]:
    """The folders of other runs, in this run root or theirs, whose config names a checkpoint of one
    of these, by whatever path.
    """
    those = {Path(one.folder).resolve() for one in runs}
    # run_root last: its runs are named by it
    roots = [
        *dict.fromkeys(one.parent.parent for one in those),
        run_root,
    ]
    others = {folder.path.resolve(): str(folder.path) for root in roots for folder in below(root)}
    return [
        folder
        for place, folder in others.items()
        if place not in those and _names_checkpoint(folder, those)
    ]


def _names_checkpoint(folder: str, those: Collection[Path]) -> bool:
    text, config = read_text(RunFolder(Path(folder)).config) or "", settings_of(folder)
    named = [
        value
        for key in ("initialise.weights", "resume_from")
        if isinstance(value := at(config, key), str)
    ]
    # A link may lead there
    places = [Path(os.path.realpath(os.path.expanduser(value))) for value in named]
    return any(
        f"{one.name}/checkpoints/" in text or any(place.is_relative_to(one) for place in places)
        for one in those
    )


def in_mlflow(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Those of which MLflow has something."""
    return [
        one
        for one in runs
        if read_mapping(RunFolder(Path(one.folder)).tracking, shapes.TRACKING).get("run_id")
    ]


def unsent(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Those that are tracked in MLflow, which does not have everything yet."""
    settings = {
        one.folder: {
            key: at(settings_of(one.folder), f"tracking.{key}") for key in ("enabled", "report_to")
        }
        for one in runs
    }
    return [
        one
        for one in runs
        if "mlflow" in backends_of(settings[one.folder]) and is_behind(RunFolder(Path(one.folder)))
    ]


def require_no_links(runs: Sequence[ListedRun]) -> None:
    """ConfigError if a run's folder, or its experiment's, is a link: what is deleted would be
    elsewhere. A run root may be one.
    """
    folders = [Path(one.folder).absolute() for one in runs]
    links = dict.fromkeys(
        path for folder in folders for path in (folder.parent, folder) if path.is_symlink()
    )
    if links:
        hint = (
            "nothing has been deleted; remove the link, or name the run by the folder to which "
            "it leads"
        )
        raise ConfigError(
            *(Problem(str(link), f"is a link to {link.resolve()}", hint=hint) for link in links)
        )


def delete(runs: Sequence[ListedRun], run_root: Path) -> None:
    """Delete runs' folders with their checkpoints; in their run roots and this one, unnamed code.

    Their records in MLflow stay. ConfigError if one is being written or sent: then none is deleted.
    """
    folders = [Path(one.folder).resolve() for one in runs]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A file for each lock
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(soft + 2 * len(runs), hard)), hard))
    with contextlib.ExitStack() as held:
        for one in runs:
            folder = RunFolder(Path(one.folder))
            for lock, doing in ((folder.lock, "written"), (folder.sending, "sent")):
                try:
                    held.enter_context(locks.hold(lock, sign=False))
                except locks.LockHeld as holder:
                    hint = "wait for it, or stop it; nothing has been deleted"
                    raise ConfigError(
                        Problem(one.folder, f"is being {doing} by {holder}", hint=hint)
                    ) from None
        for folder in folders:
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    for root in {run_root.resolve(), *(folder.parents[1] for folder in folders)}:
        kept_sources.remove_unnamed(root)


def size_of(one: ListedRun) -> int:
    """The size of a run's folder in bytes; links count as 0."""
    return sum(
        path.lstat().st_size
        for path in Path(one.folder).rglob("*")
        if path.is_file() and not path.is_symlink()
    )
