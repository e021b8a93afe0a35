"""One pass over a split: batches are measured on their device, and the results are combined in
batch order.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from samewise.runner.data import streams
from samewise.runner.data.device import Prefetcher, copied, prefetch_one
from samewise.runner.data.keyed import evaluation_keys
from samewise.runner.data.loading import Loader
from samewise.runner.errors import ConfigError, Problem, first_few, first_line, nearest, raised_at
from samewise.runner.interfaces import Batch, Recipe, Scores
from samewise.runner.records.files import require_no_link
from samewise.runner.records.ranking import best_of
from samewise.runner.tracking.best import best_so_far
from samewise.runner.training.run import Run, Split


def evaluate(run: Run) -> None:
    """Evaluate the trained model and those of callbacks on the validation split.

    Log, compare with the best, inform the schedule.
    """
    scores = validate(run)
    metrics = {
        name: value
        for split, scored in scores.items()
        for name, value in metrics_of(scored, f"{split}/").items()
    }
    tell_doubts(run, *scores.values())
    run.progress.metrics, run.recorder.scores, run.progress.evaluated = metrics, scores, run.step
    run.log({**metrics, "epoch": run.epoch})
    _compare_with_best(run)
    run.schedule.after_evaluation(metrics)
    for callback in run.recorder.called():
        callback.on_evaluation(run.recorder.view, dict(metrics))


def validate(run: Run) -> dict[str, Scores]:
    """The scores of each of `models_to_evaluate` on the validation split: `valid`, `ema/valid`."""
    return {
        f"{prefix}valid": measure_split(run, "valid", model)
        for prefix, model in models_to_evaluate(run).items()
    }


def metrics_of(scores: Scores, prefix: str = "valid/") -> dict[str, float]:
    """The computed metrics, as plain numbers, under their names with a prefix.

    A ConfigError if one is something else.
    """
    metrics: Any = scores.compute()
    if not isinstance(metrics, dict):
        raise unfit(
            scores,
            f"compute returns {type(metrics).__name__}",
            'metrics by name: {"accuracy": 0.98}',
        )
    found = {f"{prefix}{name}": value for name, value in cast("dict[str, Any]", metrics).items()}
    for name, value in found.items():
        if not isinstance(value, int | float):
            try:
                found[name] = (
                    float(value) if hasattr(value, "__float__") else _not_a_number(name, value)
                )
            except (TypeError, ValueError, RuntimeError):  # a tensor or an array of several
                _not_a_number(name, value)
    return found


def _not_a_number(name: str, value: object) -> NoReturn:
    shown = (
        f"{type(value).__name__} of shape {list(shape)}"
        if (shape := getattr(value, "shape", None))
        else value
    )
    raise ConfigError(Problem(name, "this metric is not a number", shown, "a number"))


def tell_doubts(run: Run, *scores: Scores) -> None:
    """Print warnings about computed metrics, each once."""
    for doubt in [doubt for scored in scores for doubt in scored.doubts()]:
        tell(run, doubt)


def tell(run: Run, caution: Problem) -> None:
    """Print a warning, once in a training."""
    if caution not in run.recorder.cautions:
        run.recorder.cautions.append(caution)
        if run.strategy.peers.is_main:
            print(f"warning: {caution}", file=sys.stderr)


def draw(scores: Scores, folder: Path, *, inside: Path | None = None) -> None:
    """Save the pictures and other files of an evaluation.

    A failure gives a warning, since it is no reason to lose a run.

    The folder is created if missing. No link in it is written through, and none leads out of
    `inside`, the run's folder if it is in one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_no_link(
            *folder.iterdir(), *(one for one in (folder, *folder.parents) if inside in one.parents)
        )
        scores.save_pictures(folder)
    except Exception as error:
        reason = f"not all pictures could be drawn: {type(error).__name__}: {first_line(error)}"
        print(f"warning: {Problem(str(folder), reason, hint=raised_at(error))}", file=sys.stderr)


