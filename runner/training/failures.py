"""Explains the errors that end a training, above all those of its first step."""

import re
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from samewise.runner.config.compose import Composed
from samewise.runner.data import streams
from samewise.runner.data.dataset import failed_transform, sample_name
from samewise.runner.data.keyed import Failure, Key, training_keys
from samewise.runner.errors import (
    ConfigError,
    Problem,
    TrainingError,
    describe_exit,
    first_few,
    first_line,
    make_room,
    raised_at,
    summarise_error,
)
from samewise.runner.optim.gradients import sparse_gradient
from samewise.runner.records.digest import entries, tensors_in
from samewise.runner.training.memory import out_of_memory
from samewise.runner.training.run import Run

_USUAL = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NameError,
    SystemExit,
)
"""The errors that a user's code, or a library that it calls, usually raises."""
_NO_DETERMINISTIC = "does not have a deterministic implementation"
_NOT_WHOLE = (
    r"'(DistributedDataParallel|CallCapture|Driver)' object has no attribute|mixed "
    r"torch.Tensor and DTensor"
)
"""Matches errors of what a recipe gets in place of the model under ddp, pipeline and rpc; then
fsdp's."""


def explain(run: Run, error: BaseException) -> BaseException:
    """Turn a known error into a problem that a user can solve; return others unchanged."""
    # First, since torch also raises a RuntimeError in a rank that has lost another
    error = run.strategy.peers.explain(error, step=run.step + 1)
    if isinstance(error, RuntimeError) and (
        problem := refused_operator(error) or killed_worker(error)
    ):
        return TrainingError(problem)
    if isinstance(error, OSError):
        place = str(error.filename or run.folder.path)
        if room := make_room(error.errno, place):
            return TrainingError(
                Problem(
                    place,
                    "the disk is full",
                    hint=f"{room}, then run the same command again to resume",
                )
            )
    if too_much := out_of_memory(run, error):
        # In the first step the settings are at fault, which has another exit code
        return (TrainingError if run.step else ConfigError)(too_much)
    if not isinstance(error, _USUAL):
        return error
    if run.step == 0:
        return ConfigError(_explain_step_error(error, run.composed, run))
    return TrainingError(_explain_later_error(error, run))


def explain_trial(
    error: Exception | SystemExit, composed: Composed, run: Run | None
) -> ConfigError:
    """Explain an error of a trial step, of `check` or `profile`."""
    return ConfigError(
        refused_operator(error)
        or (out_of_memory(run, error) if run else None)
        or _explain_step_error(error, composed, run)
    )


def refused_operator(error: BaseException) -> Problem | None:
    """Explain torch's error for an operator without a deterministic implementation."""
    text = str(error)
    if _NO_DETERMINISTIC not in text:
        return None
    operator = (
        text.split(_NO_DETERMINISTIC)[0].strip().split()[-1]
        if text.split(_NO_DETERMINISTIC)[0].strip()
        else "an operator"
    )
    return Problem(
        "reproducibility.level",
        f"the operator {operator} has no deterministic implementation on this device",
        "strict",
        "operators that give the same bits every time",
        "use another operator or device, or give up reproducibility with reproducibility=fast",
    )


def killed_worker(error: BaseException) -> Problem | None:
    """Explain torch's error for a loader worker that has died."""
    match = re.match(
        # Two messages of torch: its signal handler's, and that of the loader which waits in vain
        r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: [\w "
        r"]+|exited unexpectedly)",
        str(error),
    )
    if not isinstance(error, RuntimeError) or not match:
        return None
    return Problem(
        "loader.num_workers",
        f"worker process {match[1]} {match[2].strip()}: the kernel, or a user, ended it",
        hint="if memory ran out, use fewer workers; run the same command again to resume",
    )


def _explain_step_error(error: BaseException, composed: Composed, run: Run | None) -> Problem:
    """Explain an error of the first step, in which parts meet that may not fit together."""
    parts = "recipe, model, dataset, transforms"
    if isinstance(error, SystemExit):
        message, where = describe_exit("the first step", error)
        return Problem(parts, message, hint=where)
    if problem := _unknown_label(error, run) or (sparse_gradient(run.model) if run else None):
        return problem
    text, place = f"{type(error).__name__}: {first_line(error)}", raised_at(error, anywhere=False)
    reason = f"the first step fails: {text}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "does not require grad" in text and "measure_batch" in _functions(error):
        reason = (
            f"the first evaluation fails: {text}: it computes without gradients, also where it "
            "calls `loss`"
        )
        hint = (
            "compute gradients within `with torch.enable_grad():`; or give the recipe a "
            f"`measure` of its own; {place}"
        )
        return Problem("recipe", reason, hint=hint.rstrip("; "))
    if any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames):
        if "closure" in str(error):
            reason += (
                ": it evaluates the loss several times per step, by a closure, which samewise "
                "does not support"
            )
        return Problem(
            "optimizer",
            reason,
            hint="choose other options, or another optimizer; `samewise list optimizer` shows them",
        )
    if re.search(_NOT_WHOLE, str(error)):
        reason += (
            ": under this strategy a recipe must call the model as a whole, `model(...)`, not its "
            "parts"
        )
        hint = (
            "strategy=elastic, which has no such limit; or let the model's forward choose the part "
            f"that computes; {place}"
        )
        return Problem(
            "recipe", reason, expected="only calls of model(...)", hint=hint.rstrip("; ")
        )
    if failed := failed_transform(error):
        return Problem(
            failed[0],
            f"{failed[1]} fails in the first step: {text}",
            hint=place or "--debug shows where",
        )
    return Problem(
        parts,
        reason,
        expected="a model that accepts the transformed batch, and whose outputs the recipe accepts",
        hint=_advice(error, composed.cfg.model),
    )


