"""Restores a run at one of its checkpoints, and evaluates it there."""

import hashlib
import inspect
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import OURS
from samewise.runner.config.instantiate import locate
from samewise.runner.config.project import Project
from samewise.runner.config.schema import SPLITS, splits_in
from samewise.runner.errors import ConfigError, Problem, first_few, nearest
from samewise.runner.interfaces import class_names
from samewise.runner.records import checkpoint, kept_checkpoints, shapes, sources
from samewise.runner.records.files import read_json, read_mapping, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.json_text import to_json
from samewise.runner.results import Evaluation
from samewise.runner.training.build import build
from samewise.runner.training.evaluation import (
    draw,
    left_out,
    measure_split,
    metrics_of,
    models_to_evaluate,
    samples_taken,
    tell_doubts,
)
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore


def at_checkpoint(
    composed: Composed, project: Project, folder: RunFolder, which: str, split: str | None = None
) -> tuple[Run, int]:
    """Restore a run at one of its checkpoints, in one process, and warn if its code has changed.

    Args:
        composed: The run's config. It is changed: classes are numbered as in training, and no
            initial weights are read.
        project: The packages that the config may name.
        folder: The run's folder.
        which: The checkpoint: best, last, a step, or a monitored metric.
        split: The only split to make; None: all.

    Returns:
        The run, and the checkpoint's step.

    Raises:
        ConfigError: A part cannot be made, or the data have other classes.
        CheckpointError: There is no such checkpoint.
    """
    which = "best" if which == composed.cfg.evaluate.monitor else which
    chosen = kept_checkpoints.choose_checkpoint(folder.checkpoints, which)
    state = checkpoint.load(chosen.path)
    data: dict[str, dict[str, Any]] = (read_json(folder.environment, shapes.ENVIRONMENT) or {}).get(
        "data", {}
    )
    classes: list[str] = data.get("train", {}).get("classes", [])
    if composed.cfg.initialise is not None:
        # The checkpoint's weights replace these, whose file may not exist here
        composed.cfg.initialise.weights = None
    if classes:
        _set_classes(composed.cfg, project, classes)
    run = build(
        composed,
        project,
        folder,
        alone=True,
        split=split,
        samples=data.get("train", {}).get("size"),
    )
    _require_same_classes(run, data, classes)
    sources.warn_of_changes(folder.sources)
    kept_checkpoints.note_if_not_meant(
        folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), which
    )
    restore(run, state)
    return run, chosen.step


def evaluate_checkpoint(
    folder: RunFolder,
    composed: Composed,
    project: Project,
    *,
    split: str,
    checkpoint: str,
    weights: str | None = None,
    pictures: Path | None = None,
) -> Evaluation:
    """Evaluate a run's checkpoint on one of its splits, and draw its pictures.

    Args:
        folder: The run's folder.
        composed: Its config, with overrides.
        project: The packages that the config may name.
        split: train, valid or test.
        checkpoint: best, last, a step, or a monitored metric.
        weights: The name of the only weights to evaluate, such as `ema`; None: all, with pictures
            of the trained ones.
        pictures: The folder for pictures; None: one in the run's folder.

    Returns:
        Metrics, and what they were measured on.

    Raises:
        ConfigError: A part cannot be made, or the data have other classes.
        CheckpointError: There is no such checkpoint.
    """
    _require_split(split, composed)
    changed = saved.changes(folder, composed)
    run, step = at_checkpoint(composed, project, folder, checkpoint, split)
    models = models_to_evaluate(run, weights)
    # Overrides change the folder's name, so the run's own pictures stay
    differences = to_json([[path, now] for path, _, now in changed]).encode()
    digest = hashlib.sha256(differences).hexdigest()[:8] if changed else ""
    name = "-".join(filter(None, (split, f"{step:08d}", weights, digest)))
    place = pictures or folder.path / "eval" / name
    metrics = dict[str, float]()
    for prefix, model in models.items():
        scores = measure_split(run, split, model)
        metrics |= metrics_of(scores, f"{prefix}{split}/")
        tell_doubts(run, scores)
        if prefix == next(iter(models)):
            draw(scores, place, inside=None if pictures else folder.path)
    part = run.splits[split]
    return Evaluation(
        folder.path,
        step,
        split,
        samples_taken(run, part),
        metrics,
        left_out(run, split),
        place,
        changed,
        class_names(part.dataset),
    )