def models_to_evaluate(run: Run, weights: str | None = None) -> dict[str, nn.Module]:
    """The trained model under an empty prefix, and those of callbacks under theirs (`ema/`).

    With `weights` only the one of that name.

    ConfigError if no callback keeps such weights.
    """
    kept = {
        name: model
        for callback in run.callbacks.values()
        for name, model in callback.models().items()
    }
    if weights:
        require_weights(weights, kept)
        return {f"{weights}/": kept[weights]}
    return {"": run.model} | {f"{name}/": model for name, model in kept.items()}


def require_weights(name: str, kept: Iterable[str]) -> None:
    """Raise a ConfigError unless a callback keeps weights of that name in addition to the trained
    ones.
    """
    known = sorted(kept)
    if name not in known:
        expected = (
            ", ".join(known)
            if known
            else "only the trained weights: no callback of the run keeps others, as `ema` does"
        )
        raise ConfigError(
            Problem(
                "--weights",
                "the run does not have these weights",
                name,
                expected,
                nearest(name, known),
            )
        )


def measure_split(run: Run, split: str, model: nn.Module) -> Scores:
    """The scores of one model on one split."""
    part = run.splits[split]
    scores = run.recipe.scores(part.dataset)
    with run.strategy.evaluating(model), evaluating(model):
        batches = zip(_share(run, part), _on_device(run, loader_of(run, part)), strict=True)
        # It may return the same tensors each time
        mine = [copied(measure_batch(run, model, number, batch)) for number, batch in batches]
        for outcome in run.strategy.peers.collect(mine):
            scores.add(outcome)
    return scores


def unfit(part: Recipe | Scores, message: str, expected: str) -> ConfigError:
    """The error that a part of a recipe does not do what evaluations need."""
    return ConfigError(Problem("recipe", f"{type(part).__name__}.{message}", expected=expected))


def require_monitored(run: Run, names: Iterable[str]) -> None:
    """Raise a ConfigError unless the metrics of `evaluate.monitor` and `evaluate.also` are
    computed.
    """
    require_computed(run, monitored(run), names)


def watched(run: Run) -> dict[str, str]:
    """By path in the config: the metrics by which callbacks and the schedule decide during
    training.
    """
    found = {
        f"callbacks.{name}.{key}": metric
        for name, callback in run.callbacks.items()
        for key, metric in callback.watched_metrics().items()
    }
    return {**run.schedule.watched_metrics(), **found}


def monitored(run: Run) -> list[tuple[str, str]]:
    """The metrics that the config wants: each with its path there."""
    return [
        ("evaluate.monitor", run.evaluate.monitor),
        *(("evaluate.also", name) for name in run.evaluate.also),
    ]


def require_computed(run: Run, wanted: Sequence[tuple[str, str]], names: Iterable[str]) -> None:
    """Raise a ConfigError unless all wanted metrics, each with its path in the config, are
    computed.
    """
    known, computed = sorted(names), "no such metric is computed"
    missing = [
        (path, name, _choice_with(run, name, known) or nearest(name, known))
        for path, name in wanted
        if name not in known
    ]
    if missing:
        raise ConfigError(
            *(Problem(path, computed, name, ", ".join(known), hint) for path, name, hint in missing)
        )


def _choice_with(run: Run, monitor: str, known: Sequence[str]) -> str:
    """The choice that adds a metric, if the recipe takes metrics by name.

    Empty if there is none.
    """
    choices = [
        file.name.removesuffix(".yaml")
        for file in resources.files("samewise.configs").joinpath("metrics").iterdir()
    ]
    split, _, name = monitor.rpartition("/")
    if name not in choices or "metrics" not in inspect.signature(type(run.recipe)).parameters:
        return ""
    return (
        f"metrics=[{','.join([*(one for one in choices if f'{split}/{one}' in known), name])}] "
        "computes it"
    )


def first_batch(run: Run, split: str, samples: int) -> Batch:
    """The first samples of a split on the device, as in evaluation, before the batch transforms."""
    part = run.splits[split]
    key = next(evaluation_keys(len(part.dataset), samples))
    return run.to_device(next(iter(Loader(part.keyed, lambda: iter([key])))))


