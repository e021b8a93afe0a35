"""Surrounds the loop: locks the folder, restores state, handles signals, records how it ended."""

import os
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from samewise.runner.data import streams
from samewise.runner.errors import Interrupted, Problem, TrainingError
from samewise.runner.processes.this_process import on_signals
from samewise.runner.records import checkpoint
from samewise.runner.records.files import write_json
from samewise.runner.training.continued import continue_from
from samewise.runner.training.evaluation import draw, validate
from samewise.runner.training.failures import explain
from samewise.runner.training.guards.catalogue import CODE, watch
from samewise.runner.training.opening import open_folder, surroundings
from samewise.runner.training.resuming import resume
from samewise.runner.training.run import Guard, Run
from samewise.runner.training.same_bits.determinism import memory_ran_short
from samewise.runner.training.state import summarise

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


@contextmanager
def session(run: Run) -> Generator[dict[str, Any]]:
    """Resume the run at its newest intact checkpoint, and end it cleanly.

    Only the main process writes.

    Yields:
        The run's summary, empty until training has ended.
    """
    status, summary = "FAILED", dict[str, Any]()
    run.guards.extend(guard(run) for guard in CODE)
    with (
        ExitStack() as resources,
        streams.preserve_generators(),
        _signals(run),
        _explaining_waits(run),
    ):
        resources.callback(_end_workers, run)
        _begin(run, resources)
        try:
            yield summary
            for warning in filter(None, (memory_ran_short(run.strategy.device), _overflows(run))):
                print(f"warning: {warning}", file=sys.stderr)
            run.recorder.require_folder()
            _leave_results(run)
            run.recorder.require_folder()
            status = "FINISHED"
        except Interrupted:
            status = "KILLED"
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                status = "KILLED"
            explained = explain(run, error)
            # First of all, since the other processes wait for this one
            run.strategy.abandon(explained)
            if run.strategy.peers.is_main:
                _leave_reason(run, explained, error)
            raise explained from error
        finally:
            _close(run, status)
            if status == "FINISHED":
                summary |= summarise(run)
                if run.strategy.peers.is_main:
                    write_json(run.folder.summary, summary)
                    # An earlier session may have written it
                    run.folder.failure.unlink(missing_ok=True)
            # Last, after every file is written: the sender copies the files that exist by now
            run.recorder.tracker.finish(status)
        summary["mlflow_run_id"] = run.recorder.tracker.run_id()
        run.strategy.end()


def _begin(run: Run, resources: ExitStack) -> None:
    """Watch a new run, open its folder, and restore the state from which it goes on."""
    peers, start = run.strategy.peers, dict[str, Any]()
    if peers.first(lambda: not checkpoint.list_checkpoints(run.folder.checkpoints)):
        # All ranks enter it, to gather weights; only rank 0 evaluates
        with run.strategy.evaluating(run.model):
            # Before the folder is made: a run that cannot be evaluated or resumed leaves none
            peers.first(partial(_rehearse, run))
        if run.config.resume_from:
            start = continue_from(run, run.config.resume_from)
    run.recorder.level = peers.first(
        partial(open_folder, run, resources, peers.gather(surroundings(run)))
    )
    resume(run, start)
    run.recorder.tracker.start()
    run.recorder.notify("on_start")


@contextmanager
def _explaining_waits(run: Run) -> Generator[None]:
    """Name the ranks that wait for each other, also before the first step."""
    try:
        yield
    except RuntimeError as error:
        raise run.strategy.peers.explain(error, step=run.step + 1) from error


def _rehearse(run: Run) -> None:
    try:
        watch(run, Guard.at_start)
        watch(run, Guard.before_evaluation)
    except (Exception, SystemExit) as error:
        raise explain(run, error) from error


def _leave_results(run: Run) -> None:
    """Add an evaluation's files, and the best checkpoint, to the artifacts."""
    run.checkpoints.wait()
    if not run.evaluate.pictures:
        return
    # Resumed after the last evaluation: its scores were not saved
    scores = run.recorder.scores or validate(run)
    if run.strategy.peers.is_main:
        for name, score in scores.items():
            draw(score, run.folder.artifacts / name, inside=run.folder.path)


def _close(run: Run, status: str) -> None:
    run.recorder.notify("on_end")
    if status != "FINISHED":
        try:
            run.checkpoints.wait()
        except TrainingError as error:
            # Only a warning, since the error that ended the run is being raised
            print(f"warning: {error}", file=sys.stderr)
    run.recorder.trace.close()
    run.progress.stop_clock()


def _end_workers(run: Run) -> None:
    """End the workers that load for evaluations."""
    # If the garbage collector ended them, torch would wait five seconds for each
    for split in run.splits.values():
        if split.loader is not None:
            split.loader.close()
        split.loader = None


def _overflows(run: Run) -> Problem | None:
    """Warn if float16's loss scale made the optimizer skip updates."""
    if not run.recorder.overflowed or not run.strategy.peers.is_main:
        return None
    return Problem(
        "precision",
        f"the optimizer skipped {run.recorder.overflowed} updates since this start, because "
        "their gradients were too large for float16",
        hint="a few are usual until the loss scale fits; for fewer, lower "
        "precision.initial_scale, or use precision=bf16",
    )


@contextmanager
def _signals(run: Run) -> Generator[None]:
    """Finish the step, save and stop on a signal of `SIGNALS`; stop at once on a second Ctrl-C.

    SIGHUP means that the terminal was closed, SIGUSR1 that a cluster will soon end the job.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        if run.strategy.peers.stop_heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and run.strategy.peers.is_main:
            # `os.write`, since the signal may have interrupted a `print`, which is not reentrant.
            # Ctrl-C also ends the reader of a pipe, to which writing then fails.
            with suppress(OSError):
                os.write(
                    2, b"\nStopping after this step and saving. Press Ctrl-C again to stop now.\n"
                )
        run.strategy.peers.ask_stop(signal.Signals(number).name)

    with on_signals(SIGNALS, ask):
        yield


def _leave_reason(run: Run, error: BaseException, raised: BaseException) -> None:
    """Write the reason why training ended to the folder, with the traceback of `raised`."""
    try:
        run.recorder.require_folder()
        write_json(
            run.folder.failure,
            {
                "step": run.step,
                "error": f"{type(error).__name__}: {error}",
                "traceback": "".join(traceback.format_exception(raised)),
            },
        )
    except (TrainingError, OSError) as failure:
        # A full disk or a deleted folder is often the reason itself
        if str(failure) != str(error):
            print(f"warning: {failure}", file=sys.stderr)
