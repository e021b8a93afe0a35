"""Run one point of a sweep in its own process, started by any launcher.

    python -m samewise.runner.launchers.job SWEEP NUMBER

The process trains the point's config as written when the sweep was made. It records in the sweep's
folder when and where it started, and how it ended. Exit codes are those of `samewise train`.
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
    """Train a point of a sweep, unless its run is finished."""
    from samewise.runner.config import compose, project
    from samewise.runner.training import loop
    from samewise.runner.training.prepare import prepare

    folder = SweepFolder(sweep)
    is_main = int(os.environ.get("RANK", "0")) == 0
    if os.environ.pop(ENDS_WITH_LAUNCHER, ""):
        end_with_parent(signal.SIGTERM)
    if is_main:
        _begin(folder, number)
    code, message, busy = 1, "", False
    try:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, _raise_interrupted)
        # The copy of the code that a cluster's launcher made holds the config files as well
        facts, code_copy = folder.facts, os.environ.get(PROJECT)
        configs = [Path(x) for x in facts["configs"] if Path(x).is_dir() and not code_copy]
        code_project = project.find(
            Path(code_copy or facts["root"]), packages=facts["packages"], configs=configs
        )
        composed = dataclasses.replace(
            compose.load(folder.config(number)),
            project=code_project,
            overrides=tuple(folder.points()[number].overrides),
        )
        composed = _require_unchanged(composed, folder, number)
        if is_main:
            _wait_for(composed.folder)
        ready = prepare(composed)
        if isinstance(ready, Mapping):
            print_summary(ready, composed.folder, uri=composed.tracking_uri, fresh=False)
        elif ready is not None:
            print_summary(loop.fit(ready), ready.folder, uri=ready.composed.tracking_uri)
        code = 0
    except BaseException as error:
        code, message = describe(error)
        # A job of another sweep trains the run: this point can be tried again
        if busy := isinstance(error.__cause__, locks.LockHeld):
            code = INTERRUPTED
        if not isinstance(error, PeerFailed) or not error.is_told:
            if code == 1:
                traceback.print_exc()
            print(message, file=sys.stderr)
    finally:
        # With another pid, a later launcher has restarted the job
        if is_main and folder.word(number).get("pid") == os.getpid():
            # A finished run that this job refuses was trained on other data or another device
            refused = code == ConfigError.exit_code and _is_finished(folder, number)
            folder.note(
                number,
                ended=time.time(),
                exit_code=code,
                said=message or None,
                refused=refused or None,
                busy=busy or None,
            )
    return code


def _require_unchanged(composed: Composed, sweep: SweepFolder, number: int) -> Composed:
    """Return the config in the folder that the sweep expects for this run.

    Raises:
        ConfigError: The code, or a file in use, has changed since the sweep was made.
    """
    point = sweep.points()[number]
    composed = dataclasses.replace(composed, place=Path(point.folder))
    if composed.fingerprint != point.fingerprint:
        changed = sources.list_changes(sweep.sources) or [
            "weights or a checkpoint that its config names"
        ]
        raise ConfigError(
            Problem(
                point.label,
                f"what this point uses has changed since the sweep was made: {'; '.join(changed)}",
                hint="restore it, or run the sweep's command again: with changed code it is "
                "another sweep",
            )
        )
    return composed


def _is_finished(sweep: SweepFolder, number: int) -> bool:
    """Whether the point's run is finished."""
    with suppress(ConfigError, OSError):
        return (read_json(sweep.points()[number].run.summary, shapes.SUMMARY) or {}).get(
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
    """Wait until no process writes to the run."""
    # An earlier launcher's job may still be saving, or another point may be the same experiment
    deadline = time.monotonic() + _PATIENCE_S
    while locks.holder(run.lock) and time.monotonic() < deadline:
        time.sleep(0.2)


def _begin(folder: SweepFolder, number: int) -> None:
    """Record that the job has started, in place of an earlier attempt's end."""
    record, now = folder.word(number), time.time()
    facts: dict[str, Any] = dict.fromkeys(
        ("ended", "exit_code", "said", "reason", "refused", "busy")
    )
    facts |= {
        "tries": record.get("tries", 0) + 1,
        "first_began": record.get("first_began", record.get("began", now)),
    }
    # The first start and the time spent count over all attempts. Errors are reported later
    with suppress(ConfigError):
        facts["spent_s"] = folder.spent_s(folder.points()[number])
    folder.note(number, began=now, host=socket.gethostname(), pid=os.getpid(), **facts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
