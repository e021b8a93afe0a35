"""Builds everything, and tries one step and one evaluation batch in memory, to find what only a trial can show."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from omegaconf import DictConfig, open_dict
from torch import nn

from samewise.runner.config.compose import Composed
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.data.keyed import Key, training_keys
from samewise.runner.data.loading import Loader, MicroBatch
from samewise.runner.errors import ConfigError, DataError, Problem, SamewiseError, first_few
from samewise.runner.optim.groups import ranked_blocks
from samewise.runner.processes.memory import refuse_too_much_memory
from samewise.runner.processes.simulated import simulate_ranks
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.base import Strategy, Tally
from samewise.runner.training.batches import training_batches
from samewise.runner.training.build import build
from samewise.runner.training.evaluation import evaluating, rehearse
from samewise.runner.training.hidden_state import attributes_of, find, find_in_schedule, lost_attributes, lost_by_optimizers, require_none_learned
from samewise.runner.training.loop import forward, train_step
from samewise.runner.training.memory import out_of_memory
from samewise.runner.training.run import Run
from samewise.runner.training.session import continue_from
from samewise.runner.training.step_errors import explain_step_error, name_override, refused_operator

LONG = 100_000
"""Steps for which a schedule is not tried to its end: a scheduler of torch's takes 10 microseconds for each."""


def dry_run(composed: Composed, project: Project) -> list[str]:
    """Take one optimizer step and measure one batch of the validation split; nothing is kept.

    Where the strategy wants several processes, this is rank 0 of as many, the others pretended: it takes its own part of the step. Returns what there is to say
    of those processes, in sentences, and warnings. ConfigError if something cannot be built or does not fit together.
    """
    with simulate_ranks(0, 1):  # whatever this machine's devices: the config may be meant for another
        strategy, wanted = _requested_processes(composed, project)
        run = _step(composed, project, alone=True) if wanted == 1 or not strategy.pretends else None
    if wanted == 1:
        return _warnings(run)
    with simulate_ranks(0, wanted):
        if run is not None:
            _begin(strategy, composed)
            strategy.end()
            strategy.require_fit(run.model)
            return [
                f"{wanted} processes, of which only the settings and the split of the model were checked; the step was tried in one process",
                *_warnings(run),
            ]
    with simulate_ranks(wanted - 1, wanted):
        last, _ = _requested_processes(composed, project)
        _begin(last, composed)
        of_last = last.micro_batches
        last.end()
    with simulate_ranks(0, wanted):
        run = _step(composed, project, alone=False)
        return [*_plan(run.strategy, of_last, wanted), *_warnings(run)]


def require_processes(composed: Composed, project: Project) -> None:
    """Raise a ConfigError if the strategy's processes, all but this one simulated, cannot run the replicas; builds nothing else."""
    with simulate_ranks(0, 1):
        strategy, wanted = _requested_processes(composed, project)
    if wanted > 1:
        with simulate_ranks(0, wanted):
            _begin(strategy, composed)
            strategy.end()


def _requested_processes(composed: Composed, project: Project) -> tuple[Strategy, int]:
    """The strategy, and how many processes it requests."""
    strategy = instantiate(composed.cfg.strategy, "strategy", allowed=project.packages)
    return strategy, strategy.processes(str(composed.cfg.device), composed.cfg.replicas)


def _begin(strategy: Strategy, composed: Composed) -> None:
    strategy.begin(str(composed.cfg.device), composed.cfg.replicas, composed.cfg.accumulate)


