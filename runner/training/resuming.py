"""Resumes a training at its newest sound checkpoint."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samewise.runner.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    Problem,
)
from samewise.runner.records import checkpoint, trace_reader
from samewise.runner.records.files import read_json, set_aside
from samewise.runner.tracking.tracker import Silent, open_tracker
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore


def resume(run: Run, start: dict[str, Any]) -> None:
    """Restore the newest intact checkpoint, and open the trace and the tracker at its step.

    Without one, training starts from the beginning, or from another run's checkpoint, of which
    `start` has the state of the trace.
    """
    newest, state, problems, untraced = run.strategy.peers.first(partial(_newest, run))
    if newest:
        ConfigError.raise_if(
            state["fingerprint"] != run.fingerprint,
            str(newest.path),
            "belongs to another experiment",
            state["fingerprint"][:12],
            run.fingerprint[:12],
        )
        restore(run, checkpoint.load_sharded(state, newest.path, run.strategy.layout.empty))
    initial = None if newest else run.recorder.trace.digest_initial()
    run.recorder.tracker = Silent()
    if not run.strategy.peers.is_main:
        return
    for caution in run.recorder.cautions:
        print(f"warning: {caution}", file=sys.stderr)
    _set_aside(run, newest, problems, untraced)
    if not (state or start) and run.folder.trace.exists():
        _warn(
            run.folder.path,
            "the run was started before and has no checkpoint; it starts again from step 0",
        )
    run.recorder.trace.open(run.step, (state or start).get("trace", 0), initial)
    run.recorder.tracker = open_tracker(
        run.folder, run.config.tracking, resume_step=run.step or None
    )
    last = max(run.recorder.tracker.last_step(), first_step(run))
    every = run.recorder.log_every_steps
    if newest and last // every < run.step // every:
        _warn(
            run.folder.metrics,
            f"steps {last + 1} to {run.step} are missing, since it was deleted or cut short; they "
            "cannot be restored, but the tracking store may have them",
        )


def _set_aside(
    run: Run,
    newest: checkpoint.CheckpointFolder | None,
    problems: Sequence[Problem],
    untraced: Sequence[Path],
) -> None:
    """Set aside damaged checkpoints and a trace that does not lead to `newest`, with warnings."""
    trace = run.folder.trace
    anew = f"a new trace begins after step {run.step}; earlier steps cannot be compared"
    if newest and run.config.trace.every_steps and not trace.exists():
        _warn(trace, f"is missing; {anew}")
    for problem in problems:
        print(f"warning: {problem}\n    using the one before it", file=sys.stderr)
    # Training writes checkpoints of these steps again
    for path in run.checkpoints.set_aside_after(run.step, sound=untraced):
        kind = "damaged checkpoint" if path.name.startswith("damaged") else "checkpoint"
        _warn(path, f"the {kind} was moved here")
    if newest and newest.path in untraced:
        moved = set_aside(trace, "damaged").name
        _warn(
            trace, f"was cut short or altered, and leads to no checkpoint; moved to {moved}; {anew}"
        )


def _warn(place: Path, message: str) -> None:
    print(f"warning: {place}: {message}", file=sys.stderr)


def first_step(run: Run) -> int:
    """Return the step at which the run began: that of `resume_from`'s checkpoint, or 0."""
    first = (
        read_json(Path(run.config.resume_from, "manifest.json"), {"step?": int})
        if run.config.resume_from
        else None
    )
    return (first or {}).get("step", 0)


def _newest(
    run: Run,
) -> tuple[checkpoint.CheckpointFolder | None, dict[str, Any], list[Problem], list[Path]]:
    """Return the newest sound checkpoint to which the trace leads, else the newest sound one.

    Also returns its state, problems, and the newer checkpoints to which the trace does not lead.
    """
    folder, file, untraced = run.folder.checkpoints, run.folder.trace, list[Path]()
    every = run.config.trace.every_steps
    if not every or not file.exists():
        return *checkpoint.newest_sound(folder, reader=checkpoint.read), untraced
    lines = trace_reader.lines_before(
        file, [saved.step for saved in checkpoint.list_checkpoints(folder)]
    )

    def read_traced(path: Path) -> dict[str, Any]:
        state, step = checkpoint.read(path), int(path.name.removeprefix("step-"))
        if not trace_reader.leads_to(lines[step], step, state.get("trace", 0)) and (
            lines[step] or step // every > first_step(run) // every
        ):
            untraced.append(path)
            last = lines[step].get("step", step + 1)
            message = (
                f"the last line up to there is of step {last}"
                if last <= step
                else "no line up to there is left"
            )
            raise DamagedCheckpoint(
                Problem(
                    str(file),
                    f"was cut short or altered, and does not lead to {path.name}: {message}",
                )
            )
        return state

    try:
        return *checkpoint.newest_sound(folder, reader=read_traced), untraced
    except CheckpointError:
        return *checkpoint.newest_sound(folder, reader=checkpoint.read), untraced
