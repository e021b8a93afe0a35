"""Around the loop: the folder's lock, the resumed state, signals, and the record of how the run
ended, in its summary and MLflow.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import FrameType
from typing import Any

from omegaconf import OmegaConf

from samewise.runner.config import compose
from samewise.runner.config.fingerprint import finds_data, fingerprint_of
from samewise.runner.config.tree import differing_keys
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, DataError, Interrupted, Problem, TrainingError
from samewise.runner.processes.this_process import on_signals
from samewise.runner.records import checkpoint, environment, kept_sources, shapes, sources, trust
from samewise.runner.records.files import read_json, read_mapping, write_atomically, write_json
from samewise.runner.records.roots import roots
from samewise.runner.secrets import redact
from samewise.runner.training.evaluation import draw, validate
from samewise.runner.training.guards.memory import out_of_memory
from samewise.runner.training.guards.model_checks import require_none_learned
from samewise.runner.training.guards.rehearsal import rehearse
from samewise.runner.training.guards.step_errors import (
    OF_STEPS,
    explain_later_error,
    explain_step_error,
    killed_worker,
    name_override,
    refused_operator,
)
from samewise.runner.training.resuming import continue_from, resume
from samewise.runner.training.run import Run
from samewise.runner.training.same_bits.determinism import memory_ran_short
from samewise.runner.training.state import summarise

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


@contextmanager
def session(run: Run) -> Generator[dict[str, Any]]:
    """Resume the run at its newest intact checkpoint, and end it cleanly.

    Only the main process writes.

    Yields the run's summary, empty until training has ended.
    """
    status, summary, begun = "FAILED", dict[str, Any](), dict[str, Any]()
    with ExitStack() as held, streams.preserve_generators(), _signals(run):
        held.callback(_end_workers, run)
        if run.strategy.peers.first(
            lambda: not checkpoint.list_checkpoints(run.folder.checkpoints)
        ):
            with run.strategy.evaluating(run.model):
                # Before there is a folder: a run that cannot be evaluated or resumed leaves none
                run.strategy.peers.first(partial(_rehearse, run))
            begun = continue_from(run, run.config.resume_from) if run.config.resume_from else {}
        run.recorder.level = run.strategy.peers.first(
            partial(_open_folder, run, held, run.strategy.peers.gather(_surroundings(run)))
        )
        resume(run, begun)
        run.recorder.tracker.start()
        for name, callback in run.callbacks.items():
            known = callback.models()
            callback.on_start(run.recorder.view)
            if (
                late := sorted(callback.models().keys() - known.keys())
            ) and run.strategy.peers.is_main:
                words = (
                    f"models() has {', '.join(late)} only after on_start: eval, export and "
                    "verify, which start no training, do without"
                )
                print(
                    f"warning: {Problem(f'callbacks.{name}', words, hint='make them in on_build')}",
                    file=sys.stderr,
                )
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
            explained = _explain(run, error)
            # Before anything slow: the other processes wait for this one
            run.strategy.abandon(explained)
            if run.strategy.peers.is_main:
                _leave_reason(run, explained, error)
            raise explained from error
        finally:
            _close(run, status)
            if status == "FINISHED":
                summary |= summarise(run)
                if run.strategy.peers.is_main:
                    summary |= roots(run.folder)
                    write_json(run.folder.summary, summary)
                    # Left by an earlier session, and no longer true
                    run.folder.failure.unlink(missing_ok=True)
            run.recorder.tracker.finish(status)  # last: the sender sends what it finds
        summary["mlflow_run_id"] = run.recorder.tracker.run_id()
        run.strategy.end()


def _rehearse(run: Run) -> None:
    try:
        require_none_learned(run)
        rehearse(run)
    except (Exception, SystemExit) as error:
        raise _explain(run, error) from error


def _open_folder(run: Run, held: ExitStack, surroundings: list[Mapping[str, Any]]) -> str:
    """Lock the folder, and write what is known at the start, including the run's level."""
    _require_its_code(run)
    run.folder.create()
    run.recorder.require_folder = held.enter_context(run.folder.hold_lock())
    _write_down(run, surroundings)
    return run.recorder.level


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
    for callback in run.callbacks.values():
        callback.on_end(run.recorder.view)
    if status != "FINISHED":
        try:
            run.checkpoints.wait()
        except TrainingError as error:
            print(f"warning: {error}", file=sys.stderr)
    run.recorder.trace.close()
    run.progress.stop_clock()


def _end_workers(run: Run) -> None:
    """End those that load for evaluations: if the garbage collector found them, torch would wait
    five seconds for each.
    """
    for split in run.splits.values():
        if split.loader is not None:
            split.loader.close()
        split.loader = None


