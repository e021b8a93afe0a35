"""Rules for the runner's own settings. Imports neither torch nor mlflow."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, cast

from samewise.runner.config.monitors import mode_of
from samewise.runner.config.schema import Experiment
from samewise.runner.config.tree import at, flat
from samewise.runner.errors import Problem, nearest
from samewise.runner.processes.variables import VARIABLES
from samewise.runner.records.found import matching

Config = Mapping[str, Any]

LOWEST: dict[str, float] = {
    "max_epochs": 1,
    "max_steps": 0,
    "batch_size": 1,
    "replicas": 1,
    "accumulate": 1,
    "compile.max_graphs": 1,
    "loader.num_workers": 0,
    "loader.prefetch_factor": 1,
    "loader.limit": 1,
    "evaluate.every_epochs": 0.001,
    "evaluate.every_steps": 1,
    "evaluate.batch_size": 1,
    "evaluate.limit": 1,
    "checkpoint.every_epochs": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 0,
    "checkpoint.keep_every_steps": 1,
    "trace.every_steps": 0,
    "trace.layers_every_steps": 0,
    "tracking.log_every_steps": 1,
    "tracking.flush_timeout_s": 0,
    "reproducibility.threads": 1,
    "distil.alpha": 0,
}
"""The least that each number may be."""

HIGHEST: dict[str, float] = {
    "batch_size": 2**31,
    "replicas": 2**16,
    "accumulate": 2**20,
    "loader.prefetch_factor": 1024,
    "evaluate.batch_size": 2**31,
    "reproducibility.threads": 1024,
    "sweeper.trials": 100_000,
    "distil.alpha": 1,
}
"""The most that each may be: far above what is of use, and below what takes the machine down."""

OPTIMIZER_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, math.inf),
    "momentum": (0, 1),
    "dampening": (0, 1),
    "rho": (0, 1),
    "alpha": (0, 1),
    "weight_decay": (0, math.inf),
    "eps": (0, math.inf),
    "betas": (0, 1),
}
"""What an optimizer's numbers may be: [lowest, highest). torch itself accepts any dampening, and a
momentum or alpha of 1, which diverges."""

_EXAMPLES = {f"loader.order.{x}": "{train: 3, train_b: 1}" for x in ("weights", "repeats")}
"""What the hint shows for a setting that must be given, where VALUE says too little."""
_POSITIVE = (
    "clip_norm",
    "clip_value",
    "clip_adaptive",
    "skip_spikes",
    "distil.temperature",
    "reference_batch_size",
    "reference_power",
)

LEVELS = ("strict", "portable", "fast")


def problems_in(whole: Config) -> list[Problem]:
    """The problems that the rules find in a plain config."""
    return [problem for rule in RULES for problem in rule(whole)]


def keys_are_known(cfg: Config) -> Iterator[Problem]:
    keys = Experiment.__dataclass_fields__
    for key, value in cfg.items():
        if key not in keys:
            yield Problem(key, "no such key", hint=nearest(key, keys))
        elif isinstance(value, Mapping) and (parts := _sections().get(key)):
            for part in cast(Config, value):
                if part not in parts:  # +loader.x=1: Hydra adds it
                    yield Problem(f"{key}.{part}", "no such key", hint=nearest(part, parts))


@cache
def _sections() -> dict[str, list[str]]:
    """The keys of each section of the settings."""
    return {
        field.name: [key.name for key in fields(field.default_factory)]
        for field in fields(Experiment)
        if is_dataclass(field.default_factory)
    }


def nothing_is_missing(cfg: Config) -> Iterator[Problem]:
    for path, value in flat(cfg):
        if value == "???":
            group = path in (
                "recipe",
                "model",
                "dataset",
                "transforms",
                "optimizer",
                "scheduler",
                "precision",
                "strategy",
            )
            yield Problem(
                path,
                "must be given",
                hint=f"{path}=CHOICE; `samewise list {path}` shows them"
                if group
                else f"{path}={_EXAMPLES.get(path, 'VALUE')}",
            )


def numbers_are_possible(cfg: Config) -> Iterator[Problem]:
    for path, lowest in LOWEST.items():
        value = at(cfg, path)
        # NaN is not at least `lowest`, but not below it either
        if _is_number(value) and not value >= lowest:
            yield Problem(path, "is too small", value, f"at least {lowest:g}")
    for path, highest in HIGHEST.items():
        value = at(cfg, path)
        if _is_number(value) and value > highest:
            yield Problem(path, "is too large", value, f"at most {highest:,}".replace(",", " "))
    by_phase = [f"clip_norms.{name}" for name in cfg.get("clip_norms") or ()]
    for path in (*_POSITIVE, *by_phase, "checkpoint.every_minutes"):
        if _is_number(value := at(cfg, path)) and not 0 < value < math.inf:
            yield Problem(
                path,
                "must be a positive number",
                value,
                "a positive number, or null for no clipping"
                if path.startswith("clip")
                else "a positive number, or null",
            )
    if _is_number(interval := at(cfg, "tracking.send_every_s")) and not 0 < interval < math.inf:
        yield Problem(
            "tracking.send_every_s",
            "must be a positive number",
            interval,
            "seconds between two transmissions",
        )
    if _is_number(seed := cfg.get("seed")) and not -(2**63) <= seed < 2**63:
        yield Problem("seed", "is too large", seed, "a whole number of at most 63 bits")


def batch_can_be_cut(cfg: Config) -> Iterator[Problem]:
    size, replicas, accumulate = (cfg.get(key) for key in ("batch_size", "replicas", "accumulate"))
    if not all(_is_number(value) and value >= 1 for value in (size, replicas, accumulate)):
        return
    pieces = cast(int, replicas) * cast(int, accumulate)
    if cast(int, size) % pieces:
        near = max(1, round(cast(int, size) / pieces)) * pieces
        yield Problem(
            "batch_size",
            f"cannot be cut into {pieces} equal micro-batches",
            size,
            f"a multiple of replicas * accumulate = {replicas} * {accumulate}",
            f"batch_size={near}",
        )


def monitor_has_a_mode(cfg: Config) -> Iterator[Problem]:
    monitors = [
        (
            "evaluate.monitor",
            "evaluate.mode",
            at(cfg, "evaluate.monitor"),
            at(cfg, "evaluate.mode"),
        ),
        *(
            ("evaluate.also", f"evaluate.also.{name}", name, mode)
            for name, mode in (at(cfg, "evaluate.also") or {}).items()
        ),
        *(
            (f"{part}.{key}", f"{part}.mode", at(cfg, f"{part}.{key}"), at(cfg, f"{part}.mode"))
            for part, key in (("callbacks.early_stopping", "monitor"), ("scheduler", "metric"))
            if at(cfg, f"{part}.{key}")
        ),
    ]
    for path, of_mode, monitor, mode in monitors:
        usual = mode_of(str(monitor))
        # Composing reports a reference that leads nowhere
        if "${" in str(monitor):
            continue
        if "/" not in str(monitor):
            # Other trainers write `val_loss`
            suggestion = "valid/" + re.sub(r"^(val|valid|validation|eval|test)_", "", str(monitor))
            yield Problem(
                path,
                "does not name a split",
                monitor,
                "SPLIT/METRIC",
                f"{path}={suggestion}" if path != "evaluate.also" else suggestion,
            )
        elif (
            usual is not None
            and mode in ("min", "max")
            and mode != usual.value
            # The mode of the same metric is reported once, at `evaluate.mode`
            and (path == "evaluate.monitor" or monitor != at(cfg, "evaluate.monitor"))
        ):
            yield Problem(of_mode, f"would take the worst {monitor} as the best", mode, usual.value)


def optimizer_is_possible(cfg: Config) -> Iterator[Problem]:
    for root in ("optimizer", "param_groups"):
        for path, value in flat(cfg.get(root) or {}):
            # `betas.0` is one of the numbers of `betas`
            name = next((part for part in reversed(path.split(".")) if not part.isdigit()), "")
            # `lr=[0.1,0.01]` is a list where a sweep was meant
            if name in ("lr", "momentum", "weight_decay") and path.endswith(f"{name}.0"):
                above = f"{root}.{path.removesuffix('.0')}"
                yield Problem(
                    above,
                    "wrong type",
                    at(cfg, above),
                    "a number",
                    f"{above}=A,B, without brackets, trains with each",
                )
            if name not in OPTIMIZER_RANGES or not _is_number(value):
                continue
            lowest, highest = OPTIMIZER_RANGES[name]
            if not lowest <= value < highest:
                yield Problem(
                    f"{root}.{path}",
                    "is out of range",
                    value,
                    f"at least {lowest:g}"
                    + (f" and less than {highest:g}" if highest < math.inf else ", and finite"),
                )


def name_is_a_folder(cfg: Config) -> Iterator[Problem]:
    name = cfg.get("name")
    if (
        name is not None
        and "${" not in str(name)
        and not (re.fullmatch(r"\w[\w.+-]*", str(name)) and len(str(name).encode()) <= 200)
    ):
        yield Problem(
            "name",
            "cannot be a folder's name",
            name,
            "letters, digits and _ . + -, beginning with a letter or digit; at most 200 bytes",
        )


def resumed_checkpoint_is_there(cfg: Config) -> Iterator[Problem]:
    value = cfg.get("resume_from")
    if value is None or str(value).startswith(
        "run:"
    ):  # a run that does not exist is reported elsewhere
        return
    folder = Path(str(value)).expanduser()
    if not (folder / "manifest.json").is_file():
        # A run's folder may have been given for that of its checkpoint
        near = sorted((folder / "checkpoints").glob("step-*"))
        hint = f"resume_from={near[-1]}" if near else "a run keeps them in RUN/checkpoints"
        if (
            not near
            and not folder.exists()
            and len(
                runs := matching(str(value), run_root=Path(str(cfg.get("run_root"))).expanduser())
            )
            == 1
        ):
            hint = (
                f"resume_from=run:{value}/last, that run's last checkpoint: "
                f"{runs[0].checkpoints / 'latest'}"
            )
        yield Problem(
            "resume_from",
            "is not the folder of a checkpoint",
            value,
            "RUN/checkpoints/step-00000040, or latest or best there; or run:RUN, run:RUN/last",
            hint,
        )


def run_root_is_a_folder(cfg: Config) -> Iterator[Problem]:
    root = cfg.get("run_root")
    if isinstance(root, str) and not root.strip():
        yield Problem(
            "run_root",
            "is not a folder name",
            root,
            "a folder",
            "run_root=runs is the usual one; run_root=. the current one",
        )
    elif isinstance(root, str) and os.path.islink(root) and not os.path.exists(root):
        yield Problem(
            "run_root", f"is a link to {os.readlink(root)}, which does not exist", root, "a folder"
        )
    elif isinstance(root, str) and root.startswith("~"):
        yield Problem(
            "run_root",
            "begins with ~, which a shell replaces only outside quotes",
            root,
            "a folder",
            f"run_root={Path(root).expanduser()}",
        )


def variables_only_compute(cfg: Config) -> Iterator[Problem]:
    for name, value in (at(cfg, "reproducibility.variables") or {}).items():
        if name not in VARIABLES:
            yield Problem(
                f"reproducibility.variables.{name}",
                "a config may not set this variable",
                value,
                f"one that chooses how numbers are computed: {', '.join(VARIABLES)}",
                "to set it anyway, export it in the shell",
            )


def no_timing_decides_bits(cfg: Config) -> Iterator[Problem]:
    if (
        at(cfg, "reproducibility.benchmark") is True
        and at(cfg, "reproducibility.deterministic") is True
    ):
        yield Problem(
            "reproducibility.benchmark",
            "chooses cuDNN's algorithms by timing, so they and the bits can change from run to run",
            True,
            "false, with deterministic: true",
            "reproducibility=fast allows it, but promises nothing",
        )


def words_are_known(cfg: Config) -> Iterator[Problem]:
    for path, choices in (
        ("reproducibility.level", LEVELS),
        ("reproducibility.other_environment", ("refuse", "record")),
    ):
        value = at(cfg, path)
        if value not in choices:
            yield Problem(path, "no such choice", value, f"one of: {', '.join(choices)}")


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    keys_are_known,
    nothing_is_missing,
    numbers_are_possible,
    batch_can_be_cut,
    monitor_has_a_mode,
    optimizer_is_possible,
    name_is_a_folder,
    run_root_is_a_folder,
    variables_only_compute,
    resumed_checkpoint_is_there,
    no_timing_decides_bits,
    words_are_known,
)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
