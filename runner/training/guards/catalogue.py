"""Lists the guards, and has each look at the moments of a training.

A new guard is a class in this folder, and a line here. Checkpoints do not hold its state: when a
run resumes, a guard begins again.
"""

from collections.abc import Callable, Iterable
from typing import Any

from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.summary import LEVELS
from samewise.runner.training.evaluation import tell
from samewise.runner.training.guards.finite import FiniteNumbers
from samewise.runner.training.guards.held_tensors import HeldTensors
from samewise.runner.training.guards.learned import LearnedElsewhere, UntrainedParameters
from samewise.runner.training.guards.rehearsal import Rehearsal
from samewise.runner.training.guards.same_losses import SameLosses
from samewise.runner.training.run import Caution, Guard, Run

STEPS: tuple[type[Guard], ...] = (FiniteNumbers, HeldTensors)
"""The guards of every run, also of a profile or an audit; `build` adds them."""
CODE: tuple[type[Guard], ...] = (LearnedElsewhere, Rehearsal, SameLosses, UntrainedParameters)
"""The guards of the user's code, for `train` and `check` alone.

These look at the start and in the first step; one that needs many steps belongs here too.
"""


def watch(run: Run, moment: Callable[..., Iterable[Caution]], *values: Any) -> None:
    """Have a run's guards look at a moment, a method of `Guard`, and print their warnings.

    A warning lowers the run's level to what the run can still promise.
    """
    for guard in run.guards:
        if moment.__name__ in guard.looks:
            for problem, level in getattr(guard, moment.__name__)(run, *values):
                _lower_level(run, level)
                tell(run, problem)


def _lower_level(run: Run, level: str) -> None:
    if [*LEVELS].index(level) >= [*LEVELS].index(run.recorder.level):
        return
    run.recorder.level = level
    # If training has begun, the folder has its record, with the level before this warning
    if run.strategy.peers.is_main and (
        record := read_json(run.folder.environment, shapes.ENVIRONMENT)
    ):
        write_json(run.folder.environment, {**record, "level": level})