def _overflows(run: Run) -> Problem | None:
    """A warning if float16's loss scale made the optimizer skip updates; otherwise None."""
    if not run.recorder.overflowed or not run.strategy.peers.is_main:
        return None
    message = (
        f"the optimizer skipped {run.recorder.overflowed} updates since this start, whose "
        "gradients were too large for float16"
    )
    return Problem(
        "precision",
        message,
        hint="a few are usual, until the loss scale fits; for fewer, a lower "
        "precision.initial_scale, or precision=bf16",
    )


@contextmanager
def _signals(run: Run) -> Generator[None]:
    """Handle SIGTERM, SIGUSR1, SIGHUP (the terminal is closed) and Ctrl-C: finish the step, save,
    stop. A second Ctrl-C stops at once.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        if run.strategy.peers.stop_heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and run.strategy.peers.is_main:
            with suppress(OSError):  # Ctrl-C also ends the reader of a pipe
                # It may have interrupted a print
                os.write(
                    2,
                    b"\nCtrl-C: it finishes its step or evaluation and saves; once more, and it stops at once\n",
                )
        run.strategy.peers.ask_stop(signal.Signals(number).name)

    with on_signals(SIGNALS, ask):
        yield


def _explain(run: Run, error: BaseException) -> BaseException:
    """A known error as a problem that a user can act on; other errors unchanged."""
    error = run.strategy.peers.explain(error, step=run.step + 1)
    if isinstance(error, RuntimeError) and (
        problem := refused_operator(error) or killed_worker(error)
    ):
        return TrainingError(problem)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hint = "free some space, then run the same command again to resume"
        return TrainingError(
            Problem(str(error.filename or run.folder.path), "the disk is full", hint=hint)
        )
    if too_much := out_of_memory(run, error):
        return (TrainingError if run.step else ConfigError)(too_much)
    if run.step == 0 and isinstance(error, DataError):
        return DataError(*[name_override(problem, run.composed) for problem in error.problems])
    if run.step == 0 and isinstance(error, (*OF_STEPS, SystemExit)):
        return ConfigError(explain_step_error(error, run.composed, run))
    return (
        TrainingError(explain_later_error(error, run))
        if isinstance(error, (*OF_STEPS, SystemExit))
        else error
    )


def _leave_reason(run: Run, error: BaseException, raised: BaseException) -> None:
    """Write the reason to the folder, with the traceback of what was raised.

    Errors are ignored, since the disk may be the cause.
    """
    try:
        run.recorder.require_folder()
        text = "".join(traceback.format_exception(raised))
        write_json(
            run.folder.failure,
            {"step": run.step, "error": f"{type(error).__name__}: {error}", "traceback": text},
        )
    except (TrainingError, OSError) as second:
        if str(second) != str(error):
            print(f"warning: {second}", file=sys.stderr)


def _write_down(run: Run, surroundings: list[Mapping[str, Any]]) -> None:
    """Write config and environment to the folder.

    Raise an error, or lower the level, if a process's environment gives other bits.

    ConfigError if `reproducibility.other_environment` is refuse and something differs that decides
    bits.
    """
    _require_alike(run, surroundings)
    _warn_of_missing(run)
    before = read_json(run.folder.environment, shapes.ENVIRONMENT)
    differing = environment.differences(before, run.environment) if before else []
    if (
        before
        and before.get("level") == "none"
        and checkpoint.list_checkpoints(run.folder.checkpoints)
    ):
        run.recorder.level = "none"  # found in an earlier session, whose steps this one continues
    if differing and checkpoint.list_checkpoints(run.folder.checkpoints):
        if run.config.reproducibility.other_environment == "refuse":
            if all(line.startswith("data.") for line in differing):
                raise ConfigError(_other_data(run))
            reason = (
                "this run began in another environment, so it may not go on to the same bits: "
                + "; ".join(differing)
            )
            hint = (
                "resume it in that environment; or add `--fresh` to train it again from the "
                "start; or, to go on here without the promise of the same bits"
            )
            hint += " (level none), add reproducibility.other_environment=record"
            raise ConfigError(Problem(str(run.folder.path), reason, hint=hint))
        run.recorder.level = "none"
    elif (
        before
        and not all(hasattr(part.dataset, "fingerprint") for part in run.splits.values())
        and (moved := _moved_data(run))
    ):
        words = (
            "the data set is as long as before, and nine of its samples are the same; the "
            "others were not compared"
        )
        print(
            f"warning: {'; '.join(moved)}: {words}, since it has no method fingerprint()",
            file=sys.stderr,
        )
    facts = {
        "fingerprint": run.fingerprint,
        "level": run.recorder.level,
        "name": run.composed.name,
        "reproducibility": run.config.reproducibility.level,
        "total_steps": run.total_steps,
    }
    write_json(run.folder.environment, {**run.environment, **facts})
    saved = compose.dump(run.composed)
    if redact(saved) != saved:  # needed unchanged to resume
        run.folder.path.chmod(0o700)
    write_atomically(run.folder.config, saved)
    trust.sign(run.folder.config)
    _write_code(run)


def _warn_of_missing(run: Run) -> None:
    """Warn of records of the run's beginning that a run with checkpoints lacks, before they are
    written anew.
    """
    records = [
        run.folder.environment,
        run.folder.config,
        *([run.folder.sources] if run.composed.code.files else []),
    ]
    for path in records if checkpoint.list_checkpoints(run.folder.checkpoints) else ():
        if not path.exists():
            unknown = (
                "; whether the run began in the same environment, and so has the same "
                "bits, cannot be known" * (path == run.folder.environment)
            )
            print(
                f"warning: {path}: is missing, and is written anew as it is now{unknown}",
                file=sys.stderr,
            )


def _other_data(run: Run) -> Problem:
    """The problem that the run in the folder was trained on other data."""
    paths = _moved_data(run)
    is_finished = read_mapping(run.folder.summary, shapes.SUMMARY).get("status") == "finished"
    how = "is finished, and was trained" if is_finished else "is unfinished, and was started"
    words = (
        f"this run {how} on other data: "
        f"{'; '.join(paths) or 'the files in its data folder have changed since'}"
    )
    hint = (
        "name=NAME starts a separate run"
        if is_finished
        else "resume it with its own data; name=NAME starts a separate run"
    )
    return Problem(str(run.folder.path), words, hint=hint)


def _moved_data(run: Run) -> list[str]:
    """Which of the data's places differ from the folder's config, in words.

    None without a config.
    """
    if not run.folder.config.exists():
        return []
    before, now = compose.load(run.folder.config).cfg, run.composed.cfg
    keys = [key for key in differing_keys(before, now) if finds_data(key)]
    return [
        f"{key} was {OmegaConf.select(before, key)} and is {OmegaConf.select(now, key)}"
        for key in keys
    ]


def _require_its_code(run: Run) -> None:
    """Raise an error if the user's code was edited since training was requested: the imported code
    may not match the run's name.
    """
    edited = sources.describe_changes(run.composed.code.files, replace(run.composed).code.files)
    if edited:
        raise ConfigError(
            Problem(
                str(run.folder.path),
                f"the code was edited while the run was starting: {'; '.join(edited)}",
                hint="run the command again",
            )
        )


def _write_code(run: Run) -> None:
    """Keep the user's code, and write its digests to the folder."""
    code = run.composed.code
    sources.note_imported(code)
    for name in sources.hidden_imports(code, run.composed.project.packages) if code.files else ():
        print(
            f"warning: {name} was imported by a name that only appears when the code runs; "
            "later runs will not notice changes in it",
            file=sys.stderr,
        )
    if code.files:
        kept_sources.write_record(
            run.folder.sources, fingerprint_of(run.composed.whole), code.files
        )


