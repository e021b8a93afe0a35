"""Restores a run at one of its checkpoints, for commands that evaluate or export it."""

from __future__ import annotations

from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.records import checkpoint, shapes, sources
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore


def at_checkpoint(composed: Composed, project: Project, folder: RunFolder, which: str) -> tuple[Run, int]:
    """A run restored at one of its checkpoints, in one process, and the checkpoint's step; warns if its code has changed.

    The config is made to read no initial weights, whose file may be elsewhere. The checkpoint is best, last, a step, or a monitored metric. ConfigError if a
    part cannot be made, CheckpointError if there is no such checkpoint.
    """
    which = "best" if which == composed.cfg.evaluate.monitor else which
    kept = checkpoint.choose_checkpoint(folder.checkpoints, which)
    state = checkpoint.load(kept.path)
    if composed.cfg.initialise is not None:
        composed.cfg.initialise.weights = None
    run = build(composed, project, folder, alone=True)
    sources.warn_of_changes(folder.sources)
    checkpoint.note_if_not_best(folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), which)
    restore(run, state)
    return run, kept.step
