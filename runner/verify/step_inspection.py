"""Examines one step: a digest of each value that it computes, in order, to name the first tensor
that differs from a record, and the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samewise.runner.data import streams
from samewise.runner.data.keyed import training_keys
from samewise.runner.errors import CheckpointError
from samewise.runner.interfaces import Batch, Loss, Phase, Recipe
from samewise.runner.records import checkpoint, trace, trace_reader
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.digest import entries, tensors_in, value_digest
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore, state_of
from samewise.runner.verify.audit import replay
from samewise.runner.verify.divergence import first_divergence

KINDS = {
    "batch": "the batch as it was loaded, {}",
    "input": "what the transforms made of the batch, {}",
    "before": "the weights before the step, {}",
    "reaches": "what reaches the module {}",
    "activation": "the activation of the module {}",
    "buffer": "the buffer {}",
    "loss": "the loss's {}",
    "gradient": "the gradient of {}",
    "averaged": "the gradient of {}, averaged and clipped",
    "option": "the optimizer's {}",
    "state": "the optimizer's {}",
    "weights": "the weights after the step, {}",
}
"""What a step computes, in the order of its first appearance."""


@dataclass(frozen=True)
class ComputedValue:
    """A value of a step: a tensor's digest, or an option. Its kind is a key of `KINDS`."""

    kind: str
    name: str
    value: int | str

    def __str__(self) -> str:
        return KINDS[self.kind].format(self.name)


class _Watched:
    """Wraps a recipe to record its inputs and losses."""

    def __init__(self, recipe: Recipe, note: Callable[[str, str, Any], None]) -> None:
        self._recipe = recipe
        self._note = note

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        for name, value in _entries(batch):
            self._note("input", name, value)
        found = self._recipe.loss(model, batch, phase)
        for name, value in (*found.parts.items(), ("total", found.total), ("count", found.count)):
            self._note("loss", name, value)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)


def _entries(batch: Any) -> Iterator[tuple[str, Any]]:
    """A batch's entries by name, or by place if it is a list or a tuple."""
    tensors: Any = (
        enumerate(batch)
        if isinstance(batch, list | tuple)
        else entries(batch).items() or [("its one entry", batch)]
    )  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    yield from ((str(name), value) for name, value in tensors)


def inspect_step(run: Run, state: Mapping[str, Any]) -> tuple[list[ComputedValue], dict[str, Any]]:
    """Take the step after `state`.

    Return all values in order, and its trace line, which has only the loss if the step is not
    traced.
    """
    restore(run, copy_to_cpu(state))  # an optimizer updates the given tensors in place
    values = list[ComputedValue]()

    def note(kind: str, name: str, value: Any) -> None:
        values.append(ComputedValue(kind, name, value_digest(value)))

    run.recorder.trace.open(run.step, run.recorder.trace.chain)
    with streams.preserve_generators(), _hooks(run, values, note):
        micro_batches = next(TrainingBatches(run))
        for micro in micro_batches:
            for name, value in _entries(micro.batch):
                note("batch", name, value)
        for name, value in run.model.state_dict().items():
            note("before", name, value)
        recipe: Any = _Watched(run.recipe, note)
        outcome = train_step(replace(run, recipe=recipe), micro_batches)
        loss = outcome.losses.get("loss", sum(outcome.losses.values()))
        run.recorder.trace.record(
            outcome.step, batch=outcome.batch, inputs=outcome.inputs, loss=loss
        )
    run.recorder.trace.close()
    return values, run.recorder.trace.last if run.recorder.trace.records(outcome.step) else {
        "step": outcome.step,
        "loss": loss.hex(),
    }


def replay_and_inspect(
    run: Run, state: Mapping[str, Any], step: int
) -> tuple[list[ComputedValue], dict[str, Any], Mapping[str, Any]]:
    """Train from `state` to `step` and inspect that step; also return the state before it."""
    replay(run, state, step - 1)
    before = copy_to_cpu(state_of(run))
    return *inspect_step(run, before), before


def first_difference(
    values: Sequence[ComputedValue], others: Sequence[ComputedValue]
) -> tuple[ComputedValue | None, ComputedValue | None] | None:
    """The first value in which two inspections differ, as each recorded it.

    None if there is none.
    """
    return next(((a, b) for a, b in itertools.zip_longest(values, others) if a != b), None)


