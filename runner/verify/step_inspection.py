"""Inspects a step: digests each value that it computes, to name the first that differs."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
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
from samewise.runner.training.evaluation import evaluate
from samewise.runner.training.loop import train_step
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run, evaluation_due
from samewise.runner.training.state import restore, state_of
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
"""The kinds of values of a step, in order of appearance, with their descriptions."""


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
        result = self._recipe.loss(model, batch, phase)
        for name, value in (
            *result.parts.items(),
            ("total", result.total),
            ("count", result.count),
        ):
            self._note("loss", name, value)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)


def _entries(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield a batch's entries by name, or by index if it is a list or a tuple."""
    tensors: Any = (
        enumerate(batch)
        if isinstance(batch, list | tuple)
        else entries(batch).items() or [("its one entry", batch)]
    )  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    yield from ((str(name), value) for name, value in tensors)


def inspect_step(run: Run, state: Mapping[str, Any]) -> tuple[list[ComputedValue], dict[str, Any]]:
    """Take the step after `state`.

    Returns:
        All values in order; and the step's line of the trace, which is only the loss if the step is
        not traced.
    """
    # A copy, since an optimizer updates these tensors in place
    restore(run, copy_to_cpu(state))
    values = list[ComputedValue]()

    def note(kind: str, name: str, value: Any) -> None:
        values.append(ComputedValue(kind, name, value_digest(value)))

    run.recorder.trace.open(run.step, run.recorder.trace.chain)
    with streams.preserve_generators(), _hooks(run, values, note):
        micro_batches = next(TrainingBatches(run))
        # Before the step, since a recipe may change its batch in place
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


def first_difference(
    values: Sequence[ComputedValue], other_values: Sequence[ComputedValue]
) -> tuple[ComputedValue | None, ComputedValue | None] | None:
    """Return the first value in which two inspections differ, as each recorded it, or None."""
    return next(((a, b) for a, b in itertools.zip_longest(values, other_values) if a != b), None)


def samples_of(run: Run, step: int) -> list[int]:
    """Return the data set's indices of a step's samples; steps count from 1."""
    keys = training_keys(
        run.order, run.plan, first_step=step - 1, steps=step, micro_batches=range(run.micro_batches)
    )
    return [index for key in keys for index in key.indices]


def unlike_sample(run: Run, step: int) -> str | None:
    """Describe the first sample of a step that differs when it is made twice, or return None."""
    keyed, threads = run.splits["train"].keyed, torch.get_num_threads()
    # Samples are loaded with one thread
    torch.set_num_threads(1)
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
    """Explain why the first differing step of a recorded run differs.

    Args:
        folder: The recorded run's folder.
        step: The step.
        there: A new run of the original config.
        here: A new run of the changed config; None if nothing was changed.
        same_code: Whether config and code are those of the record, so that it loaded the same
            samples.

    Returns:
        Sentences, and the first value that differs, if known.
    """
    head, traced = trace_reader.read_trace_of(folder, trace_reader.Steps())
    # The step's line, if it has one, and the last before it
    lines = {
        line["step"]: line for line in deque((x for x in traced if x["step"] <= step), maxlen=2)
    }
    logged = logged_values(folder.metrics)
    for run in (there, here):
        if run is not None:
            run.recorder.trace.algorithm = trace_reader.algorithm_of(folder.trace, head)
            # A sample that does not repeat is a finding here, not an error
            run.splits["train"].keyed.must_repeat = False
    # In a sparse trace, the step that differs may be any since the last traced one
    first = max((x for x in lines if x < step), default=0) + 1
    state = state_at(first - 1, there, _nearest(folder, first, there))
    other_state = None if here is None else state_at(first - 1, here, state_of(here))
    for at in range(first, step + 1):
        values, line = inspect_step(there, state)
        recorded = lines.get(at) or (
            {"loss": logged[at, "train/loss"].hex()} if (at, "train/loss") in logged else {}
        )
        stage, _ = first_divergence(
            head,
            recorded,
            line,
            stages=[x for x in trace.STAGES if x in recorded and x in line],
        ) or ("", "")
        agrees = not stage
        if not agrees:
            # From the same state, so that neither the record nor the overrides can be the reason
            again, _ = inspect_step(there, state)
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
            other, _ = inspect_step(here, other_state)
            if difference := first_difference(values, other):
                message = f"examined closely, step {at} differs first in {_describe(difference)}"
                matches = "matches the record: the overrides cause the difference"
                differs = "does not match the record either: the overrides are not the only cause"
                return [
                    message,
                    f"trained without the overrides, step {at} {matches if agrees else differs}",
                ], difference[0] or difference[1]
            # Copied, since the next step changes these tensors in place
            other_state = copy_to_cpu(state_of(here))
        if not agrees:
            return list(
                _compare_with_record(there, range(first, at + 1), stage, same_code=same_code)
            ), None
        state = copy_to_cpu(state_of(there))
    return [f"examined closely, step {step} shows no difference: it did not occur again"], None


