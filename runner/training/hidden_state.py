"""Finds what decides losses but is in no checkpoint, such as a running mean in a plain attribute of a model: a resumed run would go on with another value."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samewise.runner.config.fingerprint import targets
from samewise.runner.data import streams
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.optim.schedules.base import Schedule
from samewise.runner.records import shapes
from samewise.runner.records.digest import value_digest
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.summary import LEVELS
from samewise.runner.strategies.tree import copy_all, unchanged_buffers
from samewise.runner.training.components import LIBRARIES
from samewise.runner.training.evaluation import evaluating, tell
from samewise.runner.training.loss_checks import means_for_sums, untrained
from samewise.runner.training.overruled_options import warn_of_overruled_options
from samewise.runner.training.run import Run

_WORDS = "and no checkpoint holds it: a resumed run would go on with other values"
_HINT = "keep it in a persistent buffer of the model"


def warn_of_hidden_state(run: Run, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The batches; with the first and the third, a warning if something is found, and a lower level for the run: it cannot be resumed to the same bits."""
    for first in islice(batches, 1):
        _warn(run, [*find(run, first), *find_in_schedule(run)])
        _warn_of_changed_parameters(run, first)
        own = run.strategy.compiles and (is_own(run.recipe) or is_own(run.model))
        for problem in _means(run) if own else ():
            tell(run, problem)
        warn_of_overruled_options(run)
        with untrained(run) if own else nullcontext(list[Problem]()) as idle:
            yield first  # the step
        for problem in idle:
            tell(run, problem)
    before = _of_optimizers(run)  # after a step, in which an optimizer may have created what it needs
    yield from islice(batches, 1)
    _warn(run, _changed_in_optimizers(run, before))
    yield from batches


def _means(run: Run) -> list[Problem]:
    """Of losses that are means, where a user's code may exchange nothing with other processes, and this one may load samples."""
    if run.strategy.peers.size > 1 or run.config.reproducibility.level == "fast":
        return []
    held = [one.detach().clone() for one in run.model.parameters()]
    with unchanged_buffers(run.model):
        try:
            return means_for_sums(run)
        finally:
            copy_all([one.detach() for one in run.model.parameters()], held)


def _warn(run: Run, problems: Sequence[Problem], level: str = "none") -> None:
    if problems:
        run.recorder.level = level = min(run.recorder.level, level, key=[*LEVELS].index)
        if run.strategy.peers.is_main and (record := read_json(run.folder.environment, shapes.ENVIRONMENT)):
            write_json(run.folder.environment, {**record, "level": level})
    for problem in problems:
        tell(run, problem)


def find(run: Run, micro_batches: Sequence[MicroBatch]) -> list[Problem]:
    """Compute the losses of a micro-batch twice from the same state, in training and then in evaluation mode; they must be the same bits.

    So must they be where numbers that the user's code counts up in attributes are larger. Only for code of the user's, and where the whole model is in this
    process. The model is left as it was. None too if it fails: the step itself will.
    """
    return _try(run, micro_batches[0], _find) or [] if micro_batches and _may_look(run) else []


def _may_look(run: Run) -> bool:
    own = [name for name in targets(run.composed.whole) if name.partition(".")[0] not in LIBRARIES]
    return bool(own) and run.strategy.compiles and run.config.reproducibility.level != "fast"


def _try(run: Run, micro: MicroBatch, look: Callable[[Run, MicroBatch], Any]) -> Any:
    """What `look` finds; None if it fails. The model is left as it was."""
    modes = [(module, module.training) for module in run.model.modules()]
    try:
        with suppress(Exception, SystemExit), unchanged_buffers(run.model), streams.preserve_generators():
            return look(run, micro)
    finally:
        for module, training in modes:
            module.training = training
    return None


def _warn_of_changed_parameters(run: Run, micro_batches: Sequence[MicroBatch]) -> None:
    """Warn if a forward pass in training changes parameters: once for each replica in one process, and for each process on its own in several."""
    if run.config.replicas == 1 or not _may_look(run):
        return
    changed = (_try(run, micro_batches[0], _changed_parameters) or {}) if micro_batches else {}
    everyone = [one for one in run.strategy.peers.gather(changed) if one]
    if everyone:
        apart = any(one != everyone[0] for one in everyone)
        words = f"a forward pass changes parameters ({first_few([*everyone[0]], 3)}), once for each replica that a process has"
        words += "; here each process would change them otherwise, so that they differ" if apart else ": with another number of processes, they become others"
        hint = "replicas=1; or keep what no optimizer trains in buffers: all replicas of a step begin with the same ones, and replica 0's are kept"
        _warn(run, [Problem("model", words, hint=hint)], level="none" if apart else "R1")


