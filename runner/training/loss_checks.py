"""Finds, by trial, losses and metrics that depend on how samples are batched, and parameters that no loss trains."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import fmean, stdev

from torch import nn

from samewise.runner.data import streams
from samewise.runner.data.device import copied
from samewise.runner.data.keyed import Key, training_keys
from samewise.runner.data.loading import Loader
from samewise.runner.errors import Problem, first_few
from samewise.runner.interfaces import Batch, Recipe, is_loss
from samewise.runner.strategies.base import Tally
from samewise.runner.training.evaluation import evaluating, measure_batch, metrics_of
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run, Split


def has_own_recipe(run: Run) -> bool:
    """Whether the recipe is not one of samewise's."""
    return not type(run.recipe).__module__.startswith("samewise.")


@contextmanager
def untrained(run: Run) -> Generator[list[Problem]]:
    """Watch a step; afterwards the list has a caution if parameters that are trained from the beginning got no gradient in any phase."""
    found, reached = list[Problem](), set[nn.Parameter]()
    waiting = {id(one) for phase in run.phases for later in phase.waiting[:1] for one in later.parameters}
    trained = {name: one for name, one in run.model.named_parameters() if one.requires_grad and id(one) not in waiting}
    hooks = [one.register_post_accumulate_grad_hook(reached.add) for one in trained.values()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    if idle := [name for name, one in trained.items() if one not in reached]:
        words = f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the first step"
        found.append(Problem("model", words, hint="train them in a phase, or freeze them: initialise.frozen=[NAMES]"))


def means_for_sums(run: Run) -> list[Problem]:
    """A caution if a loss's count doubles where each sample comes twice, but its total, or a part of a user's, stays: it is a mean, where a sum is wanted."""
    key = _first_key(run)
    few, found = key.indices[: min(2, len(key.indices) // 2)], list[Problem]()
    with suppress(Exception), streams.preserve_generators():  # the step itself was sound: this model or loss needs more samples, or others
        for phase in run.phases:
            if pair := _mean_total(run, phase, few):
                once, twice = pair
                words = f"the total for {once.count:g} is {once.sums['loss']:.4g}, and for the same twice {twice.sums['loss']:.4g}"
                hint = 'reduction="sum" in torch\'s losses'
                found.append(Problem(_loss_of(run.recipe), f"{words}: it is a mean, which is divided again", expected="a sum over count", hint=hint))
        for phase in run.phases if has_own_recipe(run) else ():
            with evaluating(run.model):  # where dropout does not disguise what stays
                once, *more = _tallies(run, phase, "eval", [few, few * 2, few * 3])
                means = [name for name in once.sums if name != "loss" and all(_is_mean(name, once, one) for one in more)]
                for draw in (1, 2) if means else ():  # random numbers may have made a sum look so
                    first, *others = _tallies(run, phase, "eval", [few, few * 2, few * 3], draw)
                    means = [name for name in means if all(_is_mean(name, first, one) for one in others)]
            for name in means:
                words = f"its part '{name}' for {once.count:g} is {once.sums[name]:.4g}, and for the same twice {more[0].sums[name]:.4g}"
                found.append(Problem(_loss_of(run.recipe), f"{words}: it is a mean, which is divided again", expected="a sum over count"))
    return found


def _is_mean(name: str, once: Tally, more: Tally, within: float = 0.1) -> bool:
    return more.count > 1.5 * once.count and abs(more.sums.get(name, 0.0) - once.sums[name]) < within * abs(once.sums[name])


def _mean_total(run: Run, phase: TrainingPhase, few: tuple[int, ...]) -> tuple[Tally, Tally] | None:
    """The tallies of samples and of the same twice, with their mean totals over several draws of random numbers, if the total is a mean; else None."""
    pairs = list[Sequence[Tally]]()
    with phase.training(run.step):
        for draw in range(8):
            pairs.append(_tallies(run, phase, "train", [few, few * 2], draw))
            if not _is_mean("loss", *pairs[-1], within=0.5):  # as of a sum
                return None
            if draw == 1 and pairs[0][0].sums["loss"] == pairs[1][0].sums["loss"]:  # no random numbers are drawn
                break
    once, twice = (replace(column[0], sums={"loss": fmean(one.sums["loss"] for one in column)}) for column in zip(*pairs, strict=True))
    differences = [two.sums["loss"] - 2 * one.sums["loss"] for one, two in pairs]
    noise = _noise(differences) if len(pairs) > 2 else 0.0
    return (once, twice) if _is_mean("loss", once, twice) and abs(fmean(differences)) > 6 * noise else None


def _noise(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def wholes_for_sums(run: Run) -> list[Problem]:
    """A caution if a user's loss of four samples, in evaluation mode, is not the sum of those of two and two: how a batch is split then matters."""
    key = _first_key(run)
    if not has_own_recipe(run) or len(key.indices) < 4:
        return []
    wholes, splits = list[float](), list[float]()
    with suppress(Exception), evaluating(run.model):  # a model, or a loss, may need more samples, or others, or only train
        for draw in range(8):  # fewer, if both agree or no random numbers are drawn
            whole, *parts = (_total(run, replace(key, indices=some), draw) for some in (key.indices[:4], key.indices[:2], key.indices[2:4]))
            wholes, splits = [*wholes, whole], [*splits, sum(parts)]
            if (draw == 0 and _near(wholes[0], splits[0])) or (draw == 1 and wholes[0] == wholes[1]):
                break
    if not splits:
        return []
    whole, split, differences = fmean(wholes), fmean(splits), [one - other for one, other in zip(wholes, splits, strict=True)]
    if _near(whole, split) or abs(whole - split) <= 6 * _noise(differences):
        return []
    words = f"the total for four samples is {whole:.4g}, and for two and two {split:.4g}: replicas, accumulate and evaluate.batch_size change it"
    return [Problem(_loss_of(run.recipe), words, hint="meant, as in contrastive learning? Then keep replicas=1 accumulate=1")]


def metrics_by_batch(run: Run) -> list[Problem]:
    """A caution if a user's metrics of four validation samples in one batch are not those of the same in two, of three samples and of one."""
    part = run.splits["valid"]
    if not has_own_recipe(run) or len(part.dataset) < 4:
        return []

    def measured(number: int, *sizes: tuple[int, ...]) -> dict[str, float]:
        scores = run.recipe.scores(part.dataset)
        for indices in sizes:
            scores.add(measure_batch(run, run.model, number, run.to_device(_batch(part, Key(0, indices[0], indices)))))
        return metrics_of(scores, "")

    with suppress(Exception), evaluating(run.model):  # a model, or a metric, may need more samples, or others
        whole, again, pieces = measured(0, (0, 1, 2, 3)), measured(1, (0, 1, 2, 3)), measured(0, (0, 1, 2), (3,))
        differ = [name for name, value in whole.items() if value == again.get(name) and not _near(value, pieces.get(name, value))]
        if differ:
            one, other = whole[differ[0]], pieces[differ[0]]
            words = f"{differ[0]} of four samples is {one:.4g}, and of three and one {other:.4g}: evaluate.batch_size changes it"
            return [Problem(f"recipe ({type(run.recipe).__name__}.scores)", words, hint="add up sums and counts over batches, and divide once, in `compute`")]
    return []


def _batch(split: Split, key: Key) -> Batch:
    return next(iter(Loader(split.keyed, lambda: iter((key,)))))


def _tallies(run: Run, phase: TrainingPhase, stage: str, samples: Sequence[tuple[int, ...]], draw: int = 0) -> list[Tally]:
    """Of losses of these training samples, each in a batch of its own, as in a phase's first micro-batch; with others' random numbers, by `draw`."""
    found, key = list[Tally](), _first_key(run)
    for indices in samples:
        batch = run.to_device(_batch(run.splits["train"], replace(key, indices=indices)))
        streams.enter(run.seed, "step", run.step, draw, phase.number)
        with run.precision.autocast():
            loss = is_loss(run.recipe, run.recipe.loss(run.model, run.transforms[stage](batch), phase.spec))
        found.append(Tally.of(loss, nominal=1.0))
    return Tally.begin_reading(found)()[0]


def _total(run: Run, key: Key, draw: int) -> float:
    """The loss of training samples in evaluation, all phases together, with random numbers that depend on `draw`."""
    batch = run.to_device(_batch(run.splits["train"], key))
    streams.enter(run.seed, "eval", draw)
    batch = run.transforms["eval"](batch)
    return sum(float(run.recipe.loss(run.model, copied(batch), phase.spec).total.detach()) for phase in run.phases)


def _near(whole: float, split: float) -> bool:
    return abs(whole - split) <= 0.01 * max(abs(whole), abs(split)) or (whole != whole and split != split)


def _first_key(run: Run) -> Key:
    return next(training_keys(run.order, run.plan, first_step=0, steps=1, micro_batches=run.strategy.micro_batches))


def _loss_of(recipe: Recipe) -> str:
    return f"recipe ({type(recipe).__name__}.loss)"
