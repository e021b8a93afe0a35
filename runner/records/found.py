"""Finds runs on disk by folder, fingerprint or MLflow run id.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from samewise.runner.errors import CheckpointError, ConfigError, Problem, first_few, nearest
from samewise.runner.records import index, shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.kept_checkpoints import choose_checkpoint, note_if_not_meant

RUN: Final = "a run's folder or name, the start of its fingerprint, or its MLflow run id"
# Folders of a run root with MLflow's artifacts and the user's code
_NO_RUNS = ("mlartifacts", ".code")
RESTORE: Final = (
    "if it is one, restore config.yaml from a copy: nothing else records what was trained"
)


def find(name: str, *, run_root: Path) -> RunFolder:
    """Find the run called `name`.

    Args:
        name: A run's folder, an experiment's or folder's name, the start of a fingerprint, or an
            MLflow run id.
        run_root: The folder of runs.

    Raises:
        ConfigError: No run matches, or several do.
    """
    # The start of every fingerprint
    ConfigError.raise_if(not name.strip(), "RUN", "is empty", name, RUN)
    path = Path(name)
    if (path / "config.yaml").is_file():
        return RunFolder(path)
    matches = matching(name, run_root=run_root)
    in_experiment = (
        [RunFolder(config.parent) for config in path.glob("*/config.yaml")] if not matches else []
    )
    if len(matches or in_experiment) == 1:
        return (matches or in_experiment)[0]
    names = [f"{run.path.parent.name}/{run.path.name}" for run in _newest_first(matches)]
    ConfigError.raise_if(
        matches,
        "RUN",
        f"{len(matches)} runs match",
        name,
        "one run",
        f"give more characters: {first_few(names, 5)}",
    )
    if in_experiment or (path.is_dir() and (path == run_root or below(path))):
        runs = [str(run.path) for run in _newest_first(in_experiment or below(path))]
        root = path.parent if in_experiment else path
        raise ConfigError(
            Problem(
                name,
                "is a folder of runs",
                expected="one run",
                hint=f"choose one of them (`samewise runs --run-root {root}`)"
                + (f", the newest first: {first_few(runs, 5)}" if runs else ""),
            )
        )
    if without_config := [
        folder
        for folder in (path, *run_root.glob("*/*"))
        if folder.is_dir()
        and folder.parent.name not in _NO_RUNS
        and (folder == path or folder.name.startswith(name) or str(folder).endswith(f"/{name}"))
    ]:
        raise ConfigError(
            Problem(
                str(without_config[0]),
                "the folder exists, but has no config.yaml",
                expected="a run's folder",
                hint=RESTORE,
            )
        )
    ConfigError.raise_if(
        path.is_file(),
        name,
        "is a file, not a run's folder",
        hint=f"if it is a bundle, `mkdir parts && tar -xf {name} -C parts` puts the run into "
        "parts/run",
    )
    names = [x for run in below(run_root) for x in (run.path.name, run.path.parent.name)]
    raise ConfigError(
        Problem(
            "RUN",
            f"no such run in the folder {run_root}",
            name,
            RUN,
            nearest(name, names)
            or f"`samewise train` makes one; if it is not in {run_root}, give the path of its folder",
        )
    )


def _newest_first(runs: Sequence[RunFolder]) -> list[RunFolder]:
    return sorted(runs, key=lambda run: run.config.stat().st_mtime, reverse=True)


def matching(name: str, *, run_root: Path) -> list[RunFolder]:
    """List the runs that `name` may mean.

    Those with exactly this name; if there are none, those whose fingerprint starts with it.
    """
    folders = candidates(run_root)
    return (
        _complete_matches(name, run_root, folders)
        or _runs(x for x in folders if _is_called(os.path.basename(x), name))
        or _runs(x for x in folders if os.path.basename(x).startswith(name))
    )


def complete_matches(name: str, *, run_root: Path) -> list[RunFolder]:
    """List the runs whose name, folder, experiment or MLflow run id is exactly `name`.

    A name that the user gave a run comes before all others.
    """
    return _complete_matches(name, run_root, candidates(run_root))


def _complete_matches(name: str, run_root: Path, folders: Sequence[str]) -> list[RunFolder]:
    noted = _runs(x for x in folders if os.access(f"{x}/notes.json", os.F_OK))
    namesakes = [run for run in noted if name == read_mapping(run.notes, shapes.NOTES).get("name")]
    if namesakes:
        return namesakes
    ids = dict[str, str]()
    if len(name) == _ID_LENGTH:
        files = ("config.yaml", "tracking.json")
        ids.update(index.entries(run_root, "MLflow run id", files, folders, _run_id))
    return _runs(x for x in folders if name in (*_names(x), ids.get(x)))


_ID_LENGTH = 32
"""Hexadecimal digits of a run's id in MLflow: for other names no run's id is read."""


def _names(folder: str) -> tuple[str, str, str]:
    experiment, name = folder.split("/")[-2:]
    return name, experiment, f"{experiment}/{name}"


def _run_id(run: RunFolder) -> str:
    return read_mapping(run.tracking, shapes.TRACKING).get("run_id") or ""


def _is_called(folder: str, name: str) -> bool:
    """Whether a folder's name equals or starts with the name.

    `3f2a-2` means the second run of those that start with `3f2a`.
    """
    (own, _, number), (start, _, wanted_number) = folder.partition("-"), name.partition("-")
    return own.startswith(start) and number == wanted_number


def below(run_root: Path) -> list[RunFolder]:
    """List all runs in a run root."""
    return _runs(candidates(run_root))


def _runs(folders: Iterable[str]) -> list[RunFolder]:
    # Without pathlib, which takes ten times as long
    return [RunFolder(Path(x)) for x in folders if os.access(f"{x}/config.yaml", os.F_OK)]


def candidates(run_root: Path) -> list[str]:
    """List the folders of a run root that are runs' if they have a config, in order."""
    under = "" if run_root == Path() else f"{run_root}/"
    return [
        f"{under}{experiment}/{run}"
        for experiment in _names_in(run_root)
        if experiment not in _NO_RUNS
        for run in _names_in(f"{under}{experiment}")
    ]


def _names_in(folder: str | Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def checkpoint_of(name: str, *, run_root: Path) -> Path:
    """Find a run's checkpoint by the run's name.

    Args:
        name: `RUN` or `RUN/best` for the best checkpoint, or the last if none is marked best;
            `RUN/last` for the last.
        run_root: The folder of runs.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: The run or the checkpoint is missing.
    """
    folder = find(name.removesuffix("/last").removesuffix("/best"), run_root=run_root)
    which = "last" if name.endswith("/last") else "best"
    checkpoint = chosen_checkpoint(folder, which)
    if checkpoint is None:
        raise ConfigError(Problem(str(folder.path), "the run has no checkpoint yet"))
    # A copy that was made without links has none
    if not (folder.checkpoints / ("latest" if which == "last" else which)).is_dir():
        note_if_not_meant(folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), which)
    return checkpoint


def chosen_checkpoint(folder: RunFolder, which: str) -> Path | None:
    """Return the folder of a run's checkpoint `best` or `last`; None if none can be read.

    `best` is the last one if none is marked best.
    """
    with suppress(CheckpointError):
        return choose_checkpoint(folder.checkpoints, which).path.resolve()
    return None
