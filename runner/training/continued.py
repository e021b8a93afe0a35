"""Continues from another run's checkpoint (`resume_from`), and compares both runs."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samewise.runner.config import compose
from samewise.runner.config.tree import at, flat, same
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.optim.schedules.base import Schedule, Span
from samewise.runner.records import checkpoint, shapes
from samewise.runner.records.files import read_json
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore


def continue_from(run: Run, reference: str) -> dict[str, Any]:
    """Restore another run's checkpoint, and return the state of its trace."""
    path = Path(reference).expanduser()
    state = run.strategy.peers.first(partial(checkpoint.read, path))
    expected = "the same model, optimizer and phases"
    try:
        _require_same_kind(
            run.composed.whole,
            path,
            {phase.spec.name: phase.optimizer for phase in run.phases},
            run.schedule,
            state,
        )
        changed = run.strategy.peers.first(partial(_changed_options, run.composed.whole, path))
        # Without its best evaluations, whose checkpoints are in the other run's folder
        restore(
            run,
            {
                **checkpoint.load_sharded(state, path, run.strategy.layout.empty),
                "best": {},
                "also": {},
            },
            changed,
        )
        if not run.strategy.peers.first(partial(_measures_the_same, run.composed.whole, path)):
            for part in (run.schedule, *run.callbacks.values()):
                part.forget_evaluations()
    except (RuntimeError, ValueError, KeyError, ConfigError) as error:
        reason, own_hint = first_line(error), ""
        if isinstance(error, ConfigError):
            problem = error.problems[0]
            expected, own_hint = problem.expected or expected, problem.hint
            reason = f"{problem.path}: {problem.message}"
        raise ConfigError(
            Problem(
                "resume_from",
                f"does not fit this experiment: {reason}",
                str(path),
                expected,
                f"{own_hint or 'leave out the overrides that change it'}; or "
                f"initialise.weights={reference} takes the weights alone, and "
                "initialise.exclude=[PATTERN] leaves out those of other shapes",
            )
        ) from error
    _require_left(run.config, run.step, run.schedule.span, run.recorder.stop_reason())
    return {"trace": state.get("trace", 0)}


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
    _require_left(config, step, span)
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
    moved = (
        (f"{before:.3g}", f"{after:.3g}")
        for before, same, after in zip(
            schedule.rates(step - 1, then),
            schedule.rates(step - 1, span),
            schedule.rates(step, span),
            strict=True,
        )
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


def _require_same_kind(
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
        ConfigError.raise_if(
            name not in state["optimizers"],
            "optimizer",
            f"that run has none for the phase '{name}'",
            expected="the same phases",
        )
        saved = state["optimizers"][name]
        own_kind, kind = (
            at(x, f"optimizer.{name}._target_") or at(x, "optimizer._target_")
            for x in (here, there)
        )
        # Another version of the same optimizer may have more options, or fewer
        options, those = (x.keys() for x in (optimizer.param_groups[0], saved["param_groups"][0]))
        is_other = optimizer.defaults.keys() - those and those - options
        if is_other or (kind and own_kind != kind):
            raise ConfigError(
                _other_kind("optimizer", (f"optimizer.{name}", "optimizer"), here, there)
            )
    try:
        schedule.load_state_dict(state["schedule"])
    except KeyError:
        raise ConfigError(_other_kind("scheduler", ("scheduler",), here, there)) from None


def _changed_options(here: Any, path: Path) -> set[str] | None:
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


def _measures_the_same(here: Any, path: Path) -> bool:
    """Whether the run that wrote a checkpoint decided by the same metrics of the same data."""
    now, then = _measured(here), _measured(_config_of(path))
    return all(same(value, then[key]) for key, value in now.items() if key in then)


def _measured(whole: Any) -> dict[str, Any]:
    """Return the settings of a run's evaluation, and the metrics by which its parts decide."""
    deciding = {
        path: value
        for path, value in flat(
            {key: at(whole, key) for key in ("evaluate", "scheduler", "callbacks")}
        )
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


def _require_left(config: Any, step: int, span: Span, reason: str | None = None) -> None:
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
        hint = "; ".join(
            filter(
                None,
                (
                    hint,
                    f"raise max_steps, to {step + 1} or more"
                    if config.max_steps is not None and step >= config.max_steps
                    else "",
                ),
            )
        )
    raise ConfigError(
        Problem("resume_from", f"nothing is left to train: {reason}", config.resume_from, hint=hint)
    )
