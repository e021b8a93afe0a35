"""Compares a run with the one whose checkpoint it starts from (`resume_from`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from samewise.runner.config import compose
from samewise.runner.config.tree import at, flat, same
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.schedules.base import Schedule, Span
from samewise.runner.optim.states import needed
from samewise.runner.records import hugging_face, shapes
from samewise.runner.records.files import read_json


def cautions(config: Any, schedule: Schedule) -> list[Problem]:
    """Warn if the data's position or the learning rate jumps where the other run's training ended.

    Raises:
        ConfigError: No step remains to be trained.
    """
    taken = config.resume_from and read_json(
        Path(config.resume_from).expanduser() / "manifest.json", shapes.MANIFEST
    )
    if not taken:
        return []
    step, span = taken["step"], schedule.span
    require_left(config, step, span)
    then = Span(taken.get("steps_per_epoch", 0), taken.get("total_steps", 0))
    # samewise 0.1 wrote neither number
    if min(then.steps_per_epoch, then.total_steps, step) < 1:
        return []
    problems = list[Problem]()
    if then.steps_per_epoch != span.steps_per_epoch:
        was, now = (
            f"{round(step / x.steps_per_epoch, 2):g} epochs of {x.steps_per_epoch} steps"
            for x in (then, span)
        )
        message = (
            f"training continues at the checkpoint's step {step}, which was after {was}, and "
            f"is after {now} here"
        )
        problems.append(
            Problem(
                "resume_from",
                message,
                hint="use that run's batch_size to continue at the same place in the data",
            )
        )
    rates = zip(
        schedule.rates(step - 1, then),
        schedule.rates(step - 1, span),
        schedule.rates(step, span),
        strict=True,
    )
    moved = (
        (f"{before:.3g}", f"{after:.3g}")
        for before, same, after in rates
        # A schedule may move at this step anyway: only a rate that depends on the length is a jump
        if not math.isclose(before, same, rel_tol=1e-6)
    )
    if jump := next(((before, after) for before, after in moved if before != after), None):
        was, now = (f"{x.total_steps} steps ({x.steps_per_epoch} per epoch)" for x in (then, span))
        message = (
            f"over {was}, as in that run, this schedule's rate in step {step} is {jump[0]}; "
            f"over {now}, training continues with {jump[1]}"
        )
        problems.append(
            Problem(
                "scheduler",
                message,
                hint="scheduler=constant optimizer.lr=RATE continues with a rate of your choice",
            )
        )
    return problems


def class_cautions(
    config: Any, classes: Sequence[str], sizes: Mapping[str, Sequence[int]]
) -> list[Problem]:
    """Warn if resume_from or initialise.weights take over outputs for classes of other names.

    Args:
        config: The experiment's config.
        classes: The names of the training split's classes.
        sizes: The shapes of the model's weights, by name. The last with as many rows as there are
            classes is taken for the outputs.
    """
    start = config.initialise
    outputs = next(
        (name for name in reversed(list(sizes)) if list(sizes[name][:1]) == [len(classes)]), ""
    )
    excluded = (
        [start.exclude]
        if start and isinstance(start.exclude, str)
        else list(start.exclude)
        if start
        else []
    )
    sources = {"resume_from": config.resume_from}
    if (
        start
        and not any(fnmatchcase(outputs, pattern) for pattern in excluded)
        and outputs.startswith(start.into or "")
    ):
        sources["initialise.weights"] = start.weights
    problems = list[Problem]()
    for path, source in sources.items():
        at_step = Path(source or "").expanduser().resolve()
        if not source or not (at_step / "manifest.json").is_file():
            continue
        data = (read_json(at_step.parents[1] / "environment.json", shapes.ENVIRONMENT) or {}).get(
            "data", {}
        )
        there: list[str] = data.get("train", {}).get("classes", [])
        # Another number of classes needs weights of other shapes, which are refused elsewhere
        if len(there) == len(classes) and there != list(classes):
            label, here, was = next(
                (label, *pair)
                for label, pair in enumerate(zip(classes, there, strict=True))
                if pair[0] != pair[1]
            )
            message = (
                f"takes over outputs that were trained for other classes: {label} is {here!r} "
                f"here, and was {was!r} in that run"
            )
            hint = (
                f"initialise.weights={source} "
                f"'initialise.exclude=[{outputs.rpartition('.')[0] or outputs}.*]' starts "
                "with new ones"
                if outputs
                else ""
            )
            problems.append(Problem(path, message, source, hint=hint))
    return problems


def input_cautions(config: Any) -> list[Problem]:
    """Warn if images are normalised in another way than those that the weights were trained on.

    The comparison is with the config.json that timm writes beside its weights.
    """
    weights = str(config.initialise.weights or "") if config.initialise else ""
    folder = (
        hugging_face.snapshot(weights)
        if weights.startswith(hugging_face.PREFIX)
        else Path(weights).expanduser()
    )
    described: Any = read_json(folder / "config.json", {str: object}) if weights else None
    there: Any = (described or {}).get("pretrained_cfg")
    transforms = [x for part in ("sample", "batch") for x in config.transforms.eval.get(part) or ()]
    here = next(
        (
            {key: list(x[key]) for key in ("mean", "std")}
            for x in transforms
            if {"mean", "std"} <= x.keys()
        ),
        {},
    )
    values = {
        key: there[key]
        for key in here
        if isinstance(there, dict) and isinstance(there.get(key), list)
    }
    hint = " ".join(f"dataset.{key}=[{','.join(map(str, value))}]" for key, value in values.items())
    message = "is not that of the images on which the weights were trained"
    # One warning is enough, as its hint sets both values
    return [
        Problem("transforms.eval", f"{key} {message}", here[key], str(value), hint)
        for key, value in values.items()
        if here[key] != value
    ][:1]


def require_same_kind(
    here: Any,
    path: Path,
    optimizers: Mapping[str, Any],
    schedule: Schedule,
    state: Mapping[str, Any],
) -> None:
    """Raise a ConfigError unless optimizers and schedule can load a checkpoint's state.

    Args:
        here: The experiment's plain config.
        path: The checkpoint, in the folder of the run that wrote it unless it was moved.
        optimizers: Optimizers by phase.
        schedule: The schedule.
        state: The checkpoint's state.
    """
    there = _config_of(path)
    for name, optimizer in optimizers.items():
        if name not in state["optimizers"]:
            raise ConfigError(
                Problem(
                    "optimizer",
                    f"that run has none for the phase '{name}'",
                    expected="the same phases",
                )
            )
        saved = state["optimizers"][name]
        options, those = optimizer.param_groups[0].keys(), saved["param_groups"][0].keys()
        # Another version of the same optimizer may have more options, or fewer
        is_other = optimizer.defaults.keys() - those and those - options
        missing, option = (None if is_other else needed(optimizer, saved)) or ("", "")
        if option:
            message = "needs averages that the checkpoint does not have"
            raise ConfigError(
                Problem(
                    f"optimizer.{option}",
                    message,
                    optimizer.param_groups[0].get(option),
                    "as in that run",
                )
            )
        if is_other or missing:
            raise ConfigError(
                _other_kind("optimizer", (f"optimizer.{name}", "optimizer"), here, there)
            )
    try:
        schedule.load_state_dict(state["schedule"])
    except KeyError:
        raise ConfigError(_other_kind("scheduler", ("scheduler",), here, there)) from None


def frozen_by(here: Any, path: Path) -> str:
    """Name the settings that freeze parameters, here and in the run that wrote a checkpoint."""
    reasons = list[str]()
    for whole, where in ((here, "here"), (_config_of(path), "there")):
        rules = at(whole, "param_groups") or {}
        paths = [
            f"param_groups.{name}"
            for name, rule in rules.items()
            if isinstance(rule, Mapping) and rule.get("frozen") is True
        ]
        paths += ["initialise.frozen"] if at(whole, "initialise.frozen") else []
        reasons += (
            [f"{', '.join(paths)} {'freezes' if len(paths) == 1 else 'freeze'} some {where}"]
            if paths
            else []
        )
    return f" ({'; '.join(reasons)})" if reasons else ""


def changed_options(here: Any, path: Path) -> set[str] | None:
    """Return the optimizers' options that differ from those of the run that wrote a checkpoint.

    None if its config is missing.
    """
    if not (there := _config_of(path)):
        return None
    now, then = (
        dict(flat({key: at(whole, key) for key in ("optimizer", "param_groups")}, lists=False))
        for whole in (here, there)
    )
    return {
        path.rpartition(".")[2]
        for path in now.keys() | then.keys()
        if not same(now.get(path), then.get(path))
    }


def measures_the_same(here: Any, path: Path) -> bool:
    """Whether the run that wrote a checkpoint decided by the same metrics of the same data."""
    now, then = _measured(here), _measured(_config_of(path))
    return all(same(value, then[key]) for key, value in now.items() if key in then)


def _measured(whole: Any) -> dict[str, Any]:
    """Return the settings of a run's evaluation, and the metrics by which its parts decide."""
    parts = {key: at(whole, key) for key in ("evaluate", "scheduler", "callbacks")}
    deciding = {
        path: value
        for path, value in flat(parts)
        if path.rpartition(".")[2] in ("metric", "monitor", "mode")
    }
    return {key: at(whole, key) for key in ("recipe", "dataset", "transforms.eval")} | deciding


