"""Repeats a part of a training from a checkpoint's state, with the loop's steps and evaluations,
but no folder, checkpoint or signal handling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samewise.runner.data import streams
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.evaluation import evaluate
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run, evaluation_due
from samewise.runner.training.state import restore


def replay(run: Run, state: Mapping[str, Any], until: int) -> None:
    """Restore `state`, and train up to step `until`, with the evaluation due there.

    The run is in one process; its trace is written to its folder, which must exist, and its
    callbacks are called.
    """
    restore(run, state)
    run.recorder.trace.open(run.step, state.get("trace", 0))
    try:
        with streams.preserve_generators():
            batches = TrainingBatches(run)
            while True:
                if evaluation_due(run):
                    evaluate(run)
                if run.step >= until:
                    break
                run.recorder.record(train_step(run, next(batches)))
    finally:
        run.recorder.trace.close()


def parameter_names(run: Run) -> dict[str, Sequence[str]]:
    """The names of each phase's optimizer parameters, in the order of the numbers in its state."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return {
        phase.spec.name: [
            names[id(one)] for group in phase.optimizer.param_groups for one in group["params"]
        ]
        for phase in run.phases
    }
