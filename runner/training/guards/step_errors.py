"""Explains errors of a step: parts that do not fit together, and operators that torch refuses."""

from __future__ import annotations

import re
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from samewise.runner.config.tree import at
from samewise.runner.data import streams
from samewise.runner.data.dataset import failed_transform, sample_name
from samewise.runner.data.keyed import Failure, Key, training_keys
from samewise.runner.errors import (
    Problem,
    describe_exit,
    first_few,
    first_line,
    is_below_one,
    raised_at,
    summarise_error,
)
from samewise.runner.optim.gradients import sparse_gradient
from samewise.runner.records import trace_reader
from samewise.runner.records.digest import entries, tensors_in
from samewise.runner.records.folder import RunFolder

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.training.run import Run

OF_STEPS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NameError,
)
"""What a user's code, or a library that it calls, usually raises."""
_SHARE = re.compile(r"(drop|prob)[^.]*$|[._]p$")
"""The names of settings that are often 0, such as dropout."""
NO_CLOSURE = (
    "it evaluates the loss several times per step, by a closure, which samewise does not support"
)
NO_DETERMINISTIC = "does not have a deterministic implementation"


def refused_operator(error: BaseException) -> Problem | None:
    """The problem for an operator without a deterministic implementation, which torch refused.

    Otherwise None.
    """
    text = str(error)
    if NO_DETERMINISTIC not in text:
        return None
    operator = (
        text.split(NO_DETERMINISTIC)[0].strip().split()[-1]
        if text.split(NO_DETERMINISTIC)[0].strip()
        else "an operator"
    )
    reason, expected = (
        f"the operator {operator} has no deterministic implementation on this device",
        "operators that give the same bits every time",
    )
    hint = "use another operator or device, or give up reproducibility with reproducibility=fast"
    return Problem("reproducibility.level", reason, "strict", expected, hint)


