"""Builds a `Run` from a checked config: each part of the config becomes an object, once."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from samewise.runner.config import schema
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import reached_code, targets
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
from samewise.runner.data.dataset import fingerprint
from samewise.runner.data.device import mover
from samewise.runner.data.order import InOrder, Order, Truncated
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.interfaces import Batch, Callback, Phase, Recipe, class_names, of_labels
from samewise.runner.optim.build import build_optimizers, describe
from samewise.runner.optim.schedules import Schedule
from samewise.runner.optim.unfreezing import Waiting, waiting, waiting_rules
from samewise.runner.processes.this_process import REPORTER, keep_freed_memory
from samewise.runner.records import environment
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.digest import ON_DEVICE, XXH3
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import Trace
from samewise.runner.strategies.base import Strategy
from samewise.runner.strategies.recompute import recompute
from samewise.runner.strategies.single import Single
from samewise.runner.training.cautions import idle_cautions, settings_cautions
from samewise.runner.training.components import (
    Make,
    make_batch_transforms,
    make_model,
    make_order,
    make_part,
    make_splits,
    make_teacher,
    require_decoded,
    training_images,
)
from samewise.runner.training.guards.catalogue import STEPS
from samewise.runner.training.phase import TrainingPhase, clip_adaptively
from samewise.runner.training.recorder import Recorder
from samewise.runner.training.run import Run, Split
from samewise.runner.training.same_bits import determinism
from samewise.runner.training.same_bits.compiled import compiler, facts, require_possible
from samewise.runner.training.same_bits.portable import is_portable
from samewise.runner.training.view import View


def build(
    composed: Composed,
    project: Project,
    folder: RunFolder,
    *,
    alone: bool = False,
    split: str | None = None,
    samples: int | None = None,
) -> Run:
    """Build every part of a config's run, and write nothing: only the session that trains does.

    Args:
        composed: The config.
        project: The packages that the config may name.
        folder: The run's folder.
        alone: Whether this process carries all replicas: to try or evaluate, not to train.
        split: The only split to make, for an evaluation; None: all.
        samples: The number of samples of the training split, where `split` leaves it out.

    Raises:
        ConfigError: A part cannot be made, or the data are missing.
    """
    cfg = composed.cfg
    make: Make = partial(make_part, cfg, project)
    # Before any part: making one computes, and may read the number of threads
    determinism.apply(cfg.reproducibility)
    configured, strategy = _begin_strategy(cfg, make, alone=alone)
    precision = make("precision")
    precision.begin(strategy.device)
    recipe: Recipe = make("recipe")
    _require_phases(recipe)
    data = _make_data(cfg, make, recipe, split, samples)
    model = _make_model(cfg, make, recipe, data, strategy.device)
    # An evaluation has no use for the teacher, whose file may not exist there
    if cfg.distil.teacher is not None and split is None:
        recipe.distil(
            make_teacher(cfg, make, strategy.device),
            temperature=cfg.distil.temperature,
            alpha=cfg.distil.alpha,
        )
    network = _wrap(cfg, recipe, model, configured, strategy)
    # After `wrap`: optimizers must hold the shards that it may have made of the parameters
    optimizers = _optimizers(cfg, project, recipe, model, strategy)
    schedule = _schedule(make, optimizers, data)
    later = _waiting(cfg, recipe, model, data.plan)
    run = Run(
        **data._asdict(),
        **_settings(cfg),
        composed=composed,
        environment=_environment(composed, project, data.splits, model, optimizers, strategy),
        folder=folder,
        fingerprint=composed.fingerprint,
        recipe=recipe,
        model=model,
        network=network,
        parameters=list(model.parameters()),
        phases=_phases(recipe, model, optimizers, strategy, later, cfg),
        schedule=schedule,
        precision=precision,
        strategy=strategy,
        checkpoints=_checkpoints(cfg, folder, data),
        to_device=mover(strategy.device, channels_last=_is_channels_last(cfg)),
        recorder=_recorder(composed, project, make, folder, model, strategy),
    )
    _complete(run, later)
    return run


def _settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that steps read, since reading OmegaConf's nodes is slow."""
    return {
        "seed": cfg.seed,
        "batch_size": cfg.batch_size,
        "micro_batches": cfg.replicas * cfg.accumulate,
        "skip_spikes": cfg.skip_spikes,
        "evaluate": OmegaConf.to_object(cfg.evaluate),
        "checkpoint": OmegaConf.to_object(cfg.checkpoint),
    }


