"""Evaluates a model on a split: measures batches on the device, and adds results in batch order."""

import inspect
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from samewise.runner.data import streams
from samewise.runner.data.device import Prefetcher, copied, map_tensors, prefetch_one
from samewise.runner.data.keyed import evaluation_keys
from samewise.runner.data.loading import Loader
from samewise.runner.errors import ConfigError, Problem, first_line, nearest, raised_at
from samewise.runner.interfaces import Batch, Recipe, Scores
from samewise.runner.records.files import require_no_link
from samewise.runner.records.ranking import best_of
from samewise.runner.strategies.peers import alone
from samewise.runner.training.run import Run, Split


def evaluate(run: Run) -> None:
    """Evaluate the trained model and those of callbacks on the validation splits.

    Logs the metrics, compares them with the best, and gives them to schedule and callbacks.
    """
    run.recorder.notify("on_evaluation_start")
    scores = validate(run)
    metrics = {
        name: value
        for split, scored in scores.items()
        for name, value in metrics_of(scored, f"{split}/").items()
    }
    for callback in run.recorder.called():
        metrics |= callback.metrics()
    tell_doubts(run, *scores.values())
    run.progress.metrics, run.recorder.scores, run.progress.evaluated = metrics, scores, run.step
    run.log({**metrics, "epoch": run.epoch})
    _compare_with_best(run)
    run.schedule.after_evaluation(metrics)
    run.recorder.notify("on_evaluation", dict(metrics))


def validate(run: Run) -> dict[str, Scores]:
    """Return the scores of `models_to_evaluate` on the validation splits: `valid`, `ema/valid`."""
    return {
        f"{prefix}{split.name}": measure_split(run, split.name, model)
        for prefix, model in models_to_evaluate(run).items()
        for split in run.splits.values()
        if split.is_validation
    }


def metrics_of(scores: Scores, prefix: str = "valid/") -> dict[str, float]:
    """Compute the metrics, as plain numbers, by their names with a prefix.

    Raises:
        ConfigError: A metric is not a number.
    """
    # Each rank has the measurements of all, which a metric that synchronises would add again
    with alone():
        metrics: Any = scores.compute()
    if not isinstance(metrics, dict):
        raise unfit(
            scores,
            f"compute returns {type(metrics).__name__}",
            'metrics by name: {"accuracy": 0.98}',
        )
    numbers = {f"{prefix}{name}": value for name, value in cast("dict[str, Any]", metrics).items()}
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            try:
                numbers[name] = (
                    float(value) if hasattr(value, "__float__") else _not_a_number(name, value)
                )
            except (TypeError, ValueError, RuntimeError):  # a tensor or an array of several numbers
                _not_a_number(name, value)
    return numbers


def _not_a_number(name: str, value: object) -> NoReturn:
    raise ConfigError(
        Problem(
            name,
            "this metric is not a number",
            f"{type(value).__name__} of shape {list(shape)}"
            if (shape := getattr(value, "shape", None))
            else value,
            "a number",
        )
    )


def tell_doubts(run: Run, *scores: Scores) -> None:
    """Print warnings about computed metrics, each once."""
    with alone():
        doubts = [doubt for scored in scores for doubt in scored.doubts()]
    for doubt in doubts:
        tell(run, doubt)


def tell(run: Run, caution: Problem) -> None:
    """Print a warning, once in a training."""
    if caution not in run.recorder.cautions:
        run.recorder.cautions.append(caution)
        if run.strategy.peers.is_main and run.recorder.prints:
            print(f"warning: {caution}", file=sys.stderr)