def evaluate_once(
    folder: RunFolder,
    composed: Composed,
    project: Project,
    *,
    split: str,
    checkpoint: str,
    weights: str | None,
) -> tuple[dict[str, Any], bool]:
    """Evaluate a finished run's checkpoint on a split, unless its summary has the result already.

    The arguments are those of `evaluate_checkpoint`. With overrides that change a result, it is
    neither taken from the summary nor recorded there.

    Returns:
        `step`, `samples` and `metrics`, and whether they were recorded just now.
    """
    which = "best" if checkpoint == composed.cfg.evaluate.monitor else checkpoint
    step = kept_checkpoints.choose_checkpoint(folder.checkpoints, which).step
    name = "-".join(filter(None, (split, f"{step:08d}", weights)))
    summary, changed = read_mapping(folder.summary, shapes.SUMMARY), saved.changes(folder, composed)
    recorded = summary.get("evaluations", {})
    if name in recorded and not changed:
        return recorded[name], False
    evaluation = evaluate_checkpoint(
        folder, composed, project, split=split, checkpoint=which, weights=weights
    )
    result = {
        "step": step,
        "samples": evaluation.samples,
        "time_ms": time.time_ns() // 1_000_000,
        "metrics": evaluation.metrics,
    }
    if not changed:
        write_json(folder.summary, {**summary, "evaluations": {**recorded, name: result}})
    return result, not changed


def _require_split(split: str, composed: Composed) -> None:
    """Raise a ConfigError unless there is such a split, and no override limits another."""
    splits = dict.fromkeys((*SPLITS, *splits_in(composed.cfg.dataset)))
    ConfigError.raise_if(
        split not in splits,
        "--split",
        "no such split",
        split,
        ", ".join(splits),
        nearest(split, splits),
    )
    ConfigError.raise_if(
        not split.startswith("valid")
        and any(
            override.lstrip("+").startswith("evaluate.limit=") for override in composed.overrides
        ),
        "evaluate.limit",
        f"limits the validation split, not {split}",
        composed.cfg.evaluate.limit,
        hint="leave it out",
    )


def _set_classes(cfg: DictConfig, project: Project, classes: Sequence[str]) -> None:
    """Set the run's class names in samewise's data sets, unless the config names others."""
    # Data that lack a class then keep the numbers of the other classes
    for name in splits_in(cfg.dataset):
        node: Any = cfg.dataset.get(name)
        if (
            not isinstance(node, DictConfig)
            or not str(node.get("_target_")).startswith(OURS)
            or node.get("classes") is not None
        ):
            continue
        taken = inspect.signature(
            locate(node["_target_"], f"dataset.{name}", project.packages)
        ).parameters.get("classes")
        if taken is not None and taken.default is None:
            with open_dict(node):
                node["classes"] = list(classes)


def _require_same_classes(
    run: Run, data: Mapping[str, Mapping[str, Any]], classes: Sequence[str]
) -> None:
    """Raise a ConfigError if a split numbers its classes in another way than in training."""
    for name, split in run.splits.items():
        labels = class_names(split.dataset)
        if not classes or labels in (classes[: len(labels)], data.get(name, {}).get("classes")):
            continue
        if unknown := [x for x in labels if x not in classes]:
            message = f"has classes that the run was not trained on: {first_few(unknown, 10)}"
        else:
            label, here, there = next(
                (label, *pair)
                for label, pair in enumerate(zip_longest(labels, classes))
                if pair[0] != pair[1]
            )
            message = (
                f"numbers classes in another way than in training: {label} is {here!r} "
                f"here, and was {there!r}"
            )
        node: Any = run.config.dataset[name]
        has_classes = isinstance(node, DictConfig) and node.get("classes") is not None
        hint = (
            "leave out the override of "
            f"dataset.{'classes' if 'classes' in run.config.dataset else f'{name}.classes'}: "
            "the run's classes are then used"
        )
        raise ConfigError(
            Problem(
                f"dataset.{name}",
                message,
                first_few(labels, 20),
                first_few(classes, 20),
                hint
                if has_classes
                else "leave out samples of other classes, and number the others as in training",
            )
        )