def state_at(step: int, run: Run, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Train a run from a state to a step, without checkpoints, and return the state there.

    It includes the evaluation due at the step. The run is in one process, and its folder exists.
    """
    restore(run, copy_to_cpu(state))
    run.recorder.trace.open(run.step, state.get("trace", 0))
    try:
        with streams.preserve_generators(), closing(TrainingBatches(run)) as batches:
            while True:
                if evaluation_due(run):
                    evaluate(run)
                if run.step >= step:
                    break
                run.recorder.record(train_step(run, next(batches)))
    finally:
        run.recorder.trace.close()
    return copy_to_cpu(state_of(run))


def _nearest(folder: RunFolder, step: int, run: Run) -> Mapping[str, Any]:
    """Return the state of the last readable checkpoint before a step, or that of a new run."""
    for saved in reversed(checkpoint.list_checkpoints(folder.checkpoints)):
        if 0 < saved.step < step:
            with suppress(CheckpointError):
                return checkpoint.load(saved.path)
    return copy_to_cpu(state_of(run))


def _describe(difference: tuple[ComputedValue | None, ComputedValue | None]) -> str:
    there, here = difference
    if there and here and (there.kind, there.name) == (here.kind, here.name):
        return str(there) + (
            f": {there.value} there, {here.value} here" if there.kind == "option" else ""
        )
    what = (
        "what the model has"
        if any(value and value.kind == "before" for value in difference)
        else "the order of computation"
    )
    return f"{what}: there {there or 'nothing more'} comes next, here {here or 'nothing more'}"


def _compare_with_record(
    run: Run, steps: Sequence[int], stage: str, *, same_code: bool
) -> Iterator[str]:
    """Describe possible causes if steps repeat here, but differ from the record.

    Args:
        run: The run.
        steps: The steps, of which only the last is traced.
        stage: The stage in which that one differs.
        same_code: Whether the record loaded the same samples.
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
        # A compiled model does not call its modules, and hooks on them would change its code
        whole = run.config.compile.mode != "off"
        for name, module in [("", run.network)] if whole else run.model.named_modules():
            # TorchScript does not support these hooks
            if isinstance(module, torch.jit.ScriptModule):
                continue
            called = f"{name or 'model'} ({type(module).__name__})"
            stack.callback(
                module.register_forward_pre_hook(
                    partial(_reaches, note, called), with_kwargs=True
                ).remove
            )
            stack.callback(module.register_forward_hook(partial(_gives, note, name, called)).remove)
        for name, parameter in run.model.named_parameters():
            # Torch allows these hooks on leaves only
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
        # In the order of the defaults, since a config's options come first in a group
        for option in dict.fromkeys([*phase.optimizer.defaults, *sorted(group)]):
            if (
                option in group
                and option not in ("params", "param_names")
                # Under such names, schedules keep the options' first values
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