def _step(composed: Composed, project: Project, *, alone: bool) -> Run:
    """Take the step; return the run, with its strategy ended."""
    with tempfile.TemporaryDirectory(prefix="samewise-check-") as temporary, streams.preserve_generators():
        run = build(_disable_caches(composed), project, RunFolder(Path(temporary)), alone=alone)
        try:
            require_none_learned(run)
            with refuse_too_much_memory() if run.strategy.device.type == "cpu" else nullcontext():
                untrained = [*_take_step(run), *find_in_schedule(run)]
                before = attributes_of(run.recipe)
                rehearse(run)
                run.recorder.cautions += _single_samples(run)
                if alone:
                    run.recorder.cautions += [
                        *untrained,
                        *_means_for_sums(run),
                        *_wholes_for_sums(run),
                        *lost_attributes(run.recipe, before),
                        *lost_by_optimizers(run),
                    ]
                if run.config.resume_from:
                    continue_from(run, run.config.resume_from)
        except DataError as error:
            raise DataError(*[name_override(problem, composed) for problem in error.problems]) from error.__cause__
        except SamewiseError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(refused_operator(error) or out_of_memory(run, error) or explain_step_error(error, composed, run)) from error
        finally:
            run.strategy.end()
    return run


def _take_step(run: Run) -> list[Problem]:
    """Take one step; return cautions of hidden state, and of parameters that are trained from the beginning and got no gradient in any phase."""
    reached = set[nn.Parameter]()
    waiting = {id(one) for phase in run.phases for later in phase.waiting[:1] for one in later.parameters}
    trained = {name: one for name, one in run.model.named_parameters() if one.requires_grad and id(one) not in waiting}
    hooks = [one.register_post_accumulate_grad_hook(reached.add) for one in trained.values()]
    ranked = ranked_blocks(run.model, run.config.param_groups or {})
    used = list[str]()

    def note(name: str, *_: object) -> None:
        used.append(name)

    hooks += [part.register_forward_pre_hook(partial(note, name)) for name, part in run.model.named_modules() if name in ranked]
    micro_batches = next(training_batches(run))
    hidden = find(run, micro_batches)
    train_step(run, micro_batches)
    if run.total_steps <= LONG:
        run.schedule.rates(max(run.total_steps - 1, 0), run.schedule.span)
    for hook in hooks:
        hook.remove()
    idle = [name for name, one in trained.items() if one not in reached]
    hint = "train them in a phase, or freeze them: initialise.frozen=[NAMES]"
    words = f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the first step"
    return [*([hidden] if hidden else ()), *([Problem("model", words, hint=hint)] if idle else ()), *_misplaced(ranked, list(dict.fromkeys(used)))]


def _misplaced(ranked: Sequence[str], used: Sequence[str]) -> list[Problem]:
    """A caution if blocks compute in another order than that in which layer-wise learning rates rank them, which is that of the model's definition."""
    for one, other in pairwise(used):
        if ranked.index(other) < ranked.index(one):
            words = f"layer_decay takes '{other}' to be further from the output than '{one}', after which it computes"
            return [Problem("param_groups", words, hint="define the model's parts in the order in which they compute")]
    return []