def draw(scores: Scores, folder: Path, *, inside: Path | None = None) -> None:
    """Save the pictures and other files of an evaluation; warn if that fails.

    Args:
        scores: The scores to draw.
        folder: The folder, created if missing. Links in it are not followed.
        inside: The run's folder, if `folder` is in it: no folder between them may be a link.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a received folder a link may lead to any file of the user's
        require_no_link(
            *folder.iterdir(),
            *(parent for parent in (folder, *folder.parents) if inside in parent.parents),
        )
        with alone():
            scores.save_pictures(folder)
    # Code of the user's or of matplotlib may raise anything, and no picture is worth a run
    except Exception as error:
        reason = f"not all pictures could be drawn: {type(error).__name__}: {first_line(error)}"
        print(f"warning: {Problem(str(folder), reason, hint=raised_at(error))}", file=sys.stderr)


def models_to_evaluate(run: Run, weights: str | None = None) -> dict[str, nn.Module]:
    """Return the trained model under an empty prefix, and those of callbacks under `NAME/`.

    Args:
        run: The run.
        weights: The name of the only model to return, such as `ema`; None: all.

    Raises:
        ConfigError: No callback keeps such weights.
    """
    extra_models = {
        name: model
        for callback in run.callbacks.values()
        for name, model in callback.models().items()
    }
    if weights:
        require_weights(weights, extra_models)
        return {f"{weights}/": extra_models[weights]}
    return {"": run.model} | {f"{name}/": model for name, model in extra_models.items()}


def require_weights(name: str, names: Iterable[str]) -> None:
    """Raise a ConfigError unless a callback keeps weights of this name."""
    available = sorted(names)
    ConfigError.raise_if(
        name not in available,
        "--weights",
        "the run does not have these weights",
        name,
        ", ".join(available)
        if available
        else "only the trained weights: no callback of the run keeps others, as `ema` does",
        nearest(name, available),
    )


def measure_split(run: Run, split: str, model: nn.Module) -> Scores:
    """Return the scores of a model on a split, of which each process measures its share."""
    part = run.splits[split]
    scores = run.recipe.scores(part.dataset)
    with run.strategy.evaluating(model), evaluating(model):
        batches = zip(_share(run, part), _on_device(run, loader_of(run, part)), strict=True)
        # Copied, since a recipe may return the same tensors each time
        outcomes = [copied(measure_batch(run, model, number, batch)) for number, batch in batches]
        # In the batches' order, since floating-point sums depend on it
        for outcome in run.strategy.peers.collect(outcomes):
            with alone():
                scores.add(outcome)
    return scores


def unfit(part: Recipe | Scores, message: str, expected: str) -> ConfigError:
    """Return the error that a part of a recipe does not do what evaluations need."""
    return ConfigError(Problem("recipe", f"{type(part).__name__}.{message}", expected=expected))


def watched(run: Run) -> dict[str, str]:
    """Return the metrics by which callbacks and the schedule decide, by path in the config."""
    return {
        **run.schedule.watched_metrics(),
        **{
            f"callbacks.{name}.{key}": metric
            for name, callback in run.callbacks.items()
            for key, metric in callback.watched_metrics().items()
        },
    }


def monitored(run: Run) -> list[tuple[str, str]]:
    """Return the metrics that the config names, each after its path."""
    return [
        ("evaluate.monitor", run.evaluate.monitor),
        *(("evaluate.also", name) for name in run.evaluate.also),
    ]


def require_computed(run: Run, required: Sequence[tuple[str, str]], names: Iterable[str]) -> None:
    """Raise a ConfigError unless all required metrics, each after its path, are computed."""
    available = sorted(names)
    ConfigError.raise_all(
        Problem(
            path,
            "no such metric is computed",
            name,
            ", ".join(available),
            _choice_with(run, name, available) or nearest(name, available),
        )
        for path, name in required
        if name not in available
    )


def _choice_with(run: Run, monitor: str, available: Sequence[str]) -> str:
    """Return the hint that adds a metric, if the recipe takes metrics by name; else nothing."""
    choices = [
        file.name.removesuffix(".yaml")
        for file in resources.files("samewise.configs").joinpath("metrics").iterdir()
    ]
    split, _, name = monitor.rpartition("/")
    if name not in choices or "metrics" not in inspect.signature(type(run.recipe)).parameters:
        return ""
    return (
        f"metrics=[{','.join([*(x for x in choices if f'{split}/{x}' in available), name])}] "
        "computes it"
    )


def first_batch(run: Run, split: str, samples: int) -> Batch:
    """Return a split's first samples on the device, before evaluation's batch transforms."""
    part = run.splits[split]
    key = next(evaluation_keys(len(part.dataset), samples))
    return run.to_device(next(iter(Loader(part.keyed, lambda: iter([key])))))


def _on_device(run: Run, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches on the model's device; on CUDA the next one is sent in advance."""
    if run.strategy.device.type != "cuda":
        return map(run.to_device, batches)
    send = Prefetcher(run.strategy.device, run.to_device, pin=run.config.loader.pin_memory).send
    return (take() for take in prefetch_one(map(send, batches)))