def _changed_parameters(run: Run, micro: MicroBatch) -> dict[str, int]:
    """The digests of the parameters that computing a micro-batch's losses in training changes, by name."""
    held, changed = _copy_of_state(run), dict[str, int]()
    _losses(run, micro, held, changed)
    return changed


def _copy_of_state(run: Run) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in run.model.state_dict().items()}


def _find(run: Run, micro: MicroBatch) -> list[Problem]:
    held = _copy_of_state(run)
    alone = run.strategy.peers.size == 1  # with several, a loss may exchange something, for which all must compute it
    mode, first, counted = run.model.training, _losses(run, micro, held), _numbers(run)
    if run.model.training is not mode:
        words = "leaves the model in evaluation mode: dropout and batch norm do nothing in what follows, except in the first step of a resumed run"
        return [Problem(f"recipe ({type(run.recipe).__name__}.loss)", words, hint="call model.train() again, or switch only a part of the model")]
    second = _losses(run, micro, held)
    if all(map(_same, first, second)):
        counters = [path for path, (_, value) in _numbers(run).items() if path in counted and counted[path][1] != value] if alone else []
        decide = first_few([path.partition(" ")[0] for path in counters if _decides(run, micro, held, path, second)], 3)
        words = f"counts how often the recipe or the model is used, and decides a loss, {_WORDS}"
        return [Problem(f"model, recipe ({decide})", words, hint=_HINT)] if decide else []
    changed = list[str]()
    if alone:
        before = _attributes(run)
        _losses(run, micro, held)
        changed = [name for name, value in _attributes(run).items() if before.get(name, value) != value]
    one, other = next((float(one), float(other)) for one, other in zip(first, second, strict=False) if not _same(one, other))
    words = f"the same batch, from the same state, gives a loss of {one:.6g} and then of {other:.6g}: something changes as the model is used, {_WORDS}"
    return [Problem(f"model, recipe, transforms ({first_few(changed, 3)})" if changed else "model, recipe, transforms", words, hint=_HINT)]


_LATER = (1_000_000, *range(1, 12))
"""How much further a counter is tried: past any threshold, and around a small cycle."""


def _numbers(run: Run) -> dict[str, tuple[Any, int | float]]:
    """The numbers in attributes of the recipe and of the model's modules, each with its owner, by `Class.name` and where it is."""
    owners = [("recipe", run.recipe), *run.model.named_modules()]
    own = [(path, one) for path, one in owners if is_own(one)]
    return {f"{type(one).__name__}.{name} {path}": (one, value) for path, one in own for name, value in vars(one).items() if type(value) in (int, float)}


def _decides(run: Run, micro: MicroBatch, state: Mapping[str, Any], path: str, losses: Sequence[Tensor]) -> bool:
    """Whether the losses are others where this number is larger. It is then what it was."""
    owner, value = _numbers(run)[path]
    name = path.partition(" ")[0].partition(".")[2]
    try:
        for more in _LATER:
            setattr(owner, name, value + more)
            if not all(map(_same, losses, _losses(run, micro, state))):
                return True
    finally:
        setattr(owner, name, value)
    return False


def _losses(run: Run, micro: MicroBatch, state: Mapping[str, Any], changed: dict[str, int] | None = None) -> list[Tensor]:
    """Of each phase, in training mode and then in evaluation mode, in which some models compute no loss. The model's own state is restored.

    `changed` gets the digests of the parameters that are others after training mode than in `state`.
    """

    def losses() -> Iterator[Tensor]:
        for phase in run.phases:
            streams.enter(run.seed, "step", run.step, micro.number, phase.number)
            with phase.training(run.step), run.precision.autocast():
                yield run.recipe.loss(run.model, run.transforms["train"](run.to_device(micro.copied().batch)), phase.spec).total.detach().clone()

    try:
        found = [*losses()]
        if changed is not None:
            now = {name: one.detach() for name, one in run.model.named_parameters() if name in state}
            changed |= {name: value_digest(one) for name, one in now.items() if not _same(one, state[name])}
        run.model.load_state_dict(state)
        with evaluating(run.model), suppress(Exception):
            found += losses()
    finally:
        run.model.load_state_dict(state)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def is_own(part: object) -> bool:
    """Whether a part's class is not one of samewise's or of the other `LIBRARIES`."""
    return type(part).__module__.partition(".")[0] not in LIBRARIES