def _means_for_sums(run: Run) -> list[Problem]:
    """A caution if a loss's count doubles where each sample comes twice, but its total stays: it is a mean, where a sum is wanted."""
    key = next(training_keys(run.order, run.plan, first_step=0, steps=1, micro_batches=run.strategy.micro_batches))
    few, found = key.indices[: min(2, len(key.indices) // 2)], list[Problem]()
    with suppress(Exception):  # the step itself was sound: this model or loss needs more samples, or others
        for phase in run.phases:
            batches = Loader(run.splits["train"].keyed, lambda: iter((replace(key, indices=few), replace(key, indices=few * 2))))
            with phase.training(run.step):
                once, twice = (Tally.begin_reading([forward(run, phase, MicroBatch(0, batch))[2]()])()[0][0] for batch in batches)
            first, second = once.sums["loss"], twice.sums["loss"]
            if twice.count > 1.5 * once.count and abs(second - first) < 0.1 * abs(first):
                words = f"the total for {once.count:g} is {first:.4g}, and for the same twice {second:.4g}: it is a mean, which is divided again"
                where = f"recipe ({type(run.recipe).__name__}.loss)"
                found.append(Problem(where, words, expected="a sum over count", hint='reduction="sum" in torch\'s losses'))
    return found


def _single_samples(run: Run) -> list[Problem]:
    """A caution if an epoch's last batch has micro-batches of one sample, and the model cannot be trained on one, as with a batch norm of vectors."""
    plan, last = run.plan, run.plan.steps_per_epoch - 1
    bounds = [plan.bounds(last, number) for number in range(run.micro_batches)]
    if 1 not in [stop - start for _, start, stop in bounds] or run.total_steps <= last or not run.strategy.compiles:
        return []
    key = next(training_keys(run.order, plan, first_step=0, steps=1, micro_batches=run.strategy.micro_batches))
    try:
        for phase in run.phases:
            batch = run.to_device(next(iter(Loader(run.splits["train"].keyed, lambda: iter((replace(key, indices=key.indices[:1]),))))))
            run.recipe.loss(run.model, run.transforms["train"](batch), phase.spec)
    except Exception as error:
        if "more than 1 value per channel" in str(error):
            words = f"step {last + 1} fails: some of its micro-batches, of an epoch's last batch of {bounds[-1][2] - bounds[0][1]}, have one sample"
            return [Problem("loader.drop_last", f"{words}, and a norm of the model needs several", plan.drop_last, hint="true, or another batch_size")]
    return []


def _wholes_for_sums(run: Run) -> list[Problem]:
    """A caution if a user's loss of four samples, in evaluation mode, is not the sum of those of two and two: how a batch is split then matters."""
    key = next(training_keys(run.order, run.plan, first_step=0, steps=1, micro_batches=run.strategy.micro_batches))
    if type(run.recipe).__module__.startswith("samewise.") or len(key.indices) < 4:
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
    noise = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    if _near(whole, split) or abs(whole - split) <= 6 * noise:
        return []
    words = f"the total for four samples is {whole:.4g}, and for two and two {split:.4g}: replicas, accumulate and evaluate.batch_size change it"
    return [Problem(f"recipe ({type(run.recipe).__name__}.loss)", words, hint="meant, as in contrastive learning? Then keep replicas=1 accumulate=1")]


def _near(whole: float, split: float) -> bool:
    return abs(whole - split) <= 0.01 * max(abs(whole), abs(split))


def _total(run: Run, key: Key, draw: int) -> float:
    """The loss of training samples in evaluation, all phases together, with random numbers that depend on `draw`."""
    batch = run.to_device(next(iter(Loader(run.splits["train"].keyed, lambda: iter((key,))))))
    streams.enter(run.seed, "eval", draw)
    batch = run.transforms["eval"](batch)
    return sum(float(run.recipe.loss(run.model, batch, phase.spec).total.detach()) for phase in run.phases)


def _disable_caches(composed: Composed) -> Composed:
    """The same config, but samewise's data sets decode samples on demand: one step does not need the cache of a training."""
    cfg = composed.cfg.copy()
    with open_dict(cfg):
        for split in [one for one in cfg.dataset.values() if isinstance(one, DictConfig)]:
            if str(split.get("_target_")).startswith("samewise.datasets.") and split.get("cache") == "memory":
                split.cache = "none"
    return replace(composed, cfg=cfg)


def _warnings(run: Run | None) -> list[str]:
    return [f"warning: {caution}" for caution in run.recorder.cautions] if run else []


def _plan(first: Strategy, of_last: Sequence[int], size: int) -> list[str]:
    import torch

    found = [f"{size} processes, tried as rank 0 with the others simulated: rank 0 takes {_span(first.micro_batches)}, rank {size - 1} {_span(of_last)}"]
    found += first.describe()
    devices = torch.cuda.device_count() if first.device.type == "cuda" else 0
    if devices and devices < size:
        found.append(f"this machine has {devices} CUDA device{'s' * (devices > 1)}: `train` would not start {size} processes here")
    return found


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"micro-batch {numbers[0]}"
    return f"micro-batches {numbers[0]} to {numbers[-1]}"
