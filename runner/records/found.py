"""Finds runs on disk by folder, fingerprint or MLflow run id. Imports neither torch nor mlflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samewise.runner.errors import CheckpointError, ConfigError, Problem, first_few, nearest
from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.kept_checkpoints import choose_checkpoint, note_if_not_meant

RUN: Final = "a run's folder or name, the start of its fingerprint, or its MLflow run id"
_NO_RUNS = ("mlartifacts", ".code")
RESTORE: Final = (
    "if it is one, restore config.yaml from a copy: nothing else records what was trained"
)


def find(name: str, *, run_root: Path) -> RunFolder:
    """Find the run called `name`: its folder, its experiment's or folder's name, the start of its
    fingerprint, or its MLflow run id.

    ConfigError if none matches, or several do.
    """
    if not name.strip():
        raise ConfigError(Problem("RUN", "is empty", name, RUN))
    given = Path(name)
    if (given / "config.yaml").is_file():
        return RunFolder(given)
    named = matching(name, run_root=run_root)
    of_name = (
        [RunFolder(config.parent) for config in given.glob("*/config.yaml")] if not named else []
    )
    if len(named or of_name) == 1:
        return (named or of_name)[0]
    if named:
        names = first_few([f"{run.path.parent.name}/{run.path.name}" for run in _newest(named)], 5)
        raise ConfigError(
            Problem(
                "RUN", f"{len(named)} runs match", name, "one run", f"give more characters: {names}"
            )
        )
    if of_name or (given.is_dir() and (given == run_root or any(below(given)))):
        inside = _newest(of_name or list(below(given)))
        root, shown = (
            given.parent if of_name else given,
            ", the newest first: " + first_few([str(run.path) for run in inside], 5)
            if inside
            else "",
        )
        raise ConfigError(
            Problem(
                name,
                "is a folder of runs",
                expected="one run",
                hint=f"choose one of them (`samewise runs --run-root {root}`){shown}",
            )
        )
    if bare := [
        one
        for one in (given, *run_root.glob("*/*"))
        if one.is_dir()
        and one.parent.name not in _NO_RUNS
        and (one == given or one.name.startswith(name) or str(one).endswith(f"/{name}"))
    ]:
        raise ConfigError(
            Problem(
                str(bare[0]),
                "the folder exists, but has no config.yaml",
                expected="a run's folder",
                hint=RESTORE,
            )
        )
    if given.is_file():
        hint = (
            f"if it is a bundle, `mkdir parts && tar -xf {name} -C parts` puts the run into "
            "parts/run"
        )
        raise ConfigError(Problem(name, "is a file, not a run's folder", hint=hint))
    known = [known for run in below(run_root) for known in (run.path.name, run.path.parent.name)]
    reason = f"no such run in {run_root}"
    hint = (
        nearest(name, known)
        or f"`samewise train` makes one; if it is not in {run_root}, give the path of its folder"
    )
    raise ConfigError(Problem("RUN", reason, name, RUN, hint))


def _newest(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Sort key: the run that started last comes first."""
    return sorted(runs, key=lambda run: run.config.stat().st_mtime, reverse=True)


def matching(name: str, *, run_root: Path) -> list[RunFolder]:
    """The runs that `name` may mean: those with exactly this name, folder or MLflow run id.

    If none, those whose fingerprint starts with it.
    """
    runs = list(below(run_root))
    return (
        [run for run in runs if name in _names(run)]
        or [run for run in runs if _is_called(run.path.name, name)]
        or [run for run in runs if run.path.name.startswith(name)]
    )


def _names(run: RunFolder) -> tuple[Any, ...]:
    folder, experiment = run.path.name, run.path.parent.name
    return (
        folder,
        experiment,
        f"{experiment}/{folder}",
        read_mapping(run.tracking, shapes.TRACKING).get("run_id"),
    )


def _is_called(folder: str, name: str) -> bool:
    """Whether a folder's name equals or starts with the name.

    `3f2a-2` is the second of those that start with `3f2a`.
    """
    (own, _, number), (start, _, wanted) = folder.partition("-"), name.partition("-")
    return own.startswith(start) and number == wanted


def below(run_root: Path) -> Iterator[RunFolder]:
    """All runs in a run root."""
    for config in sorted(run_root.glob("*/*/config.yaml")):
        yield RunFolder(config.parent)


def checkpoint_of(name: str, *, run_root: Path) -> Path:
    """The folder of the best checkpoint of `RUN` or `RUN/best`, its last if none is marked best, or
    for `RUN/last` its last.

    ConfigError if run or checkpoint is missing.
    """
    folder, which = (
        find(name.removesuffix("/last").removesuffix("/best"), run_root=run_root),
        "last" if name.endswith("/last") else "best",
    )
    found = chosen_checkpoint(folder, which)
    if found is None:
        raise ConfigError(Problem(str(folder.path), "the run has no checkpoint yet"))
    if not _link(folder, which).is_dir():
        note_if_not_meant(folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), which)
    return found


def chosen_checkpoint(folder: RunFolder, which: str) -> Path | None:
    """The folder of a run's checkpoint `best`, its last if none is, or `last`.

    None if it has none that can be read.
    """
    link = _link(folder, which)
    if link.is_symlink() and link.is_dir():
        return link.resolve()
    with suppress(CheckpointError):
        return choose_checkpoint(folder.checkpoints, which).path.resolve()
    return None


def _link(folder: RunFolder, which: str) -> Path:
    return folder.checkpoints / ("latest" if which == "last" else which)
