"""Trains parts of a recorded run again, each from one kept checkpoint to the next."""

import itertools
import random
import shutil
from collections.abc import Collection, Sequence

from samewise.runner.records import checkpoint
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.continued import continue_from
from samewise.runner.training.resuming import first_step
from samewise.runner.training.run import Run
from samewise.runner.training.state import state_of
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.second_training import Comparison, Diverged, checkpoint_divergence
from samewise.runner.verify.state_comparison import parameter_names, state_differences
from samewise.runner.verify.step_inspection import state_at


def draw_parts(
    again: Run, comparison: Comparison, folder: RunFolder, *, count: int, steps: int | None
) -> list[tuple[int, int]]:
    """Draw parts of a run, always the same ones, and return them in order.

    Args:
        again: A new run of the recorded run's config.
        comparison: The comparison with the record.
        folder: The recorded run's folder.
        count: The number of parts; all if there are no more.
        steps: The most steps of a part, or the trace's interval if that is longer; None: all up to
            the next checkpoint.

    Returns:
        The step at which each part begins, and the one at which it ends.
    """
    bounds = {first_step(again), max(comparison.steps, default=first_step(again))}
    bounds.update(saved.step for saved in checkpoint.list_checkpoints(folder.checkpoints))
    parts = list(itertools.pairwise(sorted(bounds)))
    # A seed of its own, so that a second audit trains the same parts
    drawn = sorted(random.Random(0).sample(parts, min(count, len(parts))))
    # A part without a line in the trace would compare nothing
    most = max(steps, again.config.trace.every_steps) if steps else again.total_steps
    return [(start, min(end, start + most)) for start, end in drawn]


def train_parts(
    again: Run,
    comparison: Comparison,
    folder: RunFolder,
    parts: Sequence[tuple[int, int]],
    settings: Collection[str],
) -> tuple[list[Divergence], list[str]]:
    """Train parts of a run again up to the first that differs from the record.

    Args:
        again: A new run of the recorded run's config, whose folder is a temporary one.
        comparison: One of its callbacks.
        folder: The recorded run's folder.
        parts: The first and the last step of each part, from `draw_parts`.
        settings: The settings that differ, which may explain a difference.

    Returns:
        The first difference, if there is one, and lines that describe the result.

    Raises:
        CheckpointError: A part's checkpoint is damaged, or cannot be read.
    """
    paths = {saved.step: saved.path for saved in checkpoint.list_checkpoints(folder.checkpoints)}
    for step in sorted(paths.keys() & set(itertools.chain.from_iterable(parts))):
        # Before anything is trained, which may take hours
        checkpoint.read(paths[step])
    is_continued = again.config.resume_from and parts and parts[0][0] not in paths
    origin = continue_from(again, again.config.resume_from) if is_continued else {}
    for callback in again.callbacks.values():
        callback.on_start(again.recorder.view)
    initial, same = copy_to_cpu({**state_of(again), **origin}), list[str]()
    for start, end in parts:
        state = checkpoint.load(paths[start]) if start in paths else initial
        # With the lines before, a difference in the first step is not one in steps without a line
        shutil.copy(folder.trace, again.folder.trace)
        try:
            reached = state_at(end, again, state)
        except Diverged as diverged:
            divergence = comparison.divergence(again.folder, diverged.step, settings)
        else:
            divergence = end in paths and checkpoint_divergence(
                end,
                state_differences(checkpoint.load(paths[end]), reached, parameter_names(again)),
                evaluated=False,
            )
        agreed = [f"the same bits: steps {', '.join(same)}"] if same else []
        if divergence:
            return [divergence], [*agreed, f"diverges at {divergence}"]
        same.append(f"{start} to {end}")
    return [], [f"the same bits: steps {', '.join(same)}"]
