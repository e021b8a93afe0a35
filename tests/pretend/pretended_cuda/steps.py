"""Counts what a step of a recipe and an evaluation batch make a CUDA device do."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pretended_cuda.counts import Counts
from pretended_cuda.device import pretended
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project, find
from samewise.runner.errors import Interrupted
from samewise.runner.records.folder import RunFolder
from samewise.runner.training import loop
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.evaluation import evaluating, first_batch, measure_batch, metrics_of
from samewise.runner.training.session import session

STEADY = 2
"""The step that is counted: optimizers have their state by then."""
ALONE = ("debug=tiny", "device=cuda", "tracking=none", "loader.num_workers=0")


def counted(overrides: Sequence[str], folder: Path, project: Project | None = None) -> dict[str, Counts]:
    """The counts of one `step`, with what is recorded of it, and of one `evaluation_batch`, with the metrics made of it.

    Args:
        overrides: Of the experiment, which is trained at debug=tiny.
        folder: Empty; the run's.
        project: Where its parts may lie.

    Raises:
        DeviceError: a real device would refuse it.
    """
    project = project or find(folder)
    composed = compose([*overrides, *ALONE], project=project)
    with pretended() as device:
        run = build(composed, project, RunFolder(folder))
        with suppress(Interrupted), session(run):
            batches = TrainingBatches(run)
            for _ in range(STEADY):
                with device.counting() as step:
                    batch = next(batches)
                    run.recorder.record(loop.train_step(run, batch, batches.load_next))
            with device.counting() as evaluated, evaluating(run.model):
                scores = run.recipe.scores(run.splits["valid"].dataset)
                scores.add(measure_batch(run, run.model, 0, first_batch(run, "valid", run.evaluate.batch_size)))
                metrics_of(scores)
            raise Interrupted("counted")
    return {"step": step, "evaluation_batch": evaluated}
