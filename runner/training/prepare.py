"""From a composed config to a run that is ready to train, or the summary of a finished one, or
neither if other processes have trained it.
"""

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
from samewise.runner.config.tree import differences
from samewise.runner.errors import ConfigError, DamagedFile, Problem
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
"""At most so many files and folders of each data folder, so that a finished run is reported at
once."""
_WRITTEN_WHILE_TRAINING = ("evaluate", "trace")
"""The groups of the config with settings that change no result, but what a run writes as it trains.
"""


def prepare(
    composed: Composed, *, as_json: bool = False, debug: bool = False
) -> Run | Mapping[str, Any] | None:
    """Do what precedes training in `train`.

    ConfigError with all that is wrong, PeerFailed if a rank has failed, and said why.

    Returns the run, for `fit`; the summary of a finished run; None if ranks have trained it and
    printed its summary.
    """
    project = composed.project
    sound = settings_are_sound(composed)
    if sound and not is_rank():
        done = finished_summary(composed)
        if done is not None:
            return done
    if sound:
        # Environment variables, before anything imports torch
        variables.prepare(composed.cfg.reproducibility)
    if is_rank():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `run_agent` does
        return rank(
            composed,
            as_json=as_json,
            look=partial(finished_summary, composed),
            check=partial(_require_sound, composed),
        )
    _require_sound(composed)
    number = processes(composed)
    if number > 1:
        return launch(composed, number, as_json=as_json, debug=debug)

    from samewise.runner.training.build import build

    return build(composed, project, composed.folder)


def finished_summary(composed: Composed) -> dict[str, Any] | None:
    """A finished run's summary.

    None if it is damaged (with a warning), or if run_root is not a folder, which `check` reports.

    ConfigError if it exists and cannot be read now.
    """
    try:
        summary = read_json(composed.folder.summary, shapes.SUMMARY)
    except DamagedFile as error:
        print(
            "warning: "
            f"{replace(error.problems[0], hint='the run is resumed from its last checkpoint, and a new one is written')}",
            file=sys.stderr,
        )
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
            f"warning: {path} was modified after this run had ended; `train --fresh` "
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
    """For each place the first of it, and of the folders and files below it, that was modified
    after a run had ended. Runs do not count.
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
    """Raise the config's problems, and report what has changed in the code since the same config
    was trained.
    """
    if edited := sources.edited_since_import(composed.code):
        hint = "start another process (in a notebook: restart the kernel), or importlib.reload them"
        raise ConfigError(
            Problem(
                ", ".join(edited),
                "was edited after this process had imported it, which would train the "
                "earlier version",
                hint=hint,
            )
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
        f"{'; '.join(changed)}",
        file=sys.stderr,
    )
    print(f"    before: {before}\n    now:    {composed.folder.path}", file=sys.stderr)