def _functions(error: BaseException) -> set[str]:
    """Return the names of the functions in an error's traceback."""
    return {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}


def _explain_later_error(error: BaseException, run: Run) -> Problem:
    """Explain an error of a later step, or of an evaluation or a callback between steps."""
    in_step = "train_step" in _functions(error)
    if in_step and (problem := _unknown_label(error, run) or sparse_gradient(run.model)):
        return replace(problem, message=f"step {run.step + 1}: {problem.message}")
    at_step = f"step {run.step + 1}" if in_step else f"after step {run.step}"
    if isinstance(error, SystemExit):
        message, where = describe_exit("something", error)
        return Problem(at_step, message, hint=where)
    detail = "" if (text := summarise_error(error)) == type(error).__name__ else f": {text}"
    advice = (
        "loader.drop_last=true, or another batch_size"
        if in_step and "more than 1 value per channel" in detail and not run.plan.drop_last
        else ""
    )
    return Problem(
        at_step,
        f"{type(error).__name__}{detail}",
        hint=advice
        or raised_at(error, anywhere=False)
        or "run again with --debug for the traceback",
    )


def _unknown_label(error: BaseException, run: Run | None) -> Problem | None:
    """Explain the error of torch's cross entropy on the CPU for a label that is too large."""
    label = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error))
    if not isinstance(error, IndexError) or not label:
        return None
    number, sample = int(label[1]), _labelled(run, int(label[1])) if run else None
    message = (
        f"the data has the label {number}{f' ({sample})' if sample else ''}, but the model has "
        "no class for it"
    )
    path, expected = (
        ("dataset", "labels from 0 to one less than the model's number of classes")
        if run and "num_classes" not in run.config.dataset
        else ("dataset.num_classes", f"at least {number + 1}")
        if number >= 0
        else ("dataset.num_classes", "labels from 0 to num_classes - 1")
    )
    return Problem(path, message, expected=expected, hint=raised_at(error, anywhere=False))


def _labelled(run: Run, label: int) -> str | None:
    """Describe the first sample of the run's next step that has a label, and its entry."""
    with suppress(Exception):  # the label is known anyway
        for sample, name, value in _entries_of_step(run):
            if (
                isinstance(value, torch.Tensor)
                and value.dtype is torch.int64
                and (value == label).any()
            ):
                return f"{sample}, {name}"
    return None


def nonfinite_data(run: Run) -> str:
    """Describe the entry of the next step's data that is not finite; empty if all are.

    Samples are searched first, then batches after their transforms.
    """
    samples_of = dict[str, list[str]]()
    with suppress(Exception):  # the step's own error is known without the data
        for sample, name, value in _entries_of_step(run):
            if _is_nonfinite(value):
                samples_of.setdefault(name, []).append(sample)
        for name, value in () if samples_of else _transformed_entries_of_step(run):
            if _is_nonfinite(value):
                return f"{name} after transforms.train.batch"
    return next((f"{name} of {first_few(samples, 3)}" for name, samples in samples_of.items()), "")


def _is_nonfinite(value: Any) -> bool:
    return any(x.is_floating_point() and not x.isfinite().all() for x in tensors_in(value))


def _entries_of_step(run: Run) -> Generator[tuple[str, str, Any]]:
    """Make the samples of the next step again; yield sample, entry and value."""
    split = run.splits["train"]
    with streams.preserve_generators():
        for _, key in _keys_of_step(run):
            for offset, index in enumerate(key.indices):
                for name, value in entries(
                    split.keyed[Key(key.epoch, key.start + offset, (index,))]
                ).items():
                    yield sample_name(split.dataset, index), str(name), value


def _transformed_entries_of_step(run: Run) -> Generator[tuple[str, Any]]:
    """Make the next step's transformed micro-batches again; yield entry and value."""
    with streams.preserve_generators():
        for number, key in _keys_of_step(run):
            if not isinstance(batch := run.splits["train"].keyed[key], Failure):
                streams.enter(run.seed, "step", run.step, number, 0)
                yield from entries(run.transforms["train"](run.to_device(batch))).items()


def _keys_of_step(run: Run) -> Iterator[tuple[int, Key]]:
    """Yield the numbers and keys of the next step's micro-batches."""
    for number in range(run.micro_batches):
        yield from (
            (number, key)
            for key in training_keys(
                run.order, run.plan, first_step=run.step, steps=run.step + 1, micro_batches=[number]
            )
        )


def _advice(error: BaseException, model: Mapping[str, Any]) -> str:
    """Return advice by torch's message, or else the user's line that failed."""
    text = str(error)
    if re.search(
        r"expected scalar type (Byte but found Float|Float but found Byte)|unsigned "
        r"char|not implemented for 'Byte'",
        text,
    ):
        return (
            "the model gets integers from 0 to 255: choose transforms that make them float, such "
            "as transforms=images"
        )
    if channels := re.search(r"to have (\d+) channels, but got (\d+) channels", text):
        needs, has = channels.groups()
        other = (
            f"model.in_channels={has}"
            if "in_channels" in model
            else f"choose a model for any number (model=resnet18_small), or images of {needs}"
        )
        return f"the model takes {needs} channels, and the data have {has}: {other}"
    if re.search(r"input to conv1d, but got input of size: \[(\d+, ){3}", text):
        return (
            "the model takes sequences, and gets images [batch, channels, height, width]: for "
            "recordings recipe.dimensions=1 gives it sequences"
        )
    return raised_at(error, anywhere=False) or "--debug shows where"
