"""Prepares a composed config's training: checks it, finds a finished run, or starts its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.config.check import check, settings_are_sound
from samewise.runner.config.compose import load
from samewise.runner.config.fingerprint import data_places, fingerprint_of
from samewise.runner.config.saved import satisfies
from samewise.runner.config.tree import at, differences
from samewise.runner.errors import ConfigError, DamagedFile
from samewise.runner.processes import variables
from samewise.runner.processes.this_process import is_rank
from samewise.runner.records import shapes, sources
from samewise.runner.records.files import read_json, read_mapping
from samewise.runner.records.own_code import changes as own_changes
from samewise.runner.training.launch import launch, processes, rank

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.records.folder import RunFolder
    from samewise.runner.training.run import Run


_LOOKED_AT = 10_000
"""The most files and folders of a data folder to look at, so that a finished run prints at once."""
_WRITTEN_WHILE_TRAINING = ("evaluate", "trace")
"""The groups of the config that change no weight, but the files that a training writes."""


def prepare(
    composed: Composed, *, as_json: bool = False, debug: bool = False, forks: bool = True
) -> Run | Mapping[str, Any] | None:
    """Prepare a training, or have other processes train.

    Args:
        composed: The config.
        as_json: Whether rank 0 prints the summary as JSON.
        debug: Whether to print the traceback of a rank that failed.
        forks: As in `launch`.

    Returns:
        The run, for `fit`; or the summary of a finished run; or None if ranks have trained it and
        printed its summary.

    Raises:
        ConfigError: The config has these problems.
        PeerFailed: A rank has failed, and its message is printed.
    """
    project = composed.project
    sound = settings_are_sound(composed)
    if sound and not is_rank():
        # First, as it needs no torch, whose import takes seconds
        done = finished_summary(composed)
        if done is not None:
            return done
    if sound:
        # Torch reads these environment variables when it is imported, below
        variables.prepare(composed.cfg.reproducibility)
        if is_rank() or at(composed.whole, "strategy.max_restarts") is not None:
            # Without torch's own reports of lost connections
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if is_rank():
        return rank(
            composed,
            as_json=as_json,
            look=partial(finished_summary, composed),
            check=partial(_require_sound, composed),
        )
    _require_sound(composed)
    number = processes(composed)
    if number > 1:
        return launch(composed, number, as_json=as_json, debug=debug, forks=forks)

    from samewise.runner.training.build import build

    return build(composed, project, composed.folder)


def finished_summary(composed: Composed) -> dict[str, Any] | None:
    """Return a finished run's summary; None if there is none or it is damaged (with a warning).

    Raises:
        ConfigError: It exists, and cannot be read.
    """
    try:
        summary = read_json(composed.folder.summary, shapes.SUMMARY)
    except DamagedFile as error:
        hint = "the run is resumed from its last checkpoint, and writes a new summary"
        print(f"warning: {replace(error.problems[0], hint=hint)}", file=sys.stderr)
        return None
    if summary is None or summary["status"] != "finished":
        return None
    saved = load(composed.folder.config)
    if not satisfies(composed.folder, saved, composed.cfg):
        return None
    for change in own_changes(read_json(composed.folder.environment, shapes.ENVIRONMENT) or {}):
        print(
            f"warning: {change}; the run was trained with another version, `train "
            "--fresh` trains it with this one",
            file=sys.stderr,
        )
    for path in _modified_after(
        composed.folder, dict.fromkeys(data_places(composed.whole).values())
    ):
        print(
            f"warning: {path} was modified after this run ended; `train --fresh` "
            "trains with the data as they are now",
            file=sys.stderr,
        )
    before, here = (
        {part: composition.whole[part] for part in _WRITTEN_WHILE_TRAINING}
        for composition in (saved, composed)
    )
    if changed := [path for path, *values in differences(before, here) if {} not in values]:
        print(
            f"warning: changing {', '.join(changed)} has no effect: this run is finished; "
            "`train --fresh` trains it again",
            file=sys.stderr,
        )
    return {
        "mlflow_run_id": read_mapping(composed.folder.tracking, shapes.TRACKING).get("run_id"),
        **summary,
    }


def _modified_after(folder: RunFolder, places: Iterable[Path]) -> Iterator[Path]:
    """Yield, for each place, the first path in it that was modified after a run ended.

    Folders of runs do not count.
    """
    ended, runs = folder.summary.stat().st_mtime, folder.path.parents[1].resolve()
    for place in places:
        with suppress(OSError):
            entries = islice(place.resolve().rglob("*"), _LOOKED_AT) if place.is_dir() else [place]
            yield from islice(
                (
                    entry
                    for entry in entries
                    if entry.exists()
                    and entry.stat().st_mtime > ended
                    and not entry.is_relative_to(runs)
                ),
                1,
            )


def _require_sound(composed: Composed) -> None:
    """Raise the config's problems, and print how the code has changed since it was last trained."""
    ConfigError.raise_if(
        (edited := sources.edited_since_import(composed.code)),
        ", ".join(edited),
        "was edited after this process imported it, so the earlier version would train",
        hint="start another process (in a notebook: restart the kernel), or importlib.reload them",
    )
    check(composed, composed.project)
    if not composed.code.files or composed.folder.path.exists():
        return
    before = sources.earlier(
        composed.folder.path, fingerprint_of(composed.whole), composed.code.files
    )
    if before is None:
        return
    recorded = sources.files_in(before / "sources.json")
    changed = (
        sources.describe_changes(recorded, composed.code.files)
        if recorded
        else ["an earlier version of samewise recorded it in another way"]
    )
    if not changed:  # trained again
        return
    print(
        "the code has changed since this was trained before, so this is another run: "
        f"{'; '.join(changed)}\n    before: {before}\n    now:    {composed.folder.path}",
        file=sys.stderr,
    )
