"""Checkpoints of a few numbers, written and listed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from samewise.runner.config import schema
from samewise.runner.records import checkpoint
from samewise.runner.records.checkpoint_writer import Checkpoints


def keeper(folder: Path, **settings: Any) -> Checkpoints:
    monitor, mode, also = settings.pop("monitor", "valid/loss"), settings.pop("mode", "min"), settings.pop("also", {})
    kept = schema.Checkpoint(**{"background": False, **settings})
    return Checkpoints(folder, kept, {monitor: mode, **also}, {})


def state(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}, "best": {"valid/loss": 0.5}}


def write(folder: Path, steps: Iterable[int], losses: Sequence[float] = (), **settings: Any) -> Checkpoints:
    """One for each step, with a loss each if any are given."""
    return write_metrics(folder, {step: {"valid/loss": losses[number]} if losses else {} for number, step in enumerate(steps)}, **settings)


def write_metrics(folder: Path, metrics: Mapping[int, Mapping[str, float]], **settings: Any) -> Checkpoints:
    """One for each step, with its metrics."""
    kept = keeper(folder, **settings)
    for step, its in metrics.items():
        kept.save(step, state(step), dict(its))
    kept.wait()
    return kept


def steps_in(folder: Path) -> list[int]:
    return [one.step for one in checkpoint.list_checkpoints(folder)]
