"""Finds what decides losses but is in no checkpoint, such as a running mean in a plain attribute of
a model: a resumed run would go on with another value.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

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
from samewise.runner.training.run import Run

_WORDS = "and no checkpoint holds it: a resumed run would go on with other values"
_HINT = "keep it in a persistent buffer of the model"


def find(run: Run, micro_batches: Sequence[MicroBatch]) -> list[Problem]:
    """Compute the losses of a micro-batch twice from the same state, in training and then in
    evaluation mode; they must be the same bits.

    Only for code of the user's, and where the whole model is in this process. The model is left as
    it was. None too if it fails: the step itself will.
    """
    return try_out(run, micro_batches[0], _find) or [] if micro_batches and may_look(run) else []


def may_look(run: Run) -> bool:
    """Whether there is code of the user's, with a promise to check, and the whole model is in this
    process.
    """
    own = [name for name in targets(run.composed.whole) if name.partition(".")[0] not in LIBRARIES]
    return bool(own) and run.strategy.compiles and run.config.reproducibility.level != "fast"


def try_out(run: Run, micro: MicroBatch, look: Callable[[Run, MicroBatch], Any]) -> Any:
    """What `look` finds; None if it fails. The model is left as it was."""
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
    """The model's `state_dict`, copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value)
        for name, value in run.model.state_dict().items()
    }


def _find(run: Run, micro: MicroBatch) -> list[Problem]:
    held = copy_of_state(run)
    mode, first = run.model.training, _losses(run, micro, held)
    if run.model.training is not mode:
        message = (
            "leaves the model in evaluation mode: dropout and batch norm do nothing in what "
            "follows, except in the first step of a resumed run"
        )
        return [
            Problem(
                f"recipe ({type(run.recipe).__name__}.loss)",
                message,
                hint="call model.train() again, or switch only a part of the model",
            )
        ]
    second = _losses(run, micro, held)
    if all(map(same_values, first, second)):
        return []
    changed = list[str]()
    if (
        run.strategy.peers.size == 1
    ):  # with several, a loss may exchange something, for which all must compute it
        before = _attributes(run)
        _losses(run, micro, held)
        changed = [
            name for name, value in _attributes(run).items() if before.get(name, value) != value
        ]
    one, other = next(
        (float(one), float(other))
        for one, other in zip(first, second, strict=False)
        if not same_values(one, other)
    )
    message = (
        f"the same batch, from the same state, gives a loss of {one:.6g} and then of "
        f"{other:.6g}: something changes as the model is used, {_WORDS}"
    )
    return [
        Problem(
            f"model, recipe, transforms ({first_few(changed, 3)})"
            if changed
            else "model, recipe, transforms",
            message,
            hint=_HINT,
        )
    ]


def _losses(run: Run, micro: MicroBatch, state: Mapping[str, Any]) -> list[Tensor]:
    """Of each phase, in training mode and then in evaluation mode, in which some models compute no
    loss. The model's own state is restored.
    """
    try:
        found = [*losses_of(run, micro)]
        run.model.load_state_dict(state)
        with evaluating(run.model), suppress(Exception):
            found += losses_of(run, micro)
    finally:
        run.model.load_state_dict(state)
    return found


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to itself."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def is_own(part: object) -> bool:
    """Whether a part's class is not one of samewise's or of the other `LIBRARIES`."""
    return type(part).__module__.partition(".")[0] not in LIBRARIES


class _Pickler(pickle.Pickler):
    """Pickles tensors as digests, since their pickles contain addresses, and leaves out some
    objects.
    """

    def __init__(self, file: io.BytesIO, without: Collection[int]) -> None:
        super().__init__(file)
        self._without = without

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._without:
            return "elsewhere"
        return value_digest(obj) if isinstance(obj, Tensor) else None


def attributes_of(part: object, without: Collection[int] = ()) -> dict[str, bytes]:
    """What a part of the user's keeps in its attributes, by `Class.name`, as far as it can be
    written down; without the objects of these ids.
    """
    found, prefix = dict[str, bytes](), type(part).__name__
    for name, value in vars(part).items() if is_own(part) else ():
        with suppress(Exception):
            file = io.BytesIO()
            _Pickler(file, without).dump(value)
            found[f"{prefix}.{name}"] = file.getvalue()
    return found


