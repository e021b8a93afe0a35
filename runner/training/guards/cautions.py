"""Cautions about settings and data, before a training begins: what is sound, but hardly meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from omegaconf import DictConfig

from samewise.runner.config.compose import Composed
from samewise.runner.data.order import InOrder, Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import Problem, first_few
from samewise.runner.interfaces import Batch
from samewise.runner.processes import this_process
from samewise.runner.training.run import Split


def order_cautions(composed: Composed) -> list[Problem]:
    """A warning if a set in the user's code may have another order in another process: in a script
    or notebook, or under a debugger.
    """
    if this_process.has_fixed_hash_seed() or not composed.code.files:
        return []
    words = (
        "is not fixed, so a set of strings in your code has another order in each process, and "
        "perhaps other results"
    )
    return [
        Problem(
            "PYTHONHASHSEED",
            words,
            os.environ.get("PYTHONHASHSEED"),
            hint="start Python with PYTHONHASHSEED=0, as the samewise command does",
        )
    ]


def max_steps_cautions(composed: Composed, plan: Plan) -> list[Problem]:
    """A warning if training ends before the given `max_steps`."""
    cfg, steps = composed.cfg, composed.cfg.max_epochs * plan.steps_per_epoch
    if (
        cfg.max_steps is None
        or cfg.max_steps <= steps
        or not any(one.lstrip("+").startswith("max_steps=") for one in composed.overrides)
    ):
        return []
    words = f"is not reached: max_epochs={cfg.max_epochs} ends training after {steps} steps"
    return [
        Problem(
            "max_steps",
            words,
            cfg.max_steps,
            hint=f"max_epochs={-(-cfg.max_steps // plan.steps_per_epoch)}",
        )
    ]


def every_epochs_cautions(composed: Composed) -> list[Problem]:
    """A warning if a given `evaluate.every_epochs` decides nothing."""
    evaluate = composed.cfg.evaluate
    if not evaluate.every_steps or not any(
        one.lstrip("+").startswith("evaluate.every_epochs=") for one in composed.overrides
    ):
        return []
    words, hint = (
        f"has no effect: evaluate.every_steps={evaluate.every_steps} decides",
        "evaluate.every_steps=null",
    )
    return (
        [Problem("evaluate.every_epochs", words, evaluate.every_epochs, hint=hint)]
        if evaluate.every_epochs
        else []
    )


def never_decides(path: str) -> Problem:
    """The warning for a part that decides by evaluations, if the only one is at the end."""
    words = "decides by evaluations, and the only one is at the end of training: it has no effect"
    return Problem(path, words, hint="evaluate.every_epochs=1 evaluates after each epoch")


def data_cautions(train: Split) -> list[Problem]:
    """Warnings if the training split of a samewise data set has no sample of some classes or leaves
    files out, and if a user's expects to be told the epoch.
    """
    found, unused = list[Problem](), getattr(train.dataset, "unused_classes", None)
    if left_out := getattr(train.dataset, "left_out", ""):
        words, hint = (
            f"leaves out files in the folders of classes: {left_out}",
            "rename or convert those that are wanted, and move the others elsewhere",
        )
        found.append(Problem("dataset.train", words, hint=hint))
    if isinstance(unused, list) and unused:
        words, hint = (
            f"has no images of {first_few(unused, 5)}",
            "add images, or remove the folders of classes that are not wanted",
        )
        found.append(Problem("dataset.train", words, hint=hint))
    if callable(getattr(train.dataset, "set_epoch", None)):
        hint = (
            "draw in __getitem__ from random, numpy.random or torch, which are seeded for each "
            "epoch and sample; loader.order chooses an epoch's samples"
        )
        found.append(
            Problem(
                "dataset.train",
                f"{type(train.dataset).__name__}.set_epoch is never called",
                hint=hint,
            )
        )
    return found


def decoding_cautions(
    cfg: DictConfig, train: Split, transforms: Mapping[str, Callable[[Batch], Batch]]
) -> list[Problem]:
    """A warning if the first batch transform of the training would decode images that the data set
    has decoded already.
    """
    if getattr(train.dataset, "encoded", False) or not getattr(
        transforms["train"], "decodes", False
    ):
        return []
    given = cfg.dataset.get("decode", ...)
    instead = "transforms=imagenet or imagenet_v2, which crop in the loader's workers"
    hint = instead if given is ... else f"dataset.decode=device; or {instead}"
    words = (
        "the data set decodes the images itself, so Decode in transforms.train.batch does "
        "nothing, and whole images are sent to the device"
    )
    return [Problem("dataset.decode", words, given, hint=hint)]


_FEW = 0.1
"""The share of images with their own copy before them from which there is a warning: an order that
draws with replacement has some by chance."""


def mixing_cautions(
    transforms: Mapping[str, Callable[[Batch], Batch]], order: Order, plan: Plan
) -> list[Problem]:
    """A warning if a transform that mixes images, as MixUp does, would mix them with themselves."""
    names, micro_batches = (
        " and ".join(getattr(transforms["train"], "mixing", ())),
        plan.micro_batches,
    )
    if not names:
        return []
    if min(plan.batch_size, plan.samples) <= micro_batches:
        words = (
            f"leaves one image for each micro-batch, so {names} in transforms.train.batch does "
            "nothing: it mixes images of a micro-batch"
        )
        return [
            Problem(
                "batch_size",
                words,
                plan.batch_size,
                hint=f"batch_size={2 * micro_batches} or more, or a smaller accumulate or replicas",
            )
        ]
    if isinstance(order, InOrder):
        return []
    indices = order.indices(0)
    parts = [indices[slice(*plan.bounds(0, number)[1:])] for number in range(micro_batches)]
    share = sum(int((part == part.roll(1)).sum()) for part in parts) / sum(map(len, parts))
    if share < _FEW:
        return []
    words = (
        f"puts copies of an image into one micro-batch: {names} in transforms.train.batch "
        f"mixes {share:.0%} of the images with another copy of themselves"
    )
    # Of an order of the user's it is unknown
    fewest = max(micro_batches, getattr(order, "repeats", plan.batch_size))
    number = next(
        (number for number in range(fewest, plan.batch_size) if plan.batch_size % number == 0), None
    )
    return [
        Problem(
            "loader.order",
            words,
            hint=f"replicas={number} accumulate=1 puts each copy into another micro-batch"
            if number
            else "",
        )
    ]