class _Data(NamedTuple):
    """The parts of a run that load and order samples."""

    splits: Mapping[str, Split]
    transforms: Mapping[str, Callable[[Batch], Batch]]
    order: Order
    plan: Plan
    total_steps: int


def _begin_strategy(cfg: DictConfig, make: Make, *, alone: bool) -> tuple[Strategy, Strategy]:
    """Return the configured strategy, and the one that carries the run's replicas."""
    configured: Strategy = make("strategy")
    _require_unfreezing(configured, plain(cfg.param_groups) or {})
    if alone:
        # Its number of processes is checked nevertheless
        configured.processes(str(cfg.device), cfg.replicas)
    strategy = (
        Single(sync_batch_norm=bool(cfg.strategy.get("sync_batch_norm"))) if alone else configured
    )
    strategy.begin(str(cfg.device), cfg.replicas, cfg.accumulate)
    if strategy.device.type == "cpu":
        # The kernel then fills no pages with zeros in each step (docs/measurements.md)
        keep_freed_memory()
    return configured, strategy


def _make_data(
    cfg: DictConfig, make: Make, recipe: Recipe, split: str | None, samples: int | None
) -> _Data:
    """Make splits, transforms, order and plan; `split` and `samples` are those of `build`."""
    splits = make_splits(cfg, make, recipe, only=split)
    train = splits.get("train")
    order = (
        make_order(cfg, make, train.dataset)
        if train
        else InOrder(range(samples or len(splits[split or "valid"].dataset)), seed=cfg.seed)
    )
    if cfg.loader.limit is not None:
        order = Truncated(order, cfg.loader.limit * cfg.batch_size)
    plan = Plan(len(order), cfg.batch_size, cfg.replicas * cfg.accumulate, cfg.loader.drop_last)
    total_steps = cfg.max_epochs * plan.steps_per_epoch
    if cfg.max_steps is not None:
        total_steps = min(total_steps, cfg.max_steps)
    transforms = {stage: make_batch_transforms(make, stage) for stage in ("train", "eval")}
    require_decoded(splits, transforms)
    if train:
        train.keyed.says_places = getattr(transforms["train"], "need_places", False)
    return _Data(splits, transforms, order, plan, total_steps)


def _make_model(
    cfg: DictConfig, make: Make, recipe: Recipe, data: _Data, device: torch.device
) -> nn.Module:
    """Make the model, initialised, whose blocks recompute activations as configured."""
    images = prepare = None  # without the training split, the weights come from a checkpoint
    if train := data.splits.get("train"):
        images = partial(training_images, cfg, make, recipe, train.dataset, data.transforms["eval"])
        prepare = partial(recipe.prepare, dataset=train.dataset)
    model = make_model(
        cfg, make, device, channels_last=_is_channels_last(cfg), images=images, prepare=prepare
    )
    recompute(model, cfg.activation_checkpointing, "activation_checkpointing")
    return model


def _wrap(
    cfg: DictConfig, recipe: Recipe, model: nn.Module, configured: Strategy, strategy: Strategy
) -> nn.Module:
    """Return the model as the strategy wraps it, compiled as configured."""
    # By the configured strategy, so that `check` in one process refuses what a training would
    require_possible(cfg, configured, device=strategy.device, phases=recipe.phases)
    strategy.compiled = compiler(
        cfg.compile, strategy.device, deterministic=cfg.reproducibility.deterministic
    )
    return strategy.wrap(model)


def _is_channels_last(cfg: DictConfig) -> bool:
    return str(cfg.memory_format) == "channels_last"


