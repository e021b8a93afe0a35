"""Lists a run's checkpoints, and chooses one without loading it.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

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
    """None if they cannot be read."""


def list_checkpoints(folder: Path) -> list[CheckpointFolder]:
    """The checkpoints in a folder, by step.

    Only `load` checks whether they are intact. Other files and folders are ignored.

    CheckpointError if the folder cannot be read now: that is not the same as having none.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except OSError as error:
        hint = "check the storage and the permissions, then run the same command again"
        raise CheckpointError(
            Problem(str(folder), f"the checkpoints cannot be read: {error.strerror}", hint=hint)
        ) from None
    steps = (
        (int(match[1]), folder / name)
        for name in names
        if (match := re.fullmatch(r"step-(\d{8,18})", name))
    )
    return [CheckpointFolder(path, step, _metrics(path)) for step, path in sorted(steps)]


def choose_checkpoint(folder: Path, which: str) -> CheckpointFolder:
    """The checkpoint in a folder for `best`, `last`, a step, or a metric of `evaluate.also`.

    For `best` the last one if none is.

    CheckpointError if there are no checkpoints, or the named one does not exist.
    """
    kept = list_checkpoints(folder)
    if not kept:
        raise CheckpointError(Problem(str(folder.parent), "the run has no checkpoint yet"))
    if which == "last":
        return kept[-1]
    if which == "best":
        return _best_of(folder, which, kept) or kept[-1]
    if (
        found := _best_of(folder, which, kept)
        if "/" in which
        else next((one for one in kept if str(one.step) == which), None)
    ):
        return found
    steps = [str(one.step) for one in kept]
    known = [
        "best",
        "last",
        *(name for one in kept for name in one.metrics or {} if (folder / best_by(name)).exists()),
        *steps,
    ]
    raise CheckpointError(
        Problem(
            "--checkpoint",
            "no such checkpoint",
            which,
            f"one of {', '.join(dict.fromkeys(known))}",
            did_you_mean(which, known),
        )
    )


def _best_of(folder: Path, which: str, kept: Sequence[CheckpointFolder]) -> CheckpointFolder | None:
    """The one to which the link leads.

    If it is missing, or a folder, as in a copy made without links, the best by the config and the
    manifests.
    """
    link = folder / ("best" if which == "best" else best_by(which))
    if link.is_symlink():
        return next((one for one in kept if link.exists() and one.path.samefile(link)), None)
    by = (
        r"  monitor: (?P<name>.+)\n  mode"
        if which == "best"
        else f"    (?P<name>{re.escape(which)})"
    )
    found = re.search(
        rf"^evaluate:\n(?:  .*\n)*?{by}: (?P<mode>min|max)$",
        read_text(folder.parent / "config.yaml") or "",
        re.MULTILINE,
    )
    return next(iter(best_first(kept, found["name"], found["mode"])), None) if found else None


def best_first(kept: Sequence[CheckpointFolder], metric: str, mode: str) -> list[CheckpointFolder]:
    """Those with the metric, the best first; of equal ones the earliest, and NaN at the end."""
    measured = [
        (rank(one.metrics[metric], mode), one.step, one)
        for one in kept
        if one.metrics and metric in one.metrics
    ]
    return [one for *_, one in sorted(measured, key=lambda x: x[:2])]


def note_if_not_meant(folder: Path, summary: Mapping[str, Any], which: str) -> None:
    """Print a note if the checkpoint chosen as best (`best`, or a metric of `evaluate.also`) is not
    that of the best evaluation; a warning if that is kept.

    A warning too if the `last` is not that of the last step.
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
        words = (
            "the best evaluation was at step "
            f"{best['step']:.0f}{', whose checkpoint is gone (checkpoint.keep_best=1 keeps it)' * is_gone}; "
            f"this is step {step}"
        )
        print(f"{'note' if is_gone else 'warning'}: {folder.parent}: {words}", file=sys.stderr)


def misled_links(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each link to a best checkpoint that leads elsewhere than to the step of the
    best evaluation, if that is kept.
    """
    measured = summary.get("metrics", {})
    bests = {
        "best": measured.get("best", {}),
        **{best_by(name): best for name, best in measured.get("also", {}).items()},
    }
    wanted = {
        folder / name: folder / f"step-{int(best['step']):08d}"
        for name, best in bests.items()
        if "step" in best
    }
    return [
        f"{folder.name}/{link.name} leads to {link.resolve().name}, and summary.json has "
        f"the best evaluation at {there.name}"
        for link, there in wanted.items()
        if link.is_symlink() and there.exists() and link.resolve() != there.resolve()
    ]


def best_by(metric: str) -> str:
    """The link to the best checkpoint by a metric of `evaluate.also`."""
    return f"best-{metric.replace('/', '-')}"


def _metrics(path: Path) -> Mapping[str, float] | None:
    manifest = manifest_of(path)
    return None if manifest is None else manifest.get("metrics", {})


def manifest_of(path: Path) -> dict[str, Any] | None:
    """What a checkpoint's manifest says; None if it cannot be read."""
    try:
        return read_manifest(path)
    except (CheckpointError, ConfigError):
        return None


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says.

    A CheckpointError or a ConfigError if it cannot be read.
    """
    file = path / "manifest.json"
    manifest = read_json(file, dict)
    if manifest is None:
        raise incomplete(path)
    if "format" in manifest:
        require_format(path, manifest)
    return require_shape(file, manifest, {"format": int, **shapes.MANIFEST})


def incomplete(path: Path) -> DamagedCheckpoint:
    """The error that a checkpoint lacks a file."""
    words = "the checkpoint is incomplete" if path.is_dir() else "there is no checkpoint"
    return DamagedCheckpoint(Problem(str(path), words, expected="state.pt and manifest.json"))


def require_format(path: Path, written: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a checkpoint has another format than this version reads."""
    if written.get("format") != FORMAT:
        hint = "load it with the version of samewise that wrote it, or a newer one"
        raise CheckpointError(
            Problem(
                str(path),
                "the checkpoint has a different format",
                written.get("format"),
                str(FORMAT),
                hint,
            )
        )