def samples_of(run: Run, step: int) -> list[int]:
    """The data set's indices of a step's samples; steps count from 1."""
    keys = training_keys(
        run.order, run.plan, first_step=step - 1, steps=step, micro_batches=range(run.micro_batches)
    )
    return [index for key in keys for index in key.indices]


def unlike_sample(run: Run, step: int) -> str | None:
    """The first of a step's samples that differs when it is made twice, with the entry that
    differs; None if there is none.
    """
    keyed, threads = run.splits["train"].keyed, torch.get_num_threads()
    torch.set_num_threads(1)  # as it is loaded
    try:
        with streams.preserve_generators():
            keys = training_keys(
                run.order,
                run.plan,
                first_step=step - 1,
                steps=step,
                micro_batches=range(run.micro_batches),
            )
            return next(
                (sample for key in keys if isinstance(sample := keyed.find_unlike(key), str)), None
            )
    finally:
        torch.set_num_threads(threads)


def explain_difference(
    folder: RunFolder, step: int, there: Run, here: Run | None, *, same_code: bool = True
) -> tuple[list[str], ComputedValue | None]:
    """Explain, in words, why a recorded run's first differing step differs.

    And the first value that does, if known.

    `there` is built from the original config, `here` from the changed one, None if nothing was
    changed; both are new. `same_code`: whether config and code are those of the record, so that the
    same samples were loaded.
    """
    head, lines = trace_reader.read_trace_of(folder)
    logged = logged_values(folder.metrics)
    for run in (there, here):
        if run is not None:
            run.recorder.trace.algorithm = trace_reader.algorithm_of(folder.trace, head)
            run.splits[
                "train"
            ].keyed.must_repeat = False  # a sample that differs is what is looked for
    # A sparse trace shows only that it is one of several steps
    first = max((x for x in lines if x < step), default=0) + 1
    state, other_state = (
        _nearest(folder, first, there),
        None if here is None else copy_to_cpu(state_of(here)),
    )
    for at in range(first, step + 1):
        values, line, before = replay_and_inspect(there, state, at)
        recorded = lines.get(at) or (
            {"loss": logged[at, "train/loss"].hex()} if (at, "train/loss") in logged else {}
        )
        stage, _ = first_divergence(
            head,
            recorded,
            line,
            stages=[state for state in trace.STAGES if state in recorded and state in line],
        ) or ("", "")
        agrees = not stage
        if not agrees:
            again, _ = inspect_step(there, before)
            if difference := first_difference(values, again):
                message = (
                    f"this is not deterministic here: step {at}, taken twice from the same "
                    f"state, differs first in {_describe(difference)}"
                )
                value = difference[0] or difference[1]
                sample = unlike_sample(there, at) if value and value.kind == "batch" else None
                return [
                    message,
                    *(
                        [f"{sample} differs when the sample is made again from the same seeds"]
                        if sample
                        else []
                    ),
                ], value
        if here is not None and other_state is not None:
            other, _, _ = replay_and_inspect(here, other_state, at)
            difference = first_difference(values, other)
            if difference:
                message = f"examined closely, step {at} differs first in {_describe(difference)}"
                matches = "matches the record: the overrides cause the difference"
                differs = "does not match the record either: the overrides are not the only cause"
                return [
                    message,
                    f"trained without the overrides, step {at} {matches if agrees else differs}",
                ], difference[0] or difference[1]
            other_state = copy_to_cpu(state_of(here))
        if not agrees:
            return list(
                _compare_with_record(there, range(first, at + 1), stage, same_code=same_code)
            ), None
        state = copy_to_cpu(state_of(there))
    return [f"examined closely, step {step} shows no difference: it did not occur again"], None


def _nearest(folder: RunFolder, step: int, run: Run) -> Mapping[str, Any]:
    """The state of the last readable checkpoint before a step, or that of a new run."""
    for saved in reversed(checkpoint.list_checkpoints(folder.checkpoints)):
        if 0 < saved.step < step:
            try:
                return checkpoint.load(saved.path)
            except CheckpointError:
                continue
    return copy_to_cpu(state_of(run))


def _describe(difference: tuple[ComputedValue | None, ComputedValue | None]) -> str:
    one, other = difference
    if one and other and (one.kind, one.name) == (other.kind, other.name):
        return str(one) + (
            f": {one.value} there, {other.value} here" if one.kind == "option" else ""
        )
    what = (
        "what the model has"
        if any(value and value.kind == "before" for value in difference)
        else "the order of computation"
    )
    return f"{what}: there {one or 'nothing more'} comes next, here {other or 'nothing more'}"


