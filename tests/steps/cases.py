"""One training of a few steps: the settings that it combines, as samewise's config; and how close to float64 it must be."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment

PACKAGE = "samewise_steps"
CLASSES = {"single": "Single", "elastic": "Elastic", "ddp": "DDP", "fsdp": "FSDP", "pipeline": "Pipeline", "rpc": "RPC"}
ROUNDING = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 1e-2}
"""The largest relative error of an update that rounding can explain, for optimizers that follow the gradient."""


@dataclass(frozen=True)
class Case:
    """What is combined. Everything else is samewise's default.

    Args:
        model: A name of `toys.MODELS`.
        optimizer: A name of torch.optim, and its options.
        samples: The size of the data set, used in its own order; without `drop_last` the last batch of an epoch is smaller.
        parts: For each of several phases, the parts of the model that it trains.
        groups: `param_groups`.
        frozen: `initialise.frozen`.
        statistics: `initialise.frozen_statistics`.
        second: The options of the second phase's optimizer, if it has one of its own.
        recomputed: `activation_checkpointing`.
        average: decay and every_steps of an average of the weights.
        strategy: Its name and settings; it runs on `processes`.
    """

    model: str = "Image"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.3})
    memory_format: str = "contiguous"
    replicas: int = 1
    accumulate: int = 1
    batch_size: int = 12
    samples: int = 36
    steps: int = 2
    drop_last: bool = True
    uneven: bool = False
    clip_norm: float | None = None
    dtype: str = "float32"
    cosine: bool = False
    average: tuple[float, int] | None = None
    parts: tuple[tuple[str, ...], ...] = ()
    groups: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    statistics: str = "freeze"
    second: dict[str, Any] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    strategy: str = "single"
    settings: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    device: str = "cpu"

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    @property
    def rounding(self) -> float:
        """How large the relative error of the update may be.

        Optimizers that divide by the size of the gradient amplify gradients that are mostly rounding; Muon itself computes in bfloat16.
        """
        if self.optimizer == "Muon":
            return 0.25
        steep = {"SGD": 1, "ASGD": 1, "Lars": 3, "Rprop": 100}.get(self.optimizer, 1 if self.options.get("eps", 0) == SMOOTH else 300)
        return ROUNDING[self.dtype] * steep

    def composed(self, run_root: Path, here: Path) -> Composed:
        """The experiment."""
        average = {"_target_": "samewise.runner.callbacks.ema.ExponentialMovingAverage", "rescale": False}
        average |= dict(zip(("decay", "every_steps"), self.average or (), strict=False))
        schedule = {"_target_": f"samewise.runner.optim.schedules.{'Cosine' if self.cosine else 'Constant'}", "unit": "step"}
        package = f"timm.optim.{self.optimizer.lower()}" if self.optimizer in ("Lamb", "Lars") else "torch.optim"
        optimizer = {"_target_": f"{package}.{self.optimizer}", "_partial_": True, **self.options}
        given: dict[str, Any] = {
            "name": "step",
            "run_root": str(run_root),
            "device": self.device,
            "max_epochs": 100,
            "max_steps": self.steps,
            **{name: getattr(self, name) for name in ("batch_size", "replicas", "accumulate", "clip_norm", "memory_format")},
            "recipe": {"_target_": f"{PACKAGE}.toys.ToyRecipe", "parts": [list(names) for names in self.parts]},
            "model": {"_target_": f"{PACKAGE}.toys.{self.model}"},
            "dataset": {split: {"_target_": f"{PACKAGE}.toys.Toys", "samples": self.samples, "uneven": self.uneven} for split in ("train", "valid")},
            "transforms": {"train": {"sample": [], "batch": []}, "eval": {"sample": [], "batch": []}},
            "optimizer": {"phase0": optimizer, "phase1": {**optimizer, **self.second}} if self.second else optimizer,
            "scheduler": schedule,
            "param_groups": self.groups,
            "initialise": {
                "weights": None,
                "into": None,
                "exclude": [],
                "frozen": list(self.frozen),
                **({"frozen_statistics": self.statistics} if self.frozen else {}),
            },
            "activation_checkpointing": list(self.recomputed),
            "precision": {"_target_": "samewise.runner.precision.Precision", "dtype": self.dtype, "initial_scale": 8.0},
            "strategy": {"_target_": f"samewise.runner.strategies.{self.strategy}.{CLASSES[self.strategy]}", **self.settings},
            "callbacks": {"ema": average} if self.average else {},
            "loader": {"shuffle": False, "drop_last": self.drop_last},
            "evaluate": {"every_epochs": None, "batch_size": 36},
            "checkpoint": {"every_epochs": None, "background": False},
            "tracking": {"enabled": False},
        }
        cfg = OmegaConf.merge(OmegaConf.structured(Experiment), given)
        assert isinstance(cfg, DictConfig)
        return Composed(cfg, project=Project(here, (PACKAGE,)))

    def varied(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


SMOOTH = 0.03
"""An eps that is large compared with the rounding of a gradient."""
