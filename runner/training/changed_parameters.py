"""Finds parameters that a forward pass changes, such as a momentum encoder's: each replica of a
process, and each process, changes them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.records.digest import value_digest
from samewise.runner.strategies.recompute import mark
from samewise.runner.training.hidden_state import (
    copy_of_state,
    losses_of,
    may_look,
    same_values,
    try_out,
)
from samewise.runner.training.run import Run

_FACTOR = 1000
"""By how much parameters are multiplied, each by another factor: so far that limits on them are
exceeded, and copies are no longer equal."""


def find_changed_parameters(
    run: Run, micro_batches: Sequence[MicroBatch]
) -> list[tuple[Problem, str]]:
    """A caution, and the level of reproducibility that is left, if a forward pass in training
    changes parameters and there are several replicas.
    """
    if run.config.replicas == 1 or not may_look(run):
        return []
    changed = (try_out(run, micro_batches[0], _changed_parameters) or {}) if micro_batches else {}
    everyone = [one for one in run.strategy.peers.gather(changed) if one]
    if not everyone:
        return []
    apart = any(one != everyone[0] for one in everyone)
    words = (
        f"a forward pass changes parameters ({first_few([*everyone[0]], 3)}), once for each "
        "replica that a process has"
    )
    words += (
        "; here each process would change them otherwise, so that they differ"
        if apart
        else ": with another number of processes, they become others"
    )
    hint = (
        "replicas=1; or keep what no optimizer trains in buffers: all replicas of a step begin "
        "with the same ones, and replica 0's are kept"
    )
    return [(Problem("model", words, hint=hint), "none" if apart else "R1")]


def _changed_parameters(run: Run, micro: MicroBatch) -> dict[str, int]:
    """The parameters that computing a micro-batch's losses in training changes, by name, each with
    a digest of what it becomes from other weights.

    torch counts changes in place, even those that change no value yet; a change of `parameter.data`
    shows in its address or its values.
    """
    held = copy_of_state(run)
    parameters = {name: one for name, one in run.model.named_parameters() if name in held}

    try:
        before = {name: mark(one) for name, one in parameters.items()}
        _ = [*losses_of(run, micro)]
        changed = [
            name
            for name, one in parameters.items()
            if before[name] != mark(one) or not same_values(one.detach(), held[name])
        ]
        if changed:
            run.model.load_state_dict(held)
            with torch.no_grad():
                for number, one in enumerate(parameters.values()):
                    one.mul_(_FACTOR + number)
            with suppress(Exception):  # not every model computes with any weights
                _ = [*losses_of(run, micro)]
        return {name: value_digest(parameters[name].detach()) for name in changed}
    finally:
        run.model.load_state_dict(held)
