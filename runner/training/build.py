"""Builds a Run from a checked config.

Every part of the config is turned into an object here, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from samewise.runner.config.check import unread
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import reached_code, targets
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
from samewise.runner.data.dataset import fingerprint
from samewise.runner.data.device import mover
from samewise.runner.data.order import InOrder
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Callback, Phase, Recipe, class_names, of_labels
from samewise.runner.optim.build import build_optimizers, describe
from samewise.runner.optim.frozen import idle_options
from samewise.runner.optim.unfreezing import Waiting, cautions, waiting
from samewise.runner.processes.this_process import REPORTER, keep_freed_memory
from samewise.runner.records import environment
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.digest import ON_DEVICE, XXH3
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import Trace
from samewise.runner.strategies.base import Strategy
from samewise.runner.strategies.recompute import recompute
from samewise.runner.strategies.single import Single
from samewise.runner.training import continued
from samewise.runner.training.components import (
    Make,
    make_batch_transforms,
    make_model,
    make_order,
    make_part,
    make_splits,
    require_decoded,
    training_images,
)
from samewise.runner.training.evaluation import watched
from samewise.runner.training.guards.cautions import (
    data_cautions,
    decoding_cautions,
    every_epochs_cautions,
    max_steps_cautions,
    mixing_cautions,
    never_decides,
    order_cautions,
)
from samewise.runner.training.guards.finite import nonfinite_names
from samewise.runner.training.held_tensors import HeldTensors
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.recorder import Recorder
from samewise.runner.training.run import Run, Split, evaluation_interval
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
    """Build every part of a config's run.

    ConfigError if a part cannot be made or the data are missing. Writes nothing: only the session
    that trains does.

    With `alone` this process carries all replicas, whatever the strategy: to try or to evaluate,
    not to train. With `split` only this split is made, to evaluate on; `samples` is then how many
    the training split had.
    """
    cfg = composed.cfg
    make: Make = partial(make_part, cfg, project)
    determinism.apply(cfg.reproducibility)
    strategy: Strategy = make("strategy")
    rules = plain(cfg.param_groups) or {}
    _require_unfreezing(strategy, rules)
    asked = strategy
    if alone:
        strategy.processes(str(cfg.device), cfg.replicas)
        strategy = Single()
    strategy.begin(str(cfg.device), cfg.replicas, cfg.accumulate)
    if strategy.device.type == "cpu":
        keep_freed_memory()
    precision = make("precision")
    precision.begin(strategy.device)
    recipe: Recipe = make("recipe")
    _require_phases(recipe)
    splits = make_splits(cfg, make, recipe, only=split)
    train = splits.get("train")
    order = (
        make_order(cfg, make, train.dataset)
        if train
        else InOrder(range(samples or len(splits[split or "valid"].dataset)), seed=cfg.seed)
    )
    plan = Plan(len(order), cfg.batch_size, cfg.replicas * cfg.accumulate, cfg.loader.drop_last)
    total_steps = cfg.max_epochs * plan.steps_per_epoch
    total_steps = min(total_steps, cfg.max_steps) if cfg.max_steps is not None else total_steps
    channels_last = str(cfg.memory_format) == "channels_last"
    transforms = {stage: make_batch_transforms(make, stage) for stage in ("train", "eval")}
    require_decoded(splits, transforms)
    images = None  # without the training split, the weights come from a checkpoint
    if train:
        train.keyed.says_places = getattr(transforms["train"], "need_places", False)
        images = partial(training_images, cfg, make, recipe, train.dataset, transforms["eval"])
    model = make_model(cfg, make, strategy.device, channels_last=channels_last, images=images)
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    recompute(model, cfg.activation_checkpointing, "activation_checkpointing")
    require_possible(cfg, asked, device=strategy.device, phases=recipe.phases)
    strategy.compiled = compiler(
        cfg.compile, strategy.device, deterministic=cfg.reproducibility.deterministic
    )
    network = strategy.wrap(model)
    optimizers = build_optimizers(
        cfg.optimizer,
        cfg.param_groups,
        model,
        recipe.phases,
        instantiate=partial(instantiate, allowed=project.packages),
    )
    optimizers = {
        name: strategy.layout.share_optimizer(optimizer) for name, optimizer in optimizers.items()
    }
    schedule = make("scheduler")
    schedule.begin(optimizers, steps_per_epoch=plan.steps_per_epoch, total_steps=total_steps)
    later = waiting(
        model,
        rules,
        steps_per_epoch=plan.steps_per_epoch,
        parts=[phase.modules for phase in recipe.phases],
    )
    never = cautions(rules, later, steps_per_epoch=plan.steps_per_epoch, total_steps=total_steps)
    recorder = Recorder(
        trace=_trace(cfg, folder, model, strategy),
        callbacks={
            name: make(f"callbacks.{name}")
            for name, node in cfg.callbacks.items()
            if node is not None
        }
        | _reporter(project),
        log_every_steps=cfg.tracking.log_every_steps,
        level=_level(composed, strategy),
        cautions=[
            *composed.cautions,
            *order_cautions(composed),
            *unread.cautions(composed),
            *precision.cautions(),
            *strategy.cautions(),
            *continued.cautions(cfg, schedule),
            *continued.class_cautions(cfg, class_names(train.dataset) if train else (), sizes),
            *(
                continued.input_cautions(cfg)
                if train and hasattr(model, "checkpoint_problems")
                else ()
            ),
            *(data_cautions(train) + decoding_cautions(cfg, train, transforms) if train else []),
            *idle_options(rules),
            *max_steps_cautions(composed, plan),
            *every_epochs_cautions(composed),
            *(
                mixing_cautions(transforms, order, plan)
                if train and "debug" not in composed.choices
                else ()
            ),
            *(
                [*schedule.cautions(), *never]
                if total_steps and "debug" not in composed.choices
                else ()
            ),  # a reduced training is shorter on purpose
        ],
    )
    kept = _plain(cfg.checkpoint)
    modes = {
        name: str(mode)
        for name, mode in {cfg.evaluate.monitor: cfg.evaluate.mode, **cfg.evaluate.also}.items()
    }
    code = composed.code if composed.code.files else reached_code(composed.whole, project.packages)
    run = Run(
        composed=composed,
        environment=environment.record(
            device=strategy.device,
            reproducibility=cfg.reproducibility,
            data=_data(composed, splits),
            optimizers=describe(optimizers),
            used=[*targets(composed.whole), *code.declined],
            libraries={*code.libraries, *_libraries(model, project.packages)},
            compiled=facts(cfg.compile, strategy.device),
        ),
        folder=folder,
        fingerprint=composed.fingerprint,
        seed=cfg.seed,
        recipe=recipe,
        model=model,
        network=network,
        parameters=list(model.parameters()),
        held=HeldTensors(model, stay=strategy.compiles),
        phases=_phases(recipe, model, optimizers, strategy, later),
        schedule=schedule,
        precision=precision,
        strategy=strategy,
        transforms=transforms,
        splits=splits,
        order=order,
        plan=plan,
        total_steps=total_steps,
        batch_size=cfg.batch_size,
        micro_batches=cfg.replicas * cfg.accumulate,
        clip_norm=cfg.clip_norm,
        evaluate=_plain(cfg.evaluate),
        checkpoint=kept,
        checkpoints=Checkpoints(
            folder.checkpoints,
            kept,
            modes,
            {"steps_per_epoch": plan.steps_per_epoch, "total_steps": total_steps},
        ),
        to_device=mover(strategy.device, channels_last=channels_last),
        infinite=frozenset(nonfinite_names(model.state_dict().items())),
        recorder=recorder,
    )
    recorder.view = View(run)
    for callback in run.callbacks.values():
        callback.on_build(recorder.view)
    if "debug" not in composed.choices and not evaluation_interval(run):
        recorder.cautions += [
            never_decides(path)
            for path in dict.fromkeys(path.rpartition(".")[0] for path in watched(run))
        ]
    return run


def _reporter(project: Project) -> dict[str, Callback]:
    """The callback that reports to a run's sweep.

    It comes from the job's environment, so that it does not change the experiment.
    """
    given = os.environ.get(REPORTER)
    return (
        {"(sweep)": instantiate(json.loads(given), REPORTER, allowed=project.packages)}
        if given
        else {}
    )


def _level(composed: Composed, strategy: Strategy) -> str:
    if not composed.cfg.reproducibility.deterministic:
        return "none"
    everywhere = strategy.level == "R2" and not composed.code.files
    return "R3" if everywhere and is_portable(composed.whole, strategy.device) else strategy.level


def _trace(cfg: DictConfig, folder: RunFolder, model: nn.Module, strategy: Strategy) -> Trace:
    layout, settings = strategy.layout, cfg.trace
    every, layers = settings.every_steps, settings.layers_every_steps
    algorithm = XXH3 if strategy.device.type == "cpu" else ON_DEVICE
    return Trace(
        folder.trace,
        model,
        digests_of=layout.digests,
        algorithm=algorithm,
        shards=layout.shards,
        every_steps=every,
        layers_every_steps=layers,
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
    """The names and number of the labels, for predictions, which do not load the data set."""
    found = {
        "classes": class_names(dataset),
        "category_ids": [int(number) for number in of_labels(dataset, "category_ids")],
    }
    return {name: values for name, values in found.items() if values}


def _plain(settings: DictConfig) -> Any:
    """The dataclass of typed settings, whose attributes are fast to read, which matters in every
    step.
    """
    return OmegaConf.to_object(settings)


def _libraries(model: nn.Module, packages: Sequence[str]) -> set[str]:
    """The packages of the model's layers, other than torch, samewise and the user's: timm,
    transformers.
    """
    found = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return found - {
        "torch",
        "torchvision",
        "torchaudio",
        "samewise",
        "__main__",
        *(name.partition(".")[0] for name in packages),
    }


def _require_phases(recipe: Recipe) -> None:
    found: Any = recipe.phases
    phases = (
        [one for one in cast("Sequence[Any]", found) if isinstance(one, Phase)]
        if isinstance(found, list | tuple)
        else []
    )
    if not phases or len({one.name for one in phases}) < len(found):
        given, hint = (
            ("a method", "`@property` above `def phases(self)`") if callable(found) else (found, "")
        )
        words, expected = (
            "phases is not a tuple of phases, each with a name of its own",
            '(Phase("a", ("encoder",)), Phase("b", ("head",)))',
        )
        raise ConfigError(
            Problem("recipe", f"{type(recipe).__name__}.{words}", given, expected, hint)
        )


def _phases(
    recipe: Recipe,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    strategy: Strategy,
    later: Sequence[Waiting],
) -> list[TrainingPhase]:
    trained = {
        name: {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, optimizer in optimizers.items()
    }
    others = {
        name: [one for one in model.parameters() if one.requires_grad and id(one) not in mine]
        for name, mine in trained.items()
    }
    return [
        TrainingPhase(
            number,
            phase,
            optimizers[phase.name],
            others[phase.name],
            strategy.layout.total_norm,
            later,
        )
        for number, phase in enumerate(recipe.phases)
    ]


def _require_unfreezing(strategy: Strategy, rules: Mapping[str, Any]) -> None:
    found = (
        f"{name}.{key}"
        for name, rule in rules.items()
        if isinstance(rule, Mapping)
        for key in ("frozen_until", "unfreeze_every")
        if key in rule
    )
    if not strategy.unfreezes and (path := next(found, None)):
        hint = (
            "strategy=single or strategy=elastic; or two runs, the second with "
            "initialise.weights=run:FIRST"
        )
        raise ConfigError(
            Problem(
                f"param_groups.{path}", f"cannot be used with {type(strategy).__name__}", hint=hint
            )
        )