def _attributes(run: Run) -> dict[str, bytes]:
    """Those of the recipe and of the model's modules, and buffers that are not persistent."""
    found = attributes_of(run.recipe)
    for module in run.model.modules():
        kept = attributes_of(module)
        own = {f"{type(module).__name__}.{name}" for name in vars(nn.Module())}
        loose = {name: module._buffers[name] for name in module._non_persistent_buffers_set}  # pyright: ignore[reportPrivateUsage]
        found |= {name: value for name, value in kept.items() if name not in own}
        found |= {
            f"{type(module).__name__}.{name}": pickle.dumps(value) for name, value in loose.items()
        }
    return found


def lost_attributes(part: object, before: Mapping[str, bytes]) -> list[Problem]:
    """A caution for each attribute of a recipe that losses and measurements have changed: it is in
    no checkpoint.
    """
    changed = [
        name for name, value in attributes_of(part).items() if before.get(name, value) != value
    ]
    return [
        Problem(f"recipe ({name})", f"changes as the recipe is used, {_WORDS}", hint=_HINT)
        for name in changed
    ]


def state_of_optimizers(run: Run) -> dict[str, bytes]:
    """The attributes of the user's optimizers that are not in their `state_dict`.

    None of those of an optimizer with a `state_dict` of its own.
    """
    found, known = (
        dict[str, bytes](),
        {
            *vars(Optimizer([torch.zeros(())], {})),
            "step",
            "grad_scale",
            "found_inf",
            "_opt_called",
            "_step_count",
        },
    )
    for phase in run.phases:
        # Within ZeroRedundancyOptimizer
        one: Any = (
            getattr(phase.optimizer, "optim", phase.optimizer)
            if not is_own(phase.optimizer)
            else phase.optimizer
        )
        if (
            not is_own(one)
            or type(one).state_dict is not Optimizer.state_dict
            or run.config.reproducibility.level == "fast"
        ):
            continue
        groups = [[group, group["params"]] for group in one.param_groups]
        states = [[state, *state.values()] for state in one.state.values()]
        held = [
            *run.model.parameters(),
            *run.model.buffers(),
            one,
            one.state,
            one.param_groups,
            *itertools.chain(*groups, *states),
        ]
        own = {f"{type(one).__name__}.{name}" for name in known}
        found |= {
            name: value
            for name, value in attributes_of(one, {id(part) for part in held}).items()
            if name not in own
        }
    return found


def changed_in_optimizers(run: Run, before: Mapping[str, bytes]) -> list[Problem]:
    """A caution if what `state_of_optimizers` gave before is not the same now."""
    changed = [
        name
        for name, value in (state_of_optimizers(run) if before else {}).items()
        if before.get(name, value) != value
    ]
    hint = (
        "keep it in `self.state[parameter]` or in `self.param_groups`, which are saved; or in "
        "a local variable, if the next step does not need it"
    )
    return (
        [Problem(f"optimizer ({first_few(changed, 3)})", f"changes in a step, {_WORDS}", hint=hint)]
        if changed
        else []
    )


def lost_by_optimizers(run: Run) -> list[Problem]:
    """A caution if another step with the same gradients changes attributes of an optimizer that are
    in no checkpoint.
    """
    if before := state_of_optimizers(run):
        with suppress(Exception):
            for phase in run.phases:
                phase.optimizer.step()
    return changed_in_optimizers(run, before)


def find_in_schedule(run: Run) -> list[Problem]:
    """A caution for each schedule of the user's that is not a function of the step, or that hears
    of evaluations, if it saves no state.
    """
    found, parts = list[Problem](), [run.schedule]
    groups = run.schedule._groups  # pyright: ignore[reportPrivateUsage] (a schedule of the user's may have a `groups` of its own)
    for schedule in parts:  # which grows
        parts += [part for part, _ in schedule.parts().values()]
        if (
            is_own(schedule)
            and type(schedule).state_dict is Schedule.state_dict
            and run.config.reproducibility.level != "fast"
        ):
            message = (
                "keeps what evaluations gave"
                if type(schedule).after_evaluation is not Schedule.after_evaluation
                else ""
            )
            with suppress(Exception):
                copied = deepcopy(
                    schedule, {id(phase.optimizer): phase.optimizer for phase in run.phases}
                )
                first, second = (
                    [
                        copied.at(step, dict(group.base), group)
                        for step in range(3)
                        for group in groups
                    ]
                    for _ in range(2)
                )
                message = message or (
                    "sets other options when it is asked again for the same step: "
                    "something changes as it is used"
                    if first != second
                    else ""
                )
            if message:
                hint = (
                    "compute the options from `step` alone, or save the state in `state_dict`, "
                    "and restore it in `load_state_dict`"
                )
                found.append(
                    Problem(
                        f"scheduler ({type(schedule).__name__})", f"{message}, {_WORDS}", hint=hint
                    )
                )
    return found