def _surroundings(run: Run) -> dict[str, Any]:
    """What must be alike in all processes of the run: see `_require_alike`."""
    return {
        "environment": run.environment,
        "tensors": [f"{name} {list(one.shape)}" for name, one in run.model.state_dict().items()],
    }


def _require_alike(run: Run, surroundings: list[Mapping[str, Any]]) -> None:
    """Raise an error, or lower the level, if the run's processes compute differently.

    An error if their models differ: they exchange tensors by number.
    """
    for rank, other in enumerate(surroundings):
        for mine, theirs in zip_longest(
            surroundings[0]["tensors"], other["tensors"], fillvalue="nothing"
        ):
            if mine != theirs:
                hint = (
                    "let the code that creates the model depend on its arguments alone: not on "
                    "the order of a set or of a folder's files, nor on the rank"
                )
                raise ConfigError(
                    Problem(
                        "model",
                        f"rank {rank} has {theirs} in the place of rank 0's {mine}",
                        hint=hint,
                    )
                )
        differing = environment.differences(run.environment, other["environment"])
        differing = [
            line.replace(" was ", " is ", 1).replace(" and is ", " for rank 0 and ", 1)
            for line in differing
        ]
        if differing and run.config.reproducibility.other_environment == "refuse":
            hint = (
                "use machines of one kind, or accept different bits with "
                "reproducibility.other_environment=record"
            )
            raise ConfigError(
                Problem(
                    f"rank {rank}",
                    "runs in another environment than rank 0, so the run may not repeat: "
                    + "; ".join(differing),
                    hint=hint,
                )
            )
        if differing:
            run.recorder.level = "none"
