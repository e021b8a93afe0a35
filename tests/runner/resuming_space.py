"""The space of configs from which the runs that are resumed at every step are drawn. Tests import this as `samewise_runner_resuming_space`."""

import random
from pathlib import Path

CONFIGS = Path(__file__).with_name("resuming_configs")
TINY = ["recipe=classification", "model=small", "debug=tiny", "transforms=digits", "callbacks=none", "tracking=none", "batch_size=12", "max_steps=4"]
TINY += ["dataset.samples=32", "dataset.image_size=8", "loader.drop_last=false", "evaluate.batch_size=16", "checkpoint.every_steps=1"]
"""Three steps per epoch, the last one smaller; evaluated after each epoch and at the end."""

OPTIMIZERS = {
    **{name: [f"optimizer={name}"] for name in ("adadelta", "adafactor", "adagrad", "adamax", "asgd", "lamb", "lars", "nadam", "radam", "rprop")},
    "muon": ["optimizer=muon", "model=matrices"],
    "rmsprop": ["optimizer=rmsprop", "optimizer.centered=true", "optimizer.momentum=0.9"],
    "adam": ["optimizer=adam", "optimizer.amsgrad=true"],
    "adamw": ["optimizer=adamw", "optimizer.lr=0.01"],
    "sgd": ["optimizer=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=0.001"],
    "sgd, not fused": ["optimizer=sgd", "optimizer.fused=false"],
    "adamw, foreach": ["optimizer=adamw", "optimizer.foreach=true", "optimizer.lr=0.01"],
    "asgd, averaging": ["optimizer=asgd", "optimizer.t0=2"],
    "muon_sgd": ["optimizer=muon_sgd", "param_groups=sgd_for_vectors"],
}
"""One for each choice of the group, and further variants."""
STEADY = {"adadelta", "adafactor", "adagrad", "asgd", "rprop", "asgd, averaging"}
"""Those with neither momentum nor betas that a schedule could change."""
SCHEDULERS = {
    **{name: [f"scheduler={name}"] for name in ("constant", "exponential", "polynomial", "one_cycle", "warm_up_then_plateau")},
    "cosine": ["scheduler=cosine", "scheduler.unit=step"],
    "linear_warmup": ["scheduler=linear_warmup", "scheduler.duration=4", "scheduler.unit=step"],
    "multi_step": ["scheduler=multi_step", "scheduler.milestones=[1]"],
    "plateau": ["scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=10.0", "scheduler.cooldown=1"],
    "step": ["scheduler=step", "scheduler.step_size=1"],
    "torch": ["scheduler=torch", "scheduler.scheduler.T_0=2", "scheduler.unit=step"],
    "warmup_cosine": ["scheduler=warmup_cosine", "scheduler.schedules.warmup.duration=2", "scheduler.unit=step"],
    "warmup_multi_step": ["scheduler=warmup_multi_step", "scheduler.schedules.decay.milestones=[1]"],
}
SOON_STOPPED = ["callbacks.early_stopping.patience=2", "callbacks.early_stopping.min_delta=0.5"]
KINDS = ("weight_norm", "spectral_norm", "orthogonal")
ORDER = "loader.order={_target_: samewise.runner.data.order."
MORE = "+dataset.train_more={_target_: samewise.datasets.generated.GeneratedClassification, size: 8, channels: 3, length: 10, split: more}"
FURTHER = {
    "callbacks": [
        [],
        ["callbacks=[default,ema]", "callbacks.ema.decay=0.5", "callbacks.ema.every_steps=2"],
        ["callbacks=[ema,early_stopping]", *SOON_STOPPED],
        ["callbacks=[early_stopping,learning_rate,throughput]", "callbacks.early_stopping.patience=3"],
        ["callbacks=[swa,training_means,time_limit]"],
    ],
    "precision": [[], ["precision=bf16"], ["precision=fp16", "precision.initial_scale=64", "precision.growth_interval=2"]],
    "clip": [[], ["clip_norm=0.1"], ["clip_value=0.01"], ["clip_adaptive=0.1"]],
    "cut": [[], ["accumulate=2"], ["replicas=2"], ["replicas=3", "accumulate=2"], ["replicas=3", "strategy=elastic"]],
    "memory": [[], ["memory_format=channels_last"]],
    "groups": [
        [],
        ["param_groups=no_decay_on_norms"],
        ["param_groups=layerwise_decay"],
        ["+param_groups.body={match: [0.weight, 1.*], frozen: true}"],
        ["initialise.frozen=[3.*]"],
    ],
    "parametrisations": [[], *([f"+initialise.parametrisations.one={{match: 7.weight, kind: {kind}}}"] for kind in KINDS)],
    "order": [
        [],
        ["loader.shuffle=false", "loader.drop_last=true"],
        [ORDER + "First, _partial_: true, samples: 25}"],
        [ORDER + "RepeatedAugmentation, _partial_: true, repeats: 2, batch_size: 12, replicas: 1}"],
        ["order=weighted"],
        ["order=mixed", MORE, "loader.order.weights={train: 1, train_more: 2}"],
        ["order=repeated", MORE, "loader.order.repeats={train: 1, train_more: 0.5}"],
    ],
    "evaluate": [[], ["evaluate.every_steps=2"], ["evaluate.every_epochs=null"]],
    "checkpoint": [[], ["checkpoint.background=false"], ["checkpoint.keep_every_steps=2", "checkpoint.keep_last=1"]],
    "trace": [[], ["trace.every_steps=2"], ["trace.every_steps=0", "tracking.log_every_steps=2"]],
}
"""Other settings that a config may combine, by subject."""


def drawn(chance: random.Random, optimizer: str, scheduler: str) -> list[str]:
    """Overrides: an optimizer, a schedule, and a random choice of each of the rest."""
    chosen = {about: chance.choice(choices) for about, choices in FURTHER.items()}
    if optimizer == "muon":  # its model has none of these layers
        chosen |= {"groups": [], "parametrisations": []}
    if optimizer == "muon_sgd":  # it has groups of its own
        chosen |= {"groups": []}
    if optimizer == "rprop" and "param_groups=no_decay_on_norms" in chosen["groups"]:  # it has no weight decay
        chosen |= {"groups": []}
    if scheduler == "one_cycle" and optimizer in STEADY:
        chosen |= {"momentum": ["scheduler.cycle_momentum=false"]}
    return [*OPTIMIZERS[optimizer], *SCHEDULERS[scheduler], *(override for overrides in chosen.values() for override in overrides)]
