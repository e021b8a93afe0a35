"""Runs one point of a sweep in its own process, started by any launcher.

    python -m samewise.runner.launchers.job SWEEP NUMBER

It trains the point's config as written when the sweep was made, and records in the sweep's folder
when and where it began, and how it ended. Exit codes are those of `samewise train`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from samewise.runner.errors import (
    INTERRUPTED,
    ConfigError,
    Interrupted,
    PeerFailed,
    Problem,
    describe,
)
from samewise.runner.processes.this_process import ENDS_WITH_LAUNCHER, PROJECT, end_with_parent
from samewise.runner.records import locks, shapes, sources
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.summary import print_summary
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.secrets import filter_output

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

_PATIENCE_S = 120.0


@filter_output()
def main(sweep: Path, number: int) -> int:
    """Train a point of a sweep, unless it is finished."""
    from samewise.runner.config import compose, project
    from samewise.runner.training import loop
    from samewise.runner.training.prepare import prepare

    folder = SweepFolder(sweep)
    alone = int(os.environ.get("RANK", "0")) == 0
    if os.environ.pop(ENDS_WITH_LAUNCHER, ""):
        end_with_parent(signal.SIGTERM)
    if alone:
        _begin(folder, number)
    code, said, busy = 1, "", False
    try:
        for early in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(early, _raise_interrupted)
        facts, code_at = folder.facts, os.environ.get(PROJECT)
        configs = [Path(one) for one in facts["configs"] if Path(one).is_dir() and not code_at]
        found = project.find(
            Path(code_at or facts["root"]), packages=facts["packages"], configs=configs
        )
        composed = dataclasses.replace(
            compose.load(folder.config(number)),
            project=found,
            overrides=tuple(folder.points()[number].overrides),
        )
        composed = _require_unchanged(composed, folder, number)
        if alone:
            _wait_for(composed.folder)
        ready = prepare(composed)
        if isinstance(ready, Mapping):
            print_summary(ready, composed.folder, uri=composed.tracking_uri, fresh=False)
        elif ready is not None:
            print_summary(loop.fit(ready), ready.folder, uri=ready.composed.tracking_uri)
        code = 0
    except BaseException as error:
        code, said = describe(error)
        if busy := isinstance(
            error.__cause__, locks.LockHeld
        ):  # a job of another sweep trains it: it can be tried again
            code = INTERRUPTED
        if not isinstance(error, PeerFailed) or not error.is_told:
            if code == 1:
                traceback.print_exc()
            print(said, file=sys.stderr)
    finally:
        if (
            alone and folder.word(number).get("pid") == os.getpid()
        ):  # otherwise a later launcher has restarted it
            refused = code == ConfigError.exit_code and _is_finished(folder, number)
            folder.note(
                number,
                ended=time.time(),
                exit_code=code,
                said=said or None,
                refused=refused or None,
                busy=busy or None,
            )
    return code


def _require_unchanged(composed: Composed, sweep: SweepFolder, number: int) -> Composed:
    """The config with the folder that the sweep expects for this run.

    ConfigError if the code, or a file in use, has changed since the sweep was made.
    """
    point = sweep.points()[number]
    composed = dataclasses.replace(composed, place=Path(point.folder))
    if composed.fingerprint != point.fingerprint:
        changed = sources.list_changes(sweep.sources) or [
            "weights or a checkpoint that its config names"
        ]
        hint = "restore it, or run the sweep's command again: with changed code it is another sweep"
        raise ConfigError(
            Problem(
                point.label,
                f"what this point uses has changed since the sweep was made: {'; '.join(changed)}",
                hint=hint,
            )
        )
    return composed


def _is_finished(folder: SweepFolder, number: int) -> bool:
    """Whether the point's run is finished: this job did not accept it, since it was trained on
    other data or another device.
    """
    with suppress(ConfigError, OSError):
        return (read_json(folder.points()[number].run.summary, shapes.SUMMARY) or {}).get(
            "status"
        ) == "finished"
    return False


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    """Handle a signal that arrives before training starts."""
    raise Interrupted(
        Problem(
            "",
            f"stopped by {signal.Signals(number).name} before training began",
            hint="run the same command again to resume",
        )
    )


def _wait_for(run: RunFolder) -> None:
    """Wait until no process writes to the run: an earlier launcher's job may still be saving, or
    another point may be the same experiment.
    """
    until = time.monotonic() + _PATIENCE_S
    while locks.holder(run.lock) and time.monotonic() < until:
        time.sleep(0.2)


def _begin(folder: SweepFolder, number: int) -> None:
    """Record that the job has started, and remove the record of an earlier attempt, except when the
    first one began and the time they took.
    """
    word, now = folder.word(number), time.time()
    facts: dict[str, Any] = dict.fromkeys(
        ("ended", "exit_code", "said", "reason", "refused", "busy")
    )
    facts |= {
        "tries": word.get("tries", 0) + 1,
        "first_began": word.get("first_began", word.get("began", now)),
    }
    with suppress(ConfigError):  # reported later
        facts["spent_s"] = folder.spent_s(folder.points()[number])
    folder.note(number, began=now, host=socket.gethostname(), pid=os.getpid(), **facts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
