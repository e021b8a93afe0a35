"""Warns, before a training begins, of settings and data that are valid but hardly intended."""

import os
from collections.abc import Callable, Mapping, Sequence

from omegaconf import DictConfig

from samewise.runner.config.check import unread
from samewise.runner.config.compose import Composed
from samewise.runner.config.tree import plain
from samewise.runner.data.plan import Plan
from samewise.runner.errors import Problem, first_few
from samewise.runner.interfaces import Batch
from samewise.runner.optim import unfreezing
from samewise.runner.optim.frozen import idle_options
from samewise.runner.optim.unfreezing import Waiting
from samewise.runner.processes import this_process
from samewise.runner.training import continued
from samewise.runner.training.evaluation import watched
from samewise.runner.training.run import Run, Split, evaluation_interval


def settings_cautions(run: Run, later: Sequence[Waiting]) -> list[Problem]:
    """Collect the warnings about a run's settings and data.

    Args:
        run: The run, before its callbacks know it.
        later: The parameters that are trained later.

    Raises:
        ConfigError: `resume_from` leaves nothing to train.
    """
    cfg, composed, plan, schedule = run.config, run.composed, run.plan, run.schedule
    train, rules = run.splits.get("train"), plain(cfg.param_groups) or {}
    cautions = [
        *composed.cautions,
        *_order_cautions(composed),
        *unread.cautions(composed),
        *run.precision.cautions(),
        *run.strategy.cautions(),
        *continued.cautions(cfg, schedule),
        *(data_cautions(train) if train else ()),
        *(_decoding_cautions(cfg, train, run.transforms) if train else ()),
        *idle_options(rules),
        *_max_steps_cautions(composed, plan),
        *_every_epochs_cautions(composed),
    ]
    # A reduced training is shorter on purpose
    if "debug" in composed.choices:
        return cautions
    if train:
        cautions += _mixing_cautions(run.transforms, plan)
    if run.total_steps:
        cautions += [
            *schedule.cautions(),
            *unfreezing.cautions(
                rules, later, steps_per_epoch=plan.steps_per_epoch, total_steps=run.total_steps
            ),
        ]
    return cautions


def _order_cautions(composed: Composed) -> list[Problem]:
    """Warn if sets in the user's code may have another order in another process."""
    if this_process.has_fixed_hash_seed() or not composed.code.files:
        return []
    return [
        Problem(
            "PYTHONHASHSEED",
            "is not fixed, so a set of strings in your code has another order in each process, which "
            "may change results",
            os.environ.get("PYTHONHASHSEED"),
            hint="start Python with PYTHONHASHSEED=0, as the samewise command does",
        )
    ]


def _max_steps_cautions(composed: Composed, plan: Plan) -> list[Problem]:
    """Warn if training ends before the `max_steps` of an override."""
    cfg, steps = composed.cfg, composed.cfg.max_epochs * plan.steps_per_epoch
    if (
        cfg.max_steps is None
        or cfg.max_steps <= steps
        or not any(x.lstrip("+").startswith("max_steps=") for x in composed.overrides)
    ):
        return []
    return [
        Problem(
            "max_steps",
            f"is not reached: max_epochs={cfg.max_epochs} ends training after {steps} steps",
            cfg.max_steps,
            hint=f"max_epochs={-(-cfg.max_steps // plan.steps_per_epoch)}",
        )
    ]


def _every_epochs_cautions(composed: Composed) -> list[Problem]:
    """Warn if an override of `evaluate.every_epochs` has no effect."""
    evaluate = composed.cfg.evaluate
    if not evaluate.every_steps or not any(
        x.lstrip("+").startswith("evaluate.every_epochs=") for x in composed.overrides
    ):
        return []
    return (
        [
            Problem(
                "evaluate.every_epochs",
                f"has no effect: evaluate.every_steps={evaluate.every_steps} decides",
                evaluate.every_epochs,
                hint="evaluate.every_steps=null",
            )
        ]
        if evaluate.every_epochs
        else []
    )


def idle_cautions(run: Run) -> list[Problem]:
    """Warn of parts that decide by evaluations, if the only one is at the end."""
    if "debug" in run.composed.choices or evaluation_interval(run):
        return []
    message = "decides by evaluations, and the only one is at the end of training: it has no effect"
    hint = "evaluate.every_epochs=1 evaluates after each epoch"
    # One warning for a part, however many metrics it watches
    return [
        Problem(part, message, hint=hint)
        for part in dict.fromkeys(path.rpartition(".")[0] for path in watched(run))
    ]


def data_cautions(train: Split) -> list[Problem]:
    """Warn of classes without samples, files left out, turned ones, and a method `set_epoch`."""
    left_out, turned = (getattr(train.dataset, name, None) or [] for name in ("left_out", "turned"))
    unused = getattr(train.dataset, "unused_classes", None)
    cautions = [
        (
            left_out,
            f"leaves out {left_out}",
            "correct, rename or convert what you need, and move the rest elsewhere",
        ),
        (
            turned,
            "has images with an EXIF orientation, which is not applied, and their sizes do not say "
            f"whether the boxes follow it: {first_few(turned, 3)}",
            "if they do, turn the pixels (mogrify -auto-orient); if not, remove the orientation "
            "(exiftool -Orientation=)",
        ),
        (
            unused,
            f"has no images of {first_few(unused if isinstance(unused, list) else [], 5)}",
            "add images, or remove the folders of classes that you do not need",
        ),
        (
            callable(getattr(train.dataset, "set_epoch", None)),
            f"{type(train.dataset).__name__}.set_epoch is never called",
            "draw in __getitem__ from random, numpy.random or torch, which are seeded for each "
            "epoch and sample; loader.order chooses an epoch's samples",
        ),
    ]
    return [
        Problem("dataset.train", message, hint=hint)
        for applies, message, hint in cautions
        if applies
    ]


def _decoding_cautions(
    cfg: DictConfig, train: Split, transforms: Mapping[str, Callable[[Batch], Batch]]
) -> list[Problem]:
    """Warn if the first batch transform decodes images that the data set has decoded already."""
    if getattr(train.dataset, "encoded", False) or not getattr(
        transforms["train"], "decodes", False
    ):
        return []
    setting = cfg.dataset.get("decode", ...)
    instead = "transforms=imagenet or imagenet_v2, which crop in the loader's workers"
    hint = instead if setting is ... else f"dataset.decode=device; or {instead}"
    return [
        Problem(
            "dataset.decode",
            "the data set decodes the images itself, so Decode in transforms.train.batch does "
            "nothing, and whole images are sent to the device",
            setting,
            hint=hint,
        )
    ]


def _mixing_cautions(
    transforms: Mapping[str, Callable[[Batch], Batch]], plan: Plan
) -> list[Problem]:
    """Warn if a transform that mixes images, such as MixUp, gets only one in a micro-batch."""
    names, micro_batches = (
        " and ".join(getattr(transforms["train"], "mixing", ())),
        plan.micro_batches,
    )
    if not names or min(plan.batch_size, plan.samples) > micro_batches:
        return []
    return [
        Problem(
            "batch_size",
            f"leaves one image for each micro-batch, so {names} in transforms.train.batch does "
            "nothing: it mixes images of a micro-batch",
            plan.batch_size,
            hint=f"batch_size={2 * micro_batches} or more, or a smaller accumulate or replicas",
        )
    ]
