"""Lists a run's checkpoints, and chooses one without loading it.

Imports neither torch nor mlflow.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.runner.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    Problem,
    did_you_mean,
)
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, read_text, require_shape
from samewise.runner.records.ranking import rank

FORMAT = 1


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float] | None
    """The metrics in its manifest; None if they cannot be read."""


def list_checkpoints(folder: Path) -> list[CheckpointFolder]:
    """List the checkpoints in a folder by step, without checking whether they are intact.

    Raises:
        CheckpointError: The folder cannot be read now, which is not the same as having none.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise CheckpointError(
            Problem(
                str(folder),
                f"the checkpoints cannot be read: {error.strerror}",
                hint="check the storage and the permissions, then run the same command again",
            )
        ) from None
    steps = (
        (int(match[1]), folder / name)
        for name in names
        # Other names are those of unfinished writes, and of folders that were set aside
        if (match := re.fullmatch(r"step-(\d{8,18})", name))
    )
    return [CheckpointFolder(path, step, _metrics(path)) for step, path in sorted(steps)]


def choose_checkpoint(folder: Path, which: str) -> CheckpointFolder:
    """Return the checkpoint in a folder for `best`, `last`, a step, or a metric of `evaluate.also`.

    `best` is the last one if none is marked best.

    Raises:
        CheckpointError: There are no checkpoints, or `which` does not exist.
    """
    checkpoints = list_checkpoints(folder)
    CheckpointError.raise_if(not checkpoints, str(folder.parent), "the run has no checkpoint yet")
    if which == "last":
        return checkpoints[-1]
    if which == "best":
        return _best_of(folder, which, checkpoints) or checkpoints[-1]
    if (
        choice := _best_of(folder, which, checkpoints)
        if "/" in which
        else next((checkpoint for checkpoint in checkpoints if str(checkpoint.step) == which), None)
    ):
        return choice
    choices = [
        "best",
        "last",
        *(
            name
            for checkpoint in checkpoints
            for name in checkpoint.metrics or {}
            if (folder / best_by(name)).exists()
        ),
        *(str(checkpoint.step) for checkpoint in checkpoints),
    ]
    raise CheckpointError(
        Problem(
            "--checkpoint",
            "no such checkpoint",
            which,
            f"one of {', '.join(dict.fromkeys(choices))}",
            did_you_mean(which, choices),
        )
    )


def _best_of(
    folder: Path, which: str, checkpoints: Sequence[CheckpointFolder]
) -> CheckpointFolder | None:
    """Return the checkpoint that the link leads to, or None."""
    link = folder / ("best" if which == "best" else best_by(which))
    if link.is_symlink():
        return next(
            (
                checkpoint
                for checkpoint in checkpoints
                if link.exists() and checkpoint.path.samefile(link)
            ),
            None,
        )
    # A copy that was made without links has none, or a folder in its place: then the config's
    # metric and the manifests decide
    setting = (
        r"  monitor: (?P<name>.+)\n  mode"
        if which == "best"
        else f"    (?P<name>{re.escape(which)})"
    )
    match = re.search(
        rf"^evaluate:\n(?:  .*\n)*?{setting}: (?P<mode>min|max)$",
        read_text(folder.parent / "config.yaml") or "",
        re.MULTILINE,
    )
    return (
        next(iter(best_first(checkpoints, match["name"], match["mode"])), None) if match else None
    )


def best_first(
    checkpoints: Sequence[CheckpointFolder], metric: str, mode: str
) -> list[CheckpointFolder]:
    """Return the checkpoints that have the metric, the best first.

    Equal values sort by step; NaN is last.
    """
    measured = [
        (rank(checkpoint.metrics[metric], mode), checkpoint.step, checkpoint)
        for checkpoint in checkpoints
        if checkpoint.metrics and metric in checkpoint.metrics
    ]
    return [checkpoint for *_, checkpoint in sorted(measured, key=lambda x: x[:2])]


def note_if_not_meant(folder: Path, summary: Mapping[str, Any], which: str) -> None:
    """Warn if the chosen checkpoint is not that of the best evaluation, or of the last step.

    Only a note if the checkpoint of the best evaluation is gone.

    Args:
        folder: `checkpoints/` of the run.
        summary: The run's summary.
        which: `best`, `last`, or a metric of `evaluate.also`.
    """
    measured, steps = summary.get("metrics", {}), summary.get("steps", 0)
    best = measured.get("best", {}) if which == "best" else measured.get("also", {}).get(which, {})
    step = choose_checkpoint(folder, which).step
    if which == "last" and step < steps:
        print(
            f"warning: {folder.parent}: training went on to step {steps}, whose checkpoint "
            f"is missing; this is step {step}",
            file=sys.stderr,
        )
    if "step" in best and int(best["step"]) != step:
        is_gone = not (folder / f"step-{int(best['step']):08d}").exists()
        reason = ", whose checkpoint is gone (checkpoint.keep_best=1 keeps it)" if is_gone else ""
        print(
            f"{'note' if is_gone else 'warning'}: {folder.parent}: the best evaluation was at "
            f"step {best['step']:.0f}{reason}; this is step {step}",
            file=sys.stderr,
        )


def best_by(metric: str) -> str:
    """Return the name of the link to the best checkpoint by a metric of `evaluate.also`."""
    return f"best-{metric.replace('/', '-')}"


def _metrics(path: Path) -> Mapping[str, float] | None:
    try:
        return read_manifest(path).get("metrics", {})
    except (CheckpointError, ConfigError):
        return None


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: It is missing or of another format.
        ConfigError: It cannot be read now, or is damaged.
    """
    file = path / "manifest.json"
    manifest = read_json(file, dict)
    if manifest is None:
        raise incomplete(path)
    # Before the shape is checked, which another format may not have
    if "format" in manifest:
        require_format(path, manifest)
    return require_shape(file, manifest, {"format": int, **shapes.MANIFEST})


def incomplete(path: Path) -> DamagedCheckpoint:
    """Return the error that a checkpoint lacks a file."""
    return DamagedCheckpoint(
        Problem(
            str(path),
            "the checkpoint is incomplete" if path.is_dir() else "there is no checkpoint",
            expected="state.pt and manifest.json",
        )
    )


def require_format(path: Path, content: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if this version does not read a checkpoint's format."""
    CheckpointError.raise_if(
        content.get("format") != FORMAT,
        str(path),
        "the checkpoint has a different format",
        content.get("format"),
        str(FORMAT),
        "load it with the version of samewise that wrote it, or a newer one",
    )