def killed_worker(error: BaseException) -> Problem | None:
    """The problem for a loader worker that torch reports as dead; otherwise None."""
    found = re.match(
        r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: [\w "
        r"]+|exited unexpectedly)",
        str(error),
    )
    if not isinstance(error, RuntimeError) or not found:
        return None
    hint = "if memory ran out, use fewer workers; run the same command again to resume"
    return Problem(
        "loader.num_workers",
        f"worker process {found[1]} {found[2].strip()}: the kernel, or a user, ended it",
        hint=hint,
    )


def name_override(problem: Problem, composed: Composed | None) -> Problem:
    """A failure of a library's in the first step, as a problem of the zero or negative number that
    an override gives a component, if there is one.
    """
    for key in (
        [text.partition("=")[0].lstrip("+") for text in composed.overrides]
        if composed and re.search(r"\bfails\b", problem.message)
        else ()
    ):
        value = at(composed.whole, key) if composed else None
        if (
            re.match(r"(model|dataset|transforms|recipe)\.", key)
            and is_below_one(value)
            and not (value == 0 and _SHARE.search(key))
        ):
            return replace(
                problem,
                path=key,
                message=f"is {value}, which may be why {problem.message}",
                value=value,
                expected="a positive number",
            )
    return problem


def explain_step_error(
    error: Exception | SystemExit, composed: Composed | None = None, run: Run | None = None
) -> Problem:
    """The problem for an error of a step, caused by parts that are valid alone but do not fit
    together.
    """
    if isinstance(error, SystemExit):
        message, where = describe_exit("the first step", error)
        return Problem("recipe, model, dataset, transforms", message, hint=where)
    if problem := _unknown_label(error, run) or (sparse_gradient(run.model) if run else None):
        return problem
    reason = f"the first step fails: {type(error).__name__}: {first_line(error)}"
    if "does not require grad" in str(error) and any(
        frame.f_code.co_name == "measure_batch"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        words = (
            f"the first evaluation fails: {type(error).__name__}: {first_line(error)}: it "
            "computes without gradients, also where it calls `loss`"
        )
        hint = (
            "compute what needs them within `with torch.enable_grad():`; or give the recipe a "
            "`measure` of its own"
        )
        return Problem(
            "recipe", words, hint="; ".join(filter(None, (hint, raised_at(error, anywhere=False))))
        )
    if any(
        isinstance(frame.f_locals.get("self"), Optimizer)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        why = f": {NO_CLOSURE}" if "closure" in str(error) else ""
        return Problem(
            "optimizer",
            f"{reason}{why}",
            hint="choose other options, or another optimizer; `samewise list optimizer` shows them",
        )
    if re.search(
        r"'(DistributedDataParallel|CallCapture|Driver)' object has no attribute|mixed "
        r"torch.Tensor and DTensor",
        str(error),
    ):
        words = (
            f"{reason}: under this strategy a recipe must call the model as a whole, "
            "`model(...)`, not its parts"
        )
        hint = (
            "strategy=elastic, which has no such limit; or let the model's forward choose the "
            "part that computes"
        )
        return Problem(
            "recipe",
            words,
            expected="only calls of model(...)",
            hint=f"{hint}; {raised_at(error, anywhere=False)}".rstrip("; "),
        )
    if failed := failed_transform(error):
        words = f"{failed[1]} fails in the first step: {type(error).__name__}: {first_line(error)}"
        return name_override(
            Problem(
                failed[0], words, hint=raised_at(error, anywhere=False) or "--debug shows where"
            ),
            composed,
        )
    expected, hint = (
        "a model that accepts the transformed batch, and whose outputs the recipe accepts",
        _advice(error, composed.cfg.model if composed else {}),
    )
    return name_override(
        Problem("recipe, model, dataset, transforms", reason, expected=expected, hint=hint),
        composed,
    )


def explain_later_error(error: Exception | SystemExit, run: Run) -> Problem:
    """The problem for an error of a step after the first, or of an evaluation or a callback between
    two steps.
    """
    in_step = any(
        frame.f_code.co_name == "train_step" for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    if in_step and (problem := _unknown_label(error, run) or sparse_gradient(run.model)):
        return replace(problem, message=f"step {run.step + 1}: {problem.message}")
    at_step = f"step {run.step + 1}" if in_step else f"after step {run.step}"
    if isinstance(error, SystemExit):
        message, where = describe_exit("something", error)
        return Problem(at_step, message, hint=where)
    said = "" if (text := summarise_error(error)) == type(error).__name__ else f": {text}"
    advice = (
        "loader.drop_last=true, or another batch_size"
        if in_step and "more than 1 value per channel" in said and not run.plan.drop_last
        else ""
    )
    return Problem(
        at_step,
        f"{type(error).__name__}{said}",
        hint=advice
        or raised_at(error, anywhere=False)
        or "run again with --debug for the traceback",
    )


def _unknown_label(error: BaseException, run: Run | None) -> Problem | None:
    """The problem for a label that is too large, which torch's cross entropy refuses on the CPU.

    Otherwise None.
    """
    label = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error))
    if not isinstance(error, IndexError) or not label:
        return None
    number, sample = int(label[1]), _labelled(run, int(label[1])) if run else None
    message = (
        f"the data has the label {number}{f' ({sample})' if sample else ''}, but the model has "
        "no class for it"
    )
    if run and "num_classes" not in run.config.dataset:
        path, expected = "dataset", "labels from 0 to one less than the model's number of classes"
    else:
        path, expected = (
            "dataset.num_classes",
            f"at least {number + 1}" if number >= 0 else "labels from 0 to num_classes - 1",
        )
    return Problem(path, message, expected=expected, hint=raised_at(error, anywhere=False))


def _labelled(run: Run, label: int) -> str | None:
    """The first sample of the run's next step that has this label, and the entry.

    None if none is found.
    """
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
    """The entry of the run's next step's data that contains NaN or infinity, in samples or as batch
    transforms make it; empty if none is found.
    """
    found = dict[str, list[str]]()
    with suppress(Exception):  # what is not finite in the step is known anyway
        for sample, name, value in _entries_of_step(run):
            if _is_nonfinite(value):
                found.setdefault(name, []).append(sample)
        for name, value in () if found else _transformed_entries_of_step(run):
            if _is_nonfinite(value):
                return f"{name} after transforms.train.batch"
    return next((f"{name} of {first_few(samples, 3)}" for name, samples in found.items()), "")


def _is_nonfinite(value: Any) -> bool:
    return any(one.is_floating_point() and not one.isfinite().all() for one in tensors_in(value))


def _entries_of_step(run: Run) -> Generator[tuple[str, str, Any]]:
    """Of each sample of the run's next step, made again: its name, and each entry's name and value."""
    split = run.splits["train"]
    with streams.preserve_generators():
        for _, key in _keys_of_step(run):
            for offset, index in enumerate(key.indices):
                for name, value in entries(
                    split.keyed[Key(key.epoch, key.start + offset, (index,))]
                ).items():
                    yield sample_name(split.dataset, index), str(name), value


def _transformed_entries_of_step(run: Run) -> Generator[tuple[str, Any]]:
    """Of each micro-batch of the run's next step, made again as its first phase gets it: each
    entry's name and value.
    """
    with streams.preserve_generators():
        for number, key in _keys_of_step(run):
            if not isinstance(batch := run.splits["train"].keyed[key], Failure):
                streams.enter(run.seed, "step", run.step, number, 0)
                yield from entries(run.transforms["train"](run.to_device(batch))).items()


def _keys_of_step(run: Run) -> Iterator[tuple[int, Key]]:
    """The micro-batches of the run's next step: their numbers and keys."""
    for number in range(run.micro_batches):
        yield from (
            (number, key)
            for key in training_keys(
                run.order, run.plan, first_step=run.step, steps=run.step + 1, micro_batches=[number]
            )
        )


def _advice(error: Exception, model: Mapping[str, Any]) -> str:
    """What to do, as far as torch's message shows it; otherwise the user's line that failed."""
    said = str(error)
    if re.search(
        r"expected scalar type (Byte but found Float|Float but found Byte)|unsigned "
        r"char|not implemented for 'Byte'",
        said,
    ):
        return (
            "the model is given integers from 0 to 255: choose transforms that make them "
            "float, such as transforms=images"
        )
    if channels := re.search(r"to have (\d+) channels, but got (\d+) channels", said):
        needs, has = channels.groups()
        other = (
            f"model.in_channels={has}"
            if "in_channels" in model
            else f"choose a model for any number (model=resnet18_small), or images of {needs}"
        )
        return f"the model takes {needs} channels, and the data have {has}: {other}"
    if re.search(r"input to conv1d, but got input of size: \[(\d+, ){3}", said):
        return (
            "the model takes sequences, and is given images [batch, channels, height, width]: "
            "for recordings recipe.dimensions=1 gives it sequences"
        )
    return raised_at(error, anywhere=False) or "--debug shows where"


def rising_loss(folder: RunFolder) -> Problem | None:
    """A loss five times the first in the second half of a trial run's steps: a sign that a full
    training will diverge.
    """
    losses = [
        float.fromhex(line["loss"])
        for _, line in sorted(trace_reader.read_trace_of(folder)[1].items())
    ]
    if len(losses) < 4:
        return None
    first, last = losses[0], median(losses[len(losses) // 2 :])
    if first <= 0 or last <= 5 * first:
        return None
    message = f"the loss rose from {first:.3g} to {last:.3g} in {len(losses)} steps"
    return Problem(
        "train/loss",
        message,
        hint="a lower optimizer.lr, a warm-up (scheduler=warmup_cosine), or clip_norm=1",
    )
