"""A rehearsal of the evaluation, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samewise.runner.data.copies import deep_copy
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.streams import draws
from samewise.runner.errors import Problem, first_few
from samewise.runner.interfaces import Batch, Scores
from samewise.runner.records.summary import LEVELS
from samewise.runner.training.evaluation import (
    evaluating,
    loader_of,
    measure_batch,
    metrics_of,
    models_to_evaluate,
    monitored,
    require_computed,
    tell,
    unfit,
    watched,
)
from samewise.runner.training.run import Run


def rehearse(run: Run) -> None:
    """Evaluate a batch (two, if they are of one sample) before the first step, so that errors in
    the evaluation show now and not an epoch later.

    ConfigError if `evaluate.monitor`, one of `evaluate.also`, or a metric that a callback or the
    schedule decides by is not among the metrics; or if what the recipe measures with is not what it
    should be.
    """
    part = run.splits["valid"]
    own = not type(run.recipe).__module__.startswith("samewise.")
    scores = run.recipe.scores(part.dataset)
    second = run.recipe.scores(part.dataset) if own else None
    before, shared, single = _versions(run.model), _shared(scores, second), _single_samples(run)
    with _noting_vectors(run, single) as normed, evaluating(run.model):
        for number, batch in enumerate(
            islice(loader_of(run, part), 2 if run.evaluate.batch_size == 1 else 1)
        ):
            sent = run.to_device(batch)
            if number == 0:
                # Some transforms write into a batch
                _tell_of_randomness(run, part.keyed.dataset, deep_copy(sent))
            scores.add(measure_batch(run, run.model, number, sent))
            if run.model.training:
                raise unfit(
                    run.recipe,
                    "measure leaves the model in training mode",
                    "an evaluation that leaves the model as it is",
                )
    for norm in normed[:1]:
        message = (
            f"step {single[0]} fails: some of its micro-batches, of an epoch's last batch of "
            f"{single[1]}, have one sample, and {norm} needs several"
        )
        tell(
            run,
            Problem(
                "loader.drop_last", message, run.plan.drop_last, hint="true, or another batch_size"
            ),
        )
    changed = [
        name
        for (name, at), value in _versions(run.model).items()
        if before.get((name, at), value) != value
    ]
    if {*changed} & {name for name, _ in run.model.named_parameters()}:
        raise unfit(
            run.recipe,
            f"measure changes the model's weights ({first_few(changed, 3)})",
            "an evaluation that leaves the model as it is",
        )
    if changed:
        run.recorder.level = min(run.recorder.level, "R1", key=[*LEVELS].index)
        message = (
            f"an evaluation changes the model's buffers ({first_few(changed, 3)}): how often, "
            "and on how many ranks, it evaluates changes the training"
        )
        tell(
            run,
            Problem(
                f"recipe ({type(run.recipe).__name__}.measure)",
                message,
                hint="change them in training only: if self.training",
            ),
        )
    if scores is second or _shared(scores, second) != shared:
        collects = [
            f" with one '{name}'"
            for name, value in _shared(scores, second).items()
            if shared.get(name) != value
        ]
        message = (
            "the same object each time"
            if scores is second
            else f"objects{collects[0]} for all evaluations"
        )
        raise unfit(
            run.recipe,
            f"scores returns {message}",
            "a new one for each evaluation, which otherwise adds up all of them",
        )
    metrics = {*metrics_of(scores), *(f"valid/{name}" for name in scores.sometimes)}
    wanted = monitored(run)
    others = [
        (path, metric)
        for path, metric in watched(run).items()
        if metric not in {name for _, name in wanted}
    ]
    require_computed(
        run,
        [*wanted, *others],
        [f"{prefix}{name}" for prefix in models_to_evaluate(run) for name in metrics],
    )


def _single_samples(run: Run) -> tuple[int, int]:
    """The first step in which a micro-batch has a single sample, as in an epoch's last batch, and
    the size of its batch; (0, 0) if none has.
    """
    plan, last = run.plan, run.plan.steps_per_epoch - 1
    bounds = [plan.bounds(last, number) for number in range(run.micro_batches)]
    single = 1 in [stop - start for _, start, stop in bounds] and last < run.total_steps
    return (last + 1, plan.size(last)) if single else (0, 0)


@contextmanager
def _noting_vectors(run: Run, single: tuple[int, int]) -> Generator[list[str]]:
    """Note the batch norms to be trained that get one value of each channel for a sample: a batch
    of a single one would have no variance.
    """
    names, hooks = list[str](), list[RemovableHandle]()
    size = min(run.evaluate.batch_size, len(run.splits["valid"].dataset))

    def note(name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if (
            isinstance(inputs[0], torch.Tensor)
            and inputs[0].shape[:1] == (size,)
            and inputs[0].numel() == size * inputs[0].shape[1]
        ):
            names.append(name)

    for name, module in (
        run.model.named_modules() if single[0] and run.config.compile.mode == "off" else ()
    ):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.training:
            hooks.append(
                module.register_forward_pre_hook(partial(note, f"{name} ({type(module).__name__})"))
            )
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _tell_of_randomness(run: Run, dataset: Any, batch: Batch) -> None:
    """Warn of transforms that alter what is evaluated at random, as one for training does: they
    draw from a generator.
    """
    stages: dict[str, Callable[[], Any]] = {"batch": lambda: run.transforms["eval"](batch)}
    if isinstance(dataset, WithTransform) and not draws(
        lambda: dataset.inner[0]
    ):  # otherwise a data set of the user's own means it
        stages["sample"] = lambda: dataset[0]
    for stage, transform in stages.items():
        if draws(transform):
            message = (
                "draw random numbers: metrics are of samples that were altered at random, in "
                "each evaluation alike"
            )
            tell(
                run,
                Problem(
                    f"transforms.eval.{stage}",
                    message,
                    hint="augmentation belongs in transforms.train",
                ),
            )


def _versions(model: nn.Module) -> dict[tuple[str, int], tuple[int, int]]:
    """What tells whether a tensor of the model's state was changed in place, which torch counts, or
    a buffer was replaced.

    Not by state_dict, in which FSDP's layers give up what they have gathered; a parameter that such
    a layer replaces is another key.
    """
    found = {(name, id(one)): (0, one._version) for name, one in model.named_parameters()}
    for path, module in model.named_modules():
        loose = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        held = [
            (name, one) for name, one in module.named_buffers(recurse=False) if name not in loose
        ]
        found |= {(f"{path}.{name}".lstrip("."), 0): (id(one), one._version) for name, one in held}
    return found


def _shared(one: Scores, other: Scores | None) -> dict[str, str]:
    """What two accumulators have in common that could collect measurements, such as a list of their
    class: its contents, by name.
    """
    if other is None:
        return {}
    names = {
        *vars(one),
        *(
            name
            for kind in type(one).__mro__[:-1]
            for name in vars(kind)
            if not name.startswith("__")
        ),
    }
    both = {name: (getattr(one, name, None), getattr(other, name, None)) for name in sorted(names)}
    return {
        name: repr(value)
        for name, (value, same) in both.items()
        if value is same and isinstance(value, list | dict | set | torch.Tensor)
    }