def _compare_with_record(
    run: Run, steps: Sequence[int], stage: str, *, same_code: bool
) -> Iterator[str]:
    """What is known if the last of some steps, of which the others are not traced, differs from the
    record in this stage.
    """
    other_names = (
        "another machine, other data, other code, other initial weights, or a process in which "
        "a set had another order"
    )
    yield (
        f"step {steps[-1]} gives the same bits each time here, but not the recorded ones: "
        f"those come from {other_names}"
    )
    if same_code and (stage == "batch" or len(steps) > 1):
        samples, most = (
            [index for step in steps for index in samples_of(run, step)],
            16 * len(steps),
        )
        more = f" and {len(samples) - most} more" if len(samples) > most else ""
        loads, has = (
            ("it loads", "has")
            if len(steps) == 1
            else (f"steps {steps[0]} to {steps[-1]} load", "may have")
        )
        yield (
            f"{loads} the samples {', '.join(map(str, samples[:most]))}{more} of "
            f"dataset.train, one of which {has} changed"
        )


@contextmanager
def _hooks(
    run: Run, values: list[ComputedValue], note: Callable[[str, str, Any], None]
) -> Generator[None]:
    with ExitStack() as stack:
        # The modules of a compiled model are not called: hooks would be compiled into different
        # code
        whole = run.config.compile.mode != "off"
        for name, module in [("", run.network)] if whole else run.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # does not support hooks
                continue
            called = f"{name or 'model'} ({type(module).__name__})"
            stack.callback(
                module.register_forward_pre_hook(
                    partial(_reaches, note, called), with_kwargs=True
                ).remove
            )
            stack.callback(module.register_forward_hook(partial(_gives, note, name, called)).remove)
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                stack.callback(
                    parameter.register_post_accumulate_grad_hook(
                        partial(_gathers, note, name)
                    ).remove
                )
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        for phase in run.phases:
            called = f" in phase '{phase.spec.name}'" if len(run.phases) > 1 else ""
            stack.callback(
                phase.optimizer.register_step_pre_hook(
                    partial(_before_update, phase, names, called, values, note)
                ).remove
            )
            stack.callback(
                phase.optimizer.register_step_post_hook(
                    partial(_after_update, phase, names, note)
                ).remove
            )
        yield


def _reaches(
    note: Callable[..., None], called: str, module: nn.Module, inputs: Any, options: Any
) -> None:
    for tensor in tensors_in((inputs, options)):
        note("reaches", called, tensor)


def _gives(
    note: Callable[..., None], name: str, called: str, module: nn.Module, inputs: Any, output: Any
) -> None:
    for tensor in tensors_in(output):
        note("activation", called, tensor)
    for buffer, tensor in module.named_buffers(recurse=False):
        note("buffer", f"{name}.{buffer}".lstrip("."), tensor)


def _gathers(note: Callable[..., None], name: str, parameter: Tensor) -> None:
    note("gradient", name, parameter.grad)


def _parameters(phase: TrainingPhase, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    for group in phase.optimizer.param_groups:
        yield from ((names.get(id(parameter), "?"), parameter) for parameter in group["params"])


def _before_update(
    phase: TrainingPhase,
    names: Mapping[int, str],
    called: str,
    values: list[ComputedValue],
    note: Callable[..., None],
    *inputs: Any,
) -> None:
    for name, parameter in _parameters(phase, names):
        note("averaged", name, parameter.grad)
    for number, group in enumerate(phase.optimizer.param_groups):
        for option in dict.fromkeys(
            [*phase.optimizer.defaults, *sorted(group)]
        ):  # those that a config sets for the group come first in it
            if (
                option in group
                and option not in ("params", "param_names")
                and not option.startswith("initial_")
            ):
                values.append(
                    ComputedValue(
                        "option",
                        option + (f" of group {number}" if number else "") + called,
                        repr(group[option]),
                    )
                )
    _note_state(phase, names, note)


def _after_update(
    phase: TrainingPhase, names: Mapping[int, str], note: Callable[..., None], *inputs: Any
) -> None:
    for name, parameter in _parameters(phase, names):
        note("weights", name, parameter)
    _note_state(phase, names, note)


def _note_state(phase: TrainingPhase, names: Mapping[int, str], note: Callable[..., None]) -> None:
    for name, parameter in _parameters(phase, names):
        for part, value in phase.optimizer.state.get(parameter, {}).items():
            note("state", f"{part} of {name}", value)