def _config_of(path: Path) -> Any:
    try:
        # The checkpoint is at checkpoints/step-N in its run's folder, unless it was moved
        return compose.load(path.resolve().parents[1] / "config.yaml").whole
    except ConfigError:
        return {}


def _other_kind(part: str, paths: Sequence[str], here: Any, there: Any) -> Problem:
    is_now, was = (
        next(
            (
                str(target).rpartition(".")[2]
                for path in paths
                if (target := at(whole, f"{path}._target_"))
            ),
            "another",
        )
        for whole in (here, there)
    )
    return Problem(part, f"it is {is_now} here, and {was} in that run", expected=f"the same {part}")


def require_left(config: Any, step: int, span: Span, reason: str | None = None) -> None:
    """Raise a ConfigError unless steps remain after `step`.

    Args:
        config: The experiment's config.
        step: The checkpoint's step.
        span: The length of this training.
        reason: A callback's reason to end training there.
    """
    hint = "raise callbacks.early_stopping.patience, or train without that callback"
    if reason is None and step < span.total_steps:
        return
    if reason is None:
        reason = (
            f"the checkpoint was taken at step {step}, and training ends at step {span.total_steps}"
        )
        hint = (
            f"raise max_epochs, to {step // span.steps_per_epoch + 1} or more"
            if step >= config.max_epochs * span.steps_per_epoch
            else ""
        )
        of_steps = (
            f"raise max_steps, to {step + 1} or more"
            if config.max_steps is not None and step >= config.max_steps
            else ""
        )
        hint = "; ".join(filter(None, (hint, of_steps)))
    raise ConfigError(
        Problem("resume_from", f"nothing is left to train: {reason}", config.resume_from, hint=hint)
    )
