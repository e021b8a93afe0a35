"""Finds state that decides losses but is in no checkpoint.

An example is a running mean in a plain attribute of a model: a resumed run would start it again.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, final

from torch import Tensor

from samewise.runner.config.fingerprint import targets
from samewise.runner.data import streams
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem
from samewise.runner.strategies.tree import unchanged_buffers
from samewise.runner.training.components import LIBRARIES
from samewise.runner.training.evaluation import evaluating
from samewise.runner.training.losses import losses_of
from samewise.runner.training.run import Caution, Guard, Run


@final
class SameLosses(Guard):
    """Computes a micro-batch's losses twice from the same state, before the first step.

    They are computed in training and in evaluation mode; the model stays as it is. Without code of
    the user's, or without the whole model in this process, nothing is computed.
    """

    _is_first = True

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        if not self._is_first:
            return
        self._is_first = False
        is_deterministic = run.config.reproducibility.level != "fast"
        if micro_batches and run.strategy.compiles and is_deterministic:
            own = {name.partition(".")[0] for name in targets(run.composed.whole)} - {*LIBRARIES}
            if own and (problem := _compare(run, micro_batches[0])):
                yield Caution(problem, "none")


def _compare(run: Run, micro: MicroBatch) -> Problem | None:
    modes = [(module, module.training) for module in run.model.modules()]
    try:
        with (
            suppress(Exception, SystemExit),
            unchanged_buffers(run.model),
            streams.preserve_generators(),
        ):
            return _compare_losses(run, micro)
    finally:
        for module, training in modes:
            module.training = training
    return None


def _compare_losses(run: Run, micro: MicroBatch) -> Problem | None:
    state = {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value)
        for name, value in run.model.state_dict().items()
    }
    mode, first = run.model.training, _losses(run, micro, state)
    if run.model.training is not mode:
        return Problem(
            f"recipe ({type(run.recipe).__name__}.loss)",
            "leaves the model in evaluation mode: dropout and batch norm do nothing in what "
            "follows, except in the first step of a resumed run",
            hint="call model.train() again, or switch only a part of the model",
        )
    for loss, other in zip(first, _losses(run, micro, state), strict=False):
        if not (loss == other).all() and not (loss.isnan() & other.isnan()).all():
            return Problem(
                "model, recipe, transforms",
                f"the same batch, from the same state, gives a loss of {float(loss):.6g} and then "
                f"of {float(other):.6g}: something changes as the model is used, and no checkpoint "
                "holds it: a resumed run would continue with other values",
                hint="keep it in a persistent buffer of the model",
            )
    return None


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