class _Pickler(pickle.Pickler):
    """Pickles tensors as digests, since their pickles contain addresses, and leaves out some objects."""

    def __init__(self, file: io.BytesIO, without: Collection[int]) -> None:
        super().__init__(file)
        self._without = without

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._without:
            return "elsewhere"
        return value_digest(obj) if isinstance(obj, Tensor) else None


def attributes_of(part: object, without: Collection[int] = ()) -> dict[str, bytes]:
    """What a part of the user's keeps in its attributes, by `Class.name`, as far as it can be written down; without the objects of these ids."""
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
        found |= {f"{type(module).__name__}.{name}": pickle.dumps(value) for name, value in loose.items()}
    return found


def lost_attributes(part: object, before: Mapping[str, bytes]) -> list[Problem]:
    """A caution for each attribute of a recipe that losses and measurements have changed: it is in no checkpoint."""
    changed = [name for name, value in attributes_of(part).items() if before.get(name, value) != value]
    return [Problem(f"recipe ({name})", f"changes as the recipe is used, {_WORDS}", hint=_HINT) for name in changed]


def _of_optimizers(run: Run) -> dict[str, bytes]:
    """The attributes of the user's optimizers that are not in their `state_dict`; none of those of an optimizer with a `state_dict` of its own."""
    found, known = dict[str, bytes](), {*vars(Optimizer([torch.zeros(())], {})), "step", "grad_scale", "found_inf", "_opt_called", "_step_count"}
    for phase in run.phases:
        one: Any = getattr(phase.optimizer, "optim", phase.optimizer) if not is_own(phase.optimizer) else phase.optimizer  # within ZeroRedundancyOptimizer
        if not is_own(one) or type(one).state_dict is not Optimizer.state_dict or run.config.reproducibility.level == "fast":
            continue
        groups = [[group, group["params"]] for group in one.param_groups]
        states = [[state, *state.values()] for state in one.state.values()]
        held = [*run.model.parameters(), *run.model.buffers(), one, one.state, one.param_groups, *itertools.chain(*groups, *states)]
        own = {f"{type(one).__name__}.{name}" for name in known}
        found |= {name: value for name, value in attributes_of(one, {id(part) for part in held}).items() if name not in own}
    return found


def _changed_in_optimizers(run: Run, before: Mapping[str, bytes]) -> list[Problem]:
    changed = [name for name, value in (_of_optimizers(run) if before else {}).items() if before.get(name, value) != value]
    hint = "keep it in `self.state[parameter]` or in `self.param_groups`, which are saved; or in a local variable, if the next step does not need it"
    return [Problem(f"optimizer ({first_few(changed, 3)})", f"changes in a step, {_WORDS}", hint=hint)] if changed else []


def lost_by_optimizers(run: Run) -> list[Problem]:
    """A caution if another step with the same gradients changes attributes of an optimizer that are in no checkpoint."""
    if before := _of_optimizers(run):
        with suppress(Exception):
            for phase in run.phases:
                phase.optimizer.step()
    return _changed_in_optimizers(run, before)


def find_in_schedule(run: Run) -> list[Problem]:
    """A caution for each schedule of the user's that is not a function of the step, or that hears of evaluations, if it saves no state."""
    found, parts = list[Problem](), [run.schedule]
    groups = run.schedule._groups  # pyright: ignore[reportPrivateUsage] (a schedule of the user's may have a `groups` of its own)
    for schedule in parts:  # which grows
        parts += [part for part, _ in schedule.parts().values()]
        if is_own(schedule) and type(schedule).state_dict is Schedule.state_dict and run.config.reproducibility.level != "fast":
            words = "keeps what evaluations gave" if type(schedule).after_evaluation is not Schedule.after_evaluation else ""
            with suppress(Exception):
                copied = deepcopy(schedule, {id(phase.optimizer): phase.optimizer for phase in run.phases})
                first, second = ([copied.at(step, dict(group.base), group) for step in range(3) for group in groups] for _ in range(2))
                words = words or ("sets other options when it is asked again for the same step: something changes as it is used" if first != second else "")
            if words:
                hint = "compute the options from `step` alone, or save the state in `state_dict`, and restore it in `load_state_dict`"
                found.append(Problem(f"scheduler ({type(schedule).__name__})", f"{words}, {_WORDS}", hint=hint))
    return found