def evaluation_batch(
    run: Run, outputs: Callable[[nn.Module, Batch], Any] | None, weights: str | None
) -> tuple[Batch, Any]:
    """Return the validation split's first batch and outputs for it (`RunView.evaluation_batch`)."""

    def call(model: nn.Module, batch: Batch) -> Any:
        # A recipe may change its batch in place
        return copied(batch), (outputs or run.recipe.measure)(model, batch)

    (model,) = models_to_evaluate(run, weights).values() if weights else (run.model,)
    versions = versions_of(model)
    with streams.preserve_generators(), run.strategy.evaluating(model), evaluating(model):
        batch = first_batch(run, "valid", run.evaluate.batch_size)
        results = map_tensors(lambda x: x.cpu().clone(), measure_batch(run, model, 0, batch, call))
    ConfigError.raise_if(
        versions_of(model) != versions, "callbacks", "one changes the model's weights or buffers"
    )
    return results


def versions_of(model: nn.Module) -> dict[tuple[str, int], tuple[int, int]]:
    """Return torch's counts of changes in place for the model's state, and the ids of buffers."""
    # Not of state_dict: making it lets FSDP's layers free the weights that they have gathered. A
    # parameter that such a layer replaces gets another key.
    versions = {(name, id(x)): (0, x._version) for name, x in model.named_parameters()}
    for path, module in model.named_modules():
        loose = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        versions |= {
            (f"{path}.{name}".lstrip("."), 0): (id(x), x._version)
            for name, x in module.named_buffers(recurse=False)
            if name not in loose
        }
    return versions


def measure_batch(
    run: Run,
    model: nn.Module,
    number: int,
    batch: Batch,
    measure: Callable[[nn.Module, Batch], Any] | None = None,
) -> Any:
    """Return what the recipe, or `measure`, gives for a batch, in the stream of its number."""
    # By the batch's number alone, so that any process may measure it
    streams.enter(run.seed, "eval", number)
    transformed = run.transforms["eval"](batch)
    with run.precision.autocast(), alone():
        return (measure or run.recipe.measure)(model, transformed)


def _share(run: Run, split: Split) -> Sequence[int]:
    """Return the numbers of the batches that this process computes."""
    return run.strategy.peers.portion(-(-samples_taken(run, split) // run.evaluate.batch_size))


def samples_taken(run: Run, split: Split) -> int:
    """Return the number of samples, from the first, that an evaluation measures."""
    limit, size = run.evaluate.limit if split.is_validation else None, len(split.dataset)
    return size if limit is None else min(limit * run.evaluate.batch_size, size)


def left_out(run: Run, split: str) -> str:
    """Describe the samples that an evaluation measures; empty if these are all."""
    part = run.splits[split]
    taken, size = samples_taken(run, part), len(part.dataset)
    return (
        f"the first {taken:,} of {size:,} samples of {split} (evaluate.limit={run.evaluate.limit})"
        if taken < size
        else ""
    )


def loader_of(run: Run, split: Split) -> Loader:
    """Return the split's loader, made on first use and kept with its workers."""
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
    """Put a model into evaluation mode, without gradients, for a block.

    Afterwards each module is in its earlier mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])
        # `train` also switches layers that a model keeps in evaluation mode, so restore each
        for module, training in modes:
            module.training = training


def _compare_with_best(run: Run) -> None:
    require_computed(run, monitored(run), run.progress.metrics)
    progress = run.progress
    progress.best = _better(run, progress.best, run.evaluate.monitor, str(run.evaluate.mode))
    progress.also = {
        name: _better(run, progress.also.get(name, {}), name, str(mode))
        for name, mode in run.evaluate.also.items()
    }


def _better(run: Run, best: dict[str, float], monitor: str, mode: str) -> dict[str, float]:
    """Return the better of the best evaluation so far and the last one, with its step."""
    metrics = run.progress.metrics
    if math.isnan(metrics[monitor]):
        tell(
            run,
            Problem(
                monitor, "is not a number: this evaluation is not better than any other", "nan"
            ),
        )
    return dict(best_of(best, {**metrics, "step": run.step}, monitor, mode))
