"""Finds state that decides losses but is in no checkpoint.

An example is a running mean in a plain attribute of a model: a resumed run would start it again.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samewise.runner.config.fingerprint import targets
from samewise.runner.data import streams
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.optim.schedules.base import Schedule
from samewise.runner.records.digest import value_digest
from samewise.runner.strategies.tree import unchanged_buffers
from samewise.runner.training.components import LIBRARIES
from samewise.runner.training.evaluation import evaluating
from samewise.runner.training.losses import losses_of
from samewise.runner.training.run import Caution, Guard, Run

_NOT_SAVED = "and no checkpoint holds it: a resumed run would continue with other values"
_HINT = "keep it in a persistent buffer of the model"


@final
class SameLosses(Guard):
    """Computes a micro-batch's losses twice from the same state, before the first step.

    Losses of other bits are a finding. They are computed in training and in evaluation mode. The
    model stays as it is.
    """

    _is_first = True

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        if self._is_first and micro_batches and may_look(run):
            problem = try_out(run, micro_batches[0], _find)
            yield from [Caution(problem, "none")] if problem else []
        self._is_first = False


def may_look(run: Run) -> bool:
    """Whether there is code of the user's to check, and the whole model is in this process."""
    own = [name for name in targets(run.composed.whole) if name.partition(".")[0] not in LIBRARIES]
    return bool(own) and run.strategy.compiles and run.config.reproducibility.level != "fast"


def try_out(run: Run, micro: MicroBatch, look: Callable[[Run, MicroBatch], Any]) -> Any:
    """Return what `look` finds, None if it fails, and leave the model as it is."""
    modes = [(module, module.training) for module in run.model.modules()]
    try:
        with (
            suppress(Exception, SystemExit),
            unchanged_buffers(run.model),
            streams.preserve_generators(),
        ):
            return look(run, micro)
    finally:
        for module, training in modes:
            module.training = training
    return None


def copy_of_state(run: Run) -> dict[str, Any]:
    """Return a copy of the model's `state_dict`."""
    return {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value)
        for name, value in run.model.state_dict().items()
    }


def _find(run: Run, micro: MicroBatch) -> Problem | None:
    state = copy_of_state(run)
    mode, first = run.model.training, _losses(run, micro, state)
    if run.model.training is not mode:
        message = (
            "leaves the model in evaluation mode: dropout and batch norm do nothing in what "
            "follows, except in the first step of a resumed run"
        )
        hint = "call model.train() again, or switch only a part of the model"
        return Problem(f"recipe ({type(run.recipe).__name__}.loss)", message, hint=hint)
    second = _losses(run, micro, state)
    if all(map(same_values, first, second)):
        return None
    parts, changed = "model, recipe, transforms", list[str]()
    # With several processes a loss may exchange values, for which all would have to compute it
    if run.strategy.peers.size == 1:
        before = _attributes(run)
        _losses(run, micro, state)
        changed = _changed(before, _attributes(run))
    loss, other_loss = next(
        (float(loss), float(other_loss))
        for loss, other_loss in zip(first, second, strict=False)
        if not same_values(loss, other_loss)
    )
    message = (
        f"the same batch, from the same state, gives a loss of {loss:.6g} and then of "
        f"{other_loss:.6g}: something changes as the model is used, {_NOT_SAVED}"
    )
    return Problem(f"{parts} ({first_few(changed, 3)})" if changed else parts, message, hint=_HINT)


def _losses(run: Run, micro: MicroBatch, state: Mapping[str, Any]) -> list[Tensor]:
    """Return each phase's losses, in training and in evaluation mode, and restore the state."""
    try:
        losses = [*losses_of(run, micro)]
        run.model.load_state_dict(state)
        # Some models compute no loss in evaluation mode
        with evaluating(run.model), suppress(Exception):
            losses += losses_of(run, micro)
    finally:
        run.model.load_state_dict(state)
    return losses


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to itself."""
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def is_own(part: object) -> bool:
    """Whether a part's class is the user's, and not of one of the `LIBRARIES`."""
    return type(part).__module__.partition(".")[0] not in LIBRARIES


class _Pickler(pickle.Pickler):
    """Pickles tensors as digests, since their pickles contain addresses; omits some objects."""

    def __init__(self, file: io.BytesIO, without: Collection[int]) -> None:
        super().__init__(file)
        self._without = without

    def persistent_id(self, obj: Any) -> Any:
        # A constant in place of what checkpoints hold, whose change is no finding
        if id(obj) in self._without:
            return "elsewhere"
        return value_digest(obj) if isinstance(obj, Tensor) else None


def attributes_of(part: object, without: Collection[int] = ()) -> dict[str, bytes]:
    """Pickle the attributes of a part of the user's, by `Class.name`, as far as possible.

    Args:
        part: The part; others give nothing.
        without: The ids of objects to omit.
    """
    attributes, prefix = dict[str, bytes](), type(part).__name__
    for name, value in vars(part).items() if is_own(part) else ():
        with suppress(Exception):
            file = io.BytesIO()
            _Pickler(file, without).dump(value)
            attributes[f"{prefix}.{name}"] = file.getvalue()
    return attributes


def _attributes(run: Run) -> dict[str, bytes]:
    """Return the attributes of recipe and modules, and buffers that are not persistent."""
    attributes = attributes_of(run.recipe)
    for module in run.model.modules():
        of_module = attributes_of(module)
        own = {f"{type(module).__name__}.{name}" for name in vars(nn.Module())}
        loose = {name: module._buffers[name] for name in module._non_persistent_buffers_set}  # pyright: ignore[reportPrivateUsage]
        attributes |= {name: value for name, value in of_module.items() if name not in own}
        attributes |= {
            f"{type(module).__name__}.{name}": pickle.dumps(value) for name, value in loose.items()
        }
    return attributes


@final
class RecipeState(Guard):
    """Finds attributes of the user's recipe that a step or an evaluation changes."""

    _before: Mapping[str, bytes] = MappingProxyType({})

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        self._before = attributes_of(run.recipe)
        return ()

    def before_evaluation(self, run: Run) -> Iterable[Caution]:
        message = f"changes as the recipe is used, {_NOT_SAVED}"
        for name in _changed(self._before, attributes_of(run.recipe)):
            yield Caution(Problem(f"recipe ({name})", message, hint=_HINT), "none")