def _complete(run: Run, later: Sequence[Waiting]) -> None:
    """Add guards, warnings and the callbacks' view, and tell callbacks of the run."""
    run.guards.extend(guard(run) for guard in STEPS)
    # Before `on_build`, whose cautions are printed after those of the settings
    run.recorder.cautions += settings_cautions(run, later)
    run.recorder.view = View(run)
    run.recorder.notify("on_build")
    run.recorder.cautions += idle_cautions(run)


def _recorder(
    composed: Composed,
    project: Project,
    make: Make,
    folder: RunFolder,
    model: nn.Module,
    strategy: Strategy,
) -> Recorder:
    cfg = composed.cfg
    callbacks: dict[str, Callback] = {
        name: make(f"callbacks.{name}") for name, node in cfg.callbacks.items() if node is not None
    }
    # From the job's environment, since the config would change the experiment's fingerprint
    if reporter := os.environ.get(REPORTER):
        callbacks["(sweep)"] = instantiate(json.loads(reporter), REPORTER, allowed=project.packages)
    return Recorder(
        trace=_trace(cfg, folder, model, strategy),
        callbacks=callbacks,
        log_every_steps=cfg.tracking.log_every_steps,
        level=_level(composed, strategy),
    )


def _schedule(make: Make, optimizers: Mapping[str, Optimizer], data: _Data) -> Schedule:
    schedule: Schedule = make("scheduler")
    schedule.begin(
        optimizers, steps_per_epoch=data.plan.steps_per_epoch, total_steps=data.total_steps
    )
    return schedule


def _waiting(cfg: DictConfig, recipe: Recipe, model: nn.Module, plan: Plan) -> list[Waiting]:
    """List the parameters that are trained later."""
    return waiting(
        model,
        plain(cfg.param_groups) or {},
        steps_per_epoch=plan.steps_per_epoch,
        parts=[phase.modules for phase in recipe.phases],
    )


def _optimizers(
    cfg: DictConfig, project: Project, recipe: Recipe, model: nn.Module, strategy: Strategy
) -> dict[str, Optimizer]:
    """Make each phase's optimizer, by the phase's name, with its share of the states."""
    optimizers = build_optimizers(
        cfg.optimizer,
        cfg.param_groups,
        model,
        recipe.phases,
        instantiate=partial(instantiate, allowed=project.packages),
    )
    if cfg.reference_batch_size is not None:
        factor = (cfg.batch_size / cfg.reference_batch_size) ** (cfg.reference_power or 1.0)
        for group in (x for optimizer in optimizers.values() for x in optimizer.param_groups):
            group["lr"] *= factor
    return {
        name: strategy.layout.share_optimizer(optimizer) for name, optimizer in optimizers.items()
    }


def _environment(
    composed: Composed,
    project: Project,
    splits: Mapping[str, Split],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    strategy: Strategy,
) -> dict[str, Any]:
    """Record what decides bits beside the config: machine, versions, data."""
    cfg = composed.cfg
    code = composed.code if composed.code.files else reached_code(composed.whole, project.packages)
    return environment.record(
        device=strategy.device,
        reproducibility=cfg.reproducibility,
        data=_data(composed, splits),
        optimizers=describe(optimizers),
        used=[*targets(composed.whole), *code.declined],
        libraries={*code.libraries, *_libraries(model, project.packages)},
        compiled=facts(cfg.compile, strategy.device),
    )


def _checkpoints(cfg: DictConfig, folder: RunFolder, data: _Data) -> Checkpoints:
    modes = {cfg.evaluate.monitor: cfg.evaluate.mode, **cfg.evaluate.also}
    return Checkpoints(
        folder.checkpoints,
        cast("schema.Checkpoint", OmegaConf.to_object(cfg.checkpoint)),
        {name: str(mode) for name, mode in modes.items()},
        {"steps_per_epoch": data.plan.steps_per_epoch, "total_steps": data.total_steps},
    )


def _level(composed: Composed, strategy: Strategy) -> str:
    if not composed.cfg.reproducibility.deterministic:
        return "none"
    # Only samewise's own components have been trained on other CPUs
    everywhere = strategy.level == "R2" and not composed.code.files
    return "R3" if everywhere and is_portable(composed.whole, strategy.device) else strategy.level


