"""Finds what decides losses but is in no checkpoint, such as a running mean in a plain attribute of a model: a resumed run would go on with another value."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from torch import Tensor, nn

from samewise.runner.config.fingerprint import targets
from samewise.runner.data import streams
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.training.evaluation import evaluating, tell
from samewise.runner.training.run import Run

LIBRARIES = ("samewise", "torch", "torchvision", "torchaudio", "timm", "transformers")
"""Their models keep nothing of the kind."""

_WORDS = "and no checkpoint holds it: a resumed run would go on with other values"
_HINT = "keep it in a persistent buffer of the model"


def warn_of_hidden_state(run: Run, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The batches; with the first, a warning if something is found, and a lower level for the run, since it cannot be resumed to the same bits."""
    for first in islice(batches, 1):
        if found := find(run, first):
            run.recorder.level = "none"
            if run.strategy.peers.is_main and (record := read_json(run.folder.environment, shapes.ENVIRONMENT)):
                write_json(run.folder.environment, {**record, "level": "none"})
            tell(run, found)
        yield first
    yield from batches


def find(run: Run, micro_batches: Sequence[MicroBatch]) -> Problem | None:
    """Compute the losses of a micro-batch twice from the same state, in training and then in evaluation mode; they must be the same bits.

    Only for code of the user's, and where the whole model is in this process. The model is left as it was. None too if it fails: the step itself will.
    """
    with suppress(Exception, SystemExit):
        return _find(run, micro_batches)
    return None


def _find(run: Run, micro_batches: Sequence[MicroBatch]) -> Problem | None:
    own = [name for name in targets(run.composed.whole) if name.partition(".")[0] not in LIBRARIES]
    if not own or not micro_batches or not run.strategy.compiles or run.config.reproducibility.level == "fast":
        return None
    held = {name: value.clone() for name, value in run.model.state_dict().items()}
    with streams.preserve_generators():
        first, second = (_losses(run, micro_batches[0], held) for _ in range(2))
        if all(map(_same, first, second)):
            return None
        changed = list[str]()
        if run.strategy.peers.size == 1:  # with several, a loss may exchange something, for which all must compute it
            before = _attributes(run)
            _losses(run, micro_batches[0], held)
            changed = [name for name, value in _attributes(run).items() if before.get(name, value) != value]
    one, other = next((float(one), float(other)) for one, other in zip(first, second, strict=False) if not _same(one, other))
    words = f"the same batch, from the same state, gives a loss of {one:.6g} and then of {other:.6g}: something changes as the model is used, {_WORDS}"
    return Problem(f"model, recipe, transforms ({first_few(changed, 3)})" if changed else "model, recipe, transforms", words, hint=_HINT)


def _losses(run: Run, micro: MicroBatch, state: Mapping[str, Any]) -> list[Tensor]:
    """Of each phase, in training mode and then in evaluation mode, in which some models compute no loss. The model's own state is restored."""

    def losses() -> Iterator[Tensor]:
        for phase in run.phases:
            streams.enter(run.seed, "step", run.step, micro.number, phase.number)
            with phase.training(run.step), run.precision.autocast():
                yield run.recipe.loss(run.model, run.transforms["train"](run.to_device(micro.batch)), phase.spec).total.detach().clone()

    try:
        found = [*losses()]
        run.model.load_state_dict(state)
        with evaluating(run.model), suppress(Exception):
            found += losses()
    finally:
        run.model.load_state_dict(state)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def attributes_of(part: object) -> dict[str, bytes]:
    """What a part of the user's keeps in its attributes, by `Class.name`, as far as it can be written down."""
    found, prefix = dict[str, bytes](), type(part).__name__
    for name, value in {} if type(part).__module__.partition(".")[0] in LIBRARIES else vars(part).items():
        with suppress(Exception):
            found[f"{prefix}.{name}"] = pickle.dumps(value)
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