def _on_device(run: Run, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches on the model's device; on CUDA the next one is sent in advance."""
    if run.strategy.device.type != "cuda":
        return map(run.to_device, batches)
    send = Prefetcher(run.strategy.device, run.to_device, pin=run.config.loader.pin_memory).send
    return (take() for take in prefetch_one(map(send, batches)))


def measure_batch(run: Run, model: nn.Module, number: int, batch: Batch) -> Any:
    """What the recipe measures of a batch on the device, with the random numbers of this batch's
    number.
    """
    streams.enter(run.seed, "eval", number)
    transformed = run.transforms["eval"](batch)
    with run.precision.autocast():
        return run.recipe.measure(model, transformed)


def _share(run: Run, split: Split) -> Sequence[int]:
    """The numbers of the batches that this process computes."""
    return run.strategy.peers.portion(-(-samples_taken(run, split) // run.evaluate.batch_size))


def samples_taken(run: Run, split: Split) -> int:
    """The number of samples that an evaluation takes, from the first."""
    limit, size = run.evaluate.limit if split.name == "valid" else None, len(split.dataset)
    return size if limit is None else min(limit * run.evaluate.batch_size, size)


def left_out(run: Run, split: str) -> str:
    """What an evaluation takes, in words, if `evaluate.limit` leaves something out.

    Otherwise empty.
    """
    part = run.splits[split]
    taken, size = samples_taken(run, part), len(part.dataset)
    return (
        f"the first {taken:,} of {size:,} samples of {split} (evaluate.limit={run.evaluate.limit})"
        if taken < size
        else ""
    )


def loader_of(run: Run, split: Split) -> Loader:
    """The split's loader, made on first use and kept with its workers."""
    if split.loader is None:
        keys, is_cuda = (
            list(evaluation_keys(len(split.dataset), run.evaluate.batch_size)),
            run.strategy.device.type == "cuda",
        )
        split.loader = Loader(
            split.keyed,
            lambda: (keys[number] for number in _share(run, split)),
            run.config.loader,
            is_cuda=is_cuda,
            persistent=True,
        )
    return split.loader


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Within it, the model is in evaluation mode, without gradients.

    Afterwards each module is in the mode in which it was.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:  # including those of layers kept in eval mode
            module.training = training


def _compare_with_best(run: Run) -> None:
    require_monitored(run, run.progress.metrics)
    progress = run.progress
    progress.best = _better(run, progress.best, run.evaluate.monitor, str(run.evaluate.mode))
    progress.also = {
        name: _better(run, progress.also.get(name, {}), name, str(mode))
        for name, mode in run.evaluate.also.items()
    }


def find_earlier_best(run: Run) -> None:
    """Of metrics that `evaluate.also` names since the run is resumed, find the best evaluation
    before.
    """
    progress, added = (
        run.progress,
        {
            name: str(mode)
            for name, mode in run.evaluate.also.items()
            if name not in run.progress.also
        },
    )
    if not added or progress.evaluated < 0:
        return

    def find() -> dict[str, dict[str, float]]:
        best = best_so_far(run.folder.metrics, added, until=run.step)
        return {
            by: {name: one[name] for name in one if name in progress.metrics or name == "step"}
            for by, one in best.items()
        }

    progress.also |= (found := run.strategy.peers.first(find))
    if unknown := [name for name in added if name not in found]:
        words = (
            f"evaluations up to step {run.step} are not compared by {first_few(unknown, 3)}: "
            f"{run.folder.metrics.name} does not have them"
        )
        run.recorder.cautions.append(Problem("evaluate.also", words))


def _better(run: Run, known: dict[str, float], monitor: str, mode: str) -> dict[str, float]:
    """The last evaluation with its step if it is the best by a metric.

    Otherwise the best so far.
    """
    metrics = run.progress.metrics
    if math.isnan(metrics[monitor]):
        tell(
            run,
            Problem(
                monitor, "is not a number: this evaluation is not better than any other", "nan"
            ),
        )
    return dict(best_of(known, {**metrics, "step": run.step}, monitor, mode))