def _trace(cfg: DictConfig, folder: RunFolder, model: nn.Module, strategy: Strategy) -> Trace:
    return Trace(
        folder.trace,
        model,
        digests_of=strategy.layout.digests,
        # On CUDA one kernel sums digests, as every device would (docs/decisions/trace.md)
        algorithm=XXH3 if strategy.device.type == "cpu" else ON_DEVICE,
        shards=strategy.layout.shards,
        every_steps=cfg.trace.every_steps,
        layers_every_steps=cfg.trace.layers_every_steps,
    )


def _data(composed: Composed, splits: Mapping[str, Split]) -> dict[str, Any]:
    name = composed.choices.get("dataset", "data")
    return {
        split: {
            "name": name,
            "size": len(part.dataset),
            "fingerprint": fingerprint(part.dataset, f"dataset.{split}"),
            **_labels(part.dataset),
        }
        for split, part in splits.items()
    }


def _labels(dataset: Any) -> dict[str, list[Any]]:
    """Return the names and numbers of the labels, for predictions without the data set."""
    labels = {
        "classes": class_names(dataset),
        "category_ids": [int(number) for number in of_labels(dataset, "category_ids")],
    }
    return {name: values for name, values in labels.items() if values}


def _libraries(model: nn.Module, packages: Sequence[str]) -> set[str]:
    """Return the packages of the model's layers, without torch, samewise and the user's."""
    packages_of_layers = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return packages_of_layers - {
        "torch",
        "torchvision",
        "torchaudio",
        "samewise",
        "__main__",
        *(name.partition(".")[0] for name in packages),
    }


def _require_phases(recipe: Recipe) -> None:
    # The recipe is a user's class, whose `phases` may be anything
    declared: Any = recipe.phases
    phases = (
        [x for x in cast("Sequence[Any]", declared) if isinstance(x, Phase)]
        if isinstance(declared, list | tuple)
        else []
    )
    ConfigError.raise_if(
        not phases or len({x.name for x in phases}) < len(declared),
        "recipe",
        f"{type(recipe).__name__}.phases is not a tuple of phases with different names",
        "a method" if callable(declared) else declared,
        '(Phase("a", ("encoder",)), Phase("b", ("head",)))',
        "`@property` above `def phases(self)`" if callable(declared) else "",
    )


def _phases(
    recipe: Recipe,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    strategy: Strategy,
    later: Sequence[Waiting],
    cfg: DictConfig,
) -> list[TrainingPhase]:
    limits = [
        (clip_grad_value_, {"clip_value": cfg.clip_value}),
        (clip_adaptively, {"share": cfg.clip_adaptive}),
    ]
    trained = {
        name: {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, optimizer in optimizers.items()
    }
    untrained = {
        name: [x for x in model.parameters() if x.requires_grad and id(x) not in own_ids]
        for name, own_ids in trained.items()
    }
    names = [phase.name for phase in recipe.phases]
    ConfigError.raise_all(
        Problem(f"clip_norms.{x}", "is not a phase of the recipe", hint=nearest(x, names))
        for x in cfg.clip_norms
        if x not in names
    )
    return [
        TrainingPhase(
            number,
            phase,
            optimizers[phase.name],
            untrained[phase.name],
            strategy.layout.total_norm,
            cfg.clip_norms.get(phase.name, cfg.clip_norm),
            [partial(clip, **limit) for clip, limit in limits if None not in limit.values()],
            later,
        )
        for number, phase in enumerate(recipe.phases)
    ]


def _require_unfreezing(strategy: Strategy, rules: Mapping[str, Any]) -> None:
    ConfigError.raise_all(
        Problem(
            f"param_groups.{name}.{key}",
            f"cannot be used with {type(strategy).__name__}",
            hint="strategy=single or strategy=elastic; or two runs, the second with "
            "initialise.weights=run:FIRST",
        )
        for name, key, _ in waiting_rules(rules)
        if not strategy.unfreezes
    )
