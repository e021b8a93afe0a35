"""Rehearses the evaluation, before the first step."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import nn

from samewise.runner.data.copies import deep_copy
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.streams import draws
from samewise.runner.errors import Problem, first_few
from samewise.runner.interfaces import Batch, Scores
from samewise.runner.strategies.peers import alone
from samewise.runner.training.evaluation import (
    evaluating,
    loader_of,
    measure_batch,
    metrics_of,
    models_to_evaluate,
    monitored,
    require_computed,
    unfit,
    versions_of,
    watched,
)
from samewise.runner.training.run import Caution, Guard, Run, Split


@final
class Rehearsal(Guard):
    """Evaluates a batch of each split before the first step, to find errors before an epoch.

    Batches of a single sample are two.
    """

    def before_evaluation(self, run: Run) -> Iterable[Caution]:
        """Evaluate the batches.

        Raises:
            ConfigError: A metric is not computed by which the run, a callback or the schedule
                decides; or the recipe's `measure` or `scores` does not keep to its interface.
        """
        metrics = set[str]()
        for part in run.splits.values():
            if part.is_validation:
                metrics |= yield from self._evaluate(run, part)
        _require_metrics(run, metrics)

    def _evaluate(self, run: Run, part: Split) -> Generator[Caution, None, set[str]]:
        """Evaluate a split's batch, and return the names of its metrics."""
        own = not type(run.recipe).__module__.startswith("samewise.")
        versions = versions_of(run.model)
        scores = run.recipe.scores(part.dataset)
        second = run.recipe.scores(part.dataset) if own else None
        shared = _shared(scores, second)
        with evaluating(run.model):
            # A single sample does not stand for the split
            number_of_batches = 2 if run.evaluate.batch_size == 1 else 1
            for number, batch in enumerate(islice(loader_of(run, part), number_of_batches)):
                sent = run.to_device(batch)
                if number == 0 and part.name == "valid":
                    # A copy, since some transforms write into a batch
                    yield from _randomness(run, part.keyed.dataset, deep_copy(sent))
                measured = measure_batch(run, run.model, number, sent)
                if updated := [name for name, value in vars(scores).items() if _is_updated(value)]:
                    raise unfit(
                        run.recipe,
                        f"measure updates the metric '{updated[0]}' of its scores, on each rank "
                        "with another share of the batches",
                        "a metric that Scores.add updates with what measure returns",
                    )
                with alone():
                    scores.add(measured)
                if run.model.training:
                    raise unfit(
                        run.recipe,
                        "measure leaves the model in training mode",
                        "an evaluation that leaves the model as it is",
                    )
        yield from _changed_tensors(run, versions)
        _require_new_scores(run, scores, second, shared)
        prefix = f"{part.name}/"
        return {*metrics_of(scores, prefix), *(prefix + name for name in scores.sometimes)}


def _changed_tensors(
    run: Run, before: Mapping[tuple[str, int], tuple[int, int]]
) -> Iterator[Caution]:
    """Warn of buffers that the evaluation has changed, or raise an error for parameters."""
    changed = [
        name
        for (name, at), value in versions_of(run.model).items()
        if before.get((name, at), value) != value
    ]
    if {*changed} & {name for name, _ in run.model.named_parameters()}:
        raise unfit(
            run.recipe,
            f"measure changes the model's weights ({first_few(changed, 3)})",
            "an evaluation that leaves the model as it is",
        )
    if changed:
        message = (
            f"an evaluation changes the model's buffers ({first_few(changed, 3)}): how often, "
            "and on how many ranks, it evaluates changes the training"
        )
        path = f"recipe ({type(run.recipe).__name__}.measure)"
        yield Caution(
            Problem(path, message, hint="change them in training only: if self.training"), "R1"
        )


def _require_new_scores(
    run: Run, scores: Scores, second: Scores | None, shared: Mapping[str, str]
) -> None:
    """Raise a ConfigError if the recipe's scores share state, which would add up."""
    changed = [name for name, value in _shared(scores, second).items() if shared.get(name) != value]
    if scores is second:
        message = "the same object each time"
    elif changed:
        message = f"objects with one '{changed[0]}' for all evaluations"
    else:
        return
    raise unfit(
        run.recipe,
        f"scores returns {message}",
        "a new one for each evaluation; otherwise they add up",
    )


def _require_metrics(run: Run, metrics: Iterable[str]) -> None:
    """Raise a ConfigError unless all metrics are computed by which something decides."""
    added = tuple(name for callback in run.callbacks.values() for name in callback.adds)
    # Callbacks know only the beginnings of names before the first step
    required = [(path, name) for path, name in monitored(run) if not name.startswith(added)]
    names = {name for _, name in monitored(run)}
    deciding = [
        (path, metric)
        for path, metric in watched(run).items()
        if metric not in names and not metric.startswith(added)
    ]
    require_computed(
        run,
        [*required, *deciding],
        [f"{prefix}{name}" for prefix in models_to_evaluate(run) for name in metrics],
    )


def _is_updated(part: object) -> bool:
    """Whether a part of scores is a metric of torchmetrics, or has some, with data in it."""
    return any(
        getattr(module, "update_called", False)
        for module in (part.modules() if isinstance(part, nn.Module) else ())
    )


def _randomness(run: Run, dataset: Any, batch: Batch) -> Iterator[Caution]:
    """Warn of evaluation transforms that draw random numbers."""
    stages: dict[str, Callable[[], Any]] = {"batch": lambda: run.transforms["eval"](batch)}
    # A data set that draws itself does so on purpose
    if isinstance(dataset, WithTransform) and not draws(lambda: dataset.inner[0]):
        stages["sample"] = lambda: dataset[0]
    message = (
        "draw random numbers: metrics are measured on samples altered at random, in the same way "
        "in each evaluation"
    )
    hint = "augmentation belongs in transforms.train"
    for stage, transform in stages.items():
        if draws(transform):
            yield Caution(Problem(f"transforms.eval.{stage}", message, hint=hint))


def _shared(scores: Scores, other: Scores | None) -> dict[str, str]:
    """Return the collections that two accumulators share, such as a list of their class."""
    if other is None:
        return {}
    names = {
        *vars(scores),
        *(
            name
            for kind in type(scores).__mro__[:-1]
            for name in vars(kind)
            if not name.startswith("__")
        ),
    }
    both = {
        name: (getattr(scores, name, None), getattr(other, name, None)) for name in sorted(names)
    }
    return {
        name: repr(value)
        for name, (value, same) in both.items()
        if value is same and isinstance(value, list | dict | set | torch.Tensor)
    }