@final
class OptimizerState(Guard):
    """Finds attributes of the user's optimizers that the second step changes and none saves.

    Many optimizers create their state in the first step.
    """

    _steps = 0
    _before: Mapping[str, bytes] = MappingProxyType({})

    def after_step(self, run: Run) -> Iterable[Caution]:
        self._steps += 1
        if self._steps == 1:
            self._before = _state_of_optimizers(run)
        if self._steps != 2 or not self._before:
            return
        if changed := _changed(self._before, _state_of_optimizers(run)):
            hint = (
                "keep it in `self.state[parameter]` or in `self.param_groups`, which are saved; or "
                "in a local variable, if the next step does not need it"
            )
            path, message = (
                f"optimizer ({first_few(changed, 3)})",
                f"changes in a step, {_NOT_SAVED}",
            )
            yield Caution(Problem(path, message, hint=hint), "none")


def _changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    return [name for name, value in after.items() if before.get(name, value) != value]


def _state_of_optimizers(run: Run) -> dict[str, bytes]:
    """Return the attributes of the user's optimizers that are not in their `state_dict`.

    Optimizers with a `state_dict` of their own are left out.
    """
    attributes, torch_names = (
        dict[str, bytes](),
        {
            *vars(Optimizer([torch.zeros(())], {})),
            # Attributes that torch's schedulers and loss scales add to an optimizer
            "step",
            "grad_scale",
            "found_inf",
            "_opt_called",
            "_step_count",
        },
    )
    for phase in run.phases:
        # ZeroRedundancyOptimizer has the user's optimizer inside
        optimizer: Any = (
            getattr(phase.optimizer, "optim", phase.optimizer)
            if not is_own(phase.optimizer)
            else phase.optimizer
        )
        if (
            not is_own(optimizer)
            or type(optimizer).state_dict is not Optimizer.state_dict
            or run.config.reproducibility.level == "fast"
        ):
            continue
        groups = [[group, group["params"]] for group in optimizer.param_groups]
        states = [[state, *state.values()] for state in optimizer.state.values()]
        saved = [
            *run.model.parameters(),
            *run.model.buffers(),
            optimizer,
            optimizer.state,
            optimizer.param_groups,
            *itertools.chain(*groups, *states),
        ]
        own = {f"{type(optimizer).__name__}.{name}" for name in torch_names}
        attributes |= {
            name: value
            for name, value in attributes_of(optimizer, {id(part) for part in saved}).items()
            if name not in own
        }
    return attributes


@final
class ScheduleState(Guard):
    """Finds the user's schedules that keep state, or get metrics, without saving them."""

    _is_first = True

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        parts = [run.schedule]
        for schedule in parts if self._is_first else ():
            # The list grows by the parts of parts
            parts += [part for part, _ in schedule.parts().values()]
            if message := _state_of_schedule(run, schedule):
                hint = (
                    "compute the options from `step` alone, or save the state in `state_dict`, and "
                    "restore it in `load_state_dict`"
                )
                path = f"scheduler ({type(schedule).__name__})"
                yield Caution(Problem(path, f"{message}, {_NOT_SAVED}", hint=hint), "none")
        self._is_first = False


def _state_of_schedule(run: Run, schedule: Schedule) -> str:
    """Say what a schedule of the user's does not save; empty if nothing was found."""
    if (
        not is_own(schedule)
        or type(schedule).state_dict is not Schedule.state_dict
        or run.config.reproducibility.level == "fast"
    ):
        return ""
    if type(schedule).after_evaluation is not Schedule.after_evaluation:
        return "keeps metrics of evaluations"
    groups = run.schedule._groups  # pyright: ignore[reportPrivateUsage] (a schedule of the user's may have a `groups` of its own)
    with suppress(Exception):
        # A copy, since being asked for steps out of order may change the schedule
        copied = deepcopy(schedule, {id(phase.optimizer): phase.optimizer for phase in run.phases})
        first, second = (
            [copied.at(step, dict(group.base), group) for step in range(3) for group in groups]
            for _ in range(2)
        )
        if first != second:
            return (
                "returns other options when called again for the same step: something changes as "
                "it is used"
            )
    return ""
