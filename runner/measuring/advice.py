"""Interpret a profile: which parts of a step take too long, why, and which settings would help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.data.dataset import without_transforms
from samewise.runner.training.run import Run


def advise(run: Run, measurement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what to change, the part with the largest share of a step first.

    Args:
        run: The measured run.
        measurement: A rank's measurement: `measured_ms`, `parts_ms`, `ranges_ms`, `batch_ms`.

    Returns:
        For each cause its `part`, its `share` of the step, `why` in a sentence, and `change`: for
        each override, whether it keeps the bits.
    """
    parts, step_ms = measurement["parts_ms"], measurement["measured_ms"] or 1.0
    # A container or a job may have only some of the machine's cores
    cores = len(os.sched_getaffinity(0))
    causes = list[dict[str, Any]]()
    for part, (min_share, rule) in _RULES.items():
        if parts[part] / step_ms >= min_share:
            why, changes = rule(run, measurement, cores)
            causes.append(_cause(run, part, parts[part] / step_ms, why, changes))
    model = (parts["forward"] + parts["backward"]) / step_ms
    if model >= 0.5:
        causes.append(
            _cause(
                run,
                "forward and backward",
                model,
                "the model's own work",
                [*_model_settings(run, cores)],
            )
        )
    return sorted(causes, key=lambda x: -x["share"])


def _cause(run: Run, part: str, share: float, why: str, changes: list[str]) -> dict[str, Any]:
    return {
        "part": part,
        "share": share,
        "why": why,
        "change": {x: all(_keeps_bits(run, key) for key in x.split()) for x in changes},
    }


def _keeps_bits(run: Run, override: str) -> bool:
    key = override.partition("=")[0]
    # What is outside the fingerprint changes no bits, and a rank-invariant strategy neither
    return is_outside(key) or (
        key.startswith("strategy.") and run.config.strategy.get("rank_invariant") is True
    )


def _data(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    settings, workers = run.config.loader, int(run.config.loader.num_workers)
    ranges: dict[str, float] = measurement["batch_ms"] if workers else measurement["ranges_ms"]
    sample_ms = {
        name: ms
        for name, ms in ranges.items()
        if name.partition("/")[0] in ("data", "transforms")
        and name != "transforms/batch transforms"
    }
    batch_ms = sum(sample_ms.values())
    # With workers, a step only waits for its batch; without, it makes the batch
    rest_ms = max(
        measurement["measured_ms"] - (measurement["parts_ms"]["data"] if workers else batch_ms),
        1e-6,
    )
    slowest, needed_workers = (
        max(sample_ms, key=lambda name: sample_ms[name]),
        max(1, ceil(batch_ms / rest_ms)),
    )
    dataset_name = type(without_transforms(run.splits["train"].dataset)).__name__
    source = (
        f"the data set {dataset_name}"
        if slowest.startswith("data")
        else f"the transform {slowest.partition('/')[2]}"
    )
    why = (
        f"a step's batch takes {batch_ms:.3g} ms to make, most of it in {source}, and the rest of "
        f"the step {rest_ms:.3g} ms"
    )
    if cores == 1 and not workers:
        return (
            f"{why}; on one core workers would take that from training, so make the "
            "samples cheaper",
            [*_cache_settings(run), *decode_on_device(run)],
        )
    if needed_workers > workers and workers < cores:
        return why, [
            f"loader.num_workers={min(max(needed_workers, workers + 1), cores)}",
            *_cache_settings(run),
        ]
    if workers and settings.prefetch_factor < 4:
        return f"{why}; {workers} workers are enough on average", [
            f"loader.prefetch_factor={2 * settings.prefetch_factor}",
            *_cache_settings(run),
        ]
    return f"{why}; more than {workers} workers would need more than the {cores} available cores", [
        *_cache_settings(run),
        *decode_on_device(run),
    ]


def _cache_settings(run: Run) -> list[str]:
    return (
        ["dataset.cache=memory"] if OmegaConf.select(run.config, "dataset.cache") == "none" else []
    )


def decode_on_device(run: Run) -> list[str]:
    """Return the overrides that have a CUDA device decode JPEG files.

    Empty unless workers decode now, and the transforms have a variant for the device.
    """
    transforms, is_cuda = run.composed.choices.get("transforms"), run.strategy.device.type == "cuda"
    possible = (
        is_cuda
        and transforms in ("imagenet", "imagenet_v2")
        and OmegaConf.select(run.config, "dataset.decode") == "worker"
    )
    return [f"dataset.decode=device transforms={transforms}_on_device"] if possible else []


def _transfer(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    settings = run.config.loader
    if run.strategy.device.type == "cpu":
        return "each batch is copied into another memory layout", [
            "memory_format=contiguous"
        ] if str(run.config.memory_format) == "channels_last" else []
    if settings.pin_memory:
        return "the batch is large for the transfer to the device", []
    return "the batch is not in page-locked memory, so the device waits for its copy", [
        "loader.pin_memory=true"
    ]


def _transforms(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    transform_ms = {
        name.partition("/")[2]: ms
        for name, ms in measurement["ranges_ms"].items()
        if name.startswith("transforms/")
    }
    slowest = max(transform_ms, key=lambda name: transform_ms[name])
    if slowest == "batch transforms":
        return (
            "the batch transforms (transforms.train.batch) take "
            f"{transform_ms[slowest]:.3g} ms a step",
            [],
        )
    why = (
        f"the transform {slowest} takes {transform_ms[slowest]:.3g} ms a step, in the process "
        "that trains"
    )
    rest_ms = (
        measurement["measured_ms"]
        - measurement["parts_ms"]["data"]
        - sum(transform_ms.values())
        + transform_ms.get("batch transforms", 0.0)
    )
    needed_workers = ceil(sum(transform_ms.values()) / max(rest_ms, 1e-6))
    return (
        (f"{why}; on one core workers would not help", [])
        if cores == 1
        else (why, [f"loader.num_workers={max(1, min(needed_workers, cores))}"])
    )


def _exchange(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    strategy = run.config.strategy
    changes = ["strategy.overlap=true"] if strategy.get("overlap") is False else []
    changes += (
        [f"strategy.bucket_mb={strategy.bucket_mb * 2:g}"] if strategy.get("bucket_mb") else []
    )
    return "gradients are added up over replicas and processes", [
        *changes,
        f"accumulate={2 * run.config.accumulate} batch_size={2 * run.batch_size}",
    ]


def _optimizer(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    # With null, updates are fused where that is possible
    changes = ["optimizer.fused=true"] if run.config.optimizer.get("fused") is False else []
    return f"the update of {sum(x.numel() for x in run.parameters):,} parameters", [
        *changes,
        f"batch_size={2 * run.batch_size}",
    ]


def _trace(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    every = run.config.trace.every_steps
    return (
        f"every {'' if every == 1 else f'{every} '}step{'s' * (every != 1)} all gradients "
        "and weights are hashed",
        [f"trace.every_steps={10 * every}"],
    )


def _callbacks(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    callback_ms = {
        name.partition("/")[2]: ms
        for name, ms in measurement["ranges_ms"].items()
        if name.startswith("callbacks/")
    }
    slowest = max(callback_ms, key=lambda name: callback_ms[name], default="")
    every = OmegaConf.select(run.config, f"callbacks.{slowest}.every_steps")
    return f"the callback {slowest} takes {callback_ms.get(slowest, 0.0):.3g} ms a step", [
        f"callbacks.{slowest}.every_steps={10 * every}"
    ] if every else []


def _tracking(run: Run, measurement: Mapping[str, Any], cores: int) -> tuple[str, list[str]]:
    return "metrics are written at every step", [
        f"tracking.log_every_steps={10 * run.config.tracking.log_every_steps}"
    ]


def _model_settings(run: Run, cores: int) -> Iterator[str]:
    """Yield settings with which the model computes faster; most make it another experiment."""
    cfg, is_cuda = run.config, run.strategy.device.type == "cuda"
    if is_cuda and cfg.precision.get("dtype") == "float32":
        yield "precision=bf16"
    # These refuse compile
    cannot_compile = (
        cfg.activation_checkpointing
        or cfg.reproducibility.level == "portable"
        or not run.strategy.compiles
    )
    if str(cfg.compile.mode) == "off" and not cannot_compile:
        yield "compile=default"
    if str(cfg.memory_format) == "contiguous" and any(
        isinstance(x, nn.Conv2d) for x in run.model.modules()
    ):
        yield "memory_format=channels_last"
    if not is_cuda and cfg.reproducibility.threads != cores:
        yield f"reproducibility.threads={cores}"


_RULES: Mapping[
    str, tuple[float, Callable[[Run, Mapping[str, Any], int], tuple[str, list[str]]]]
] = {
    "data": (0.1, _data),
    "transfer": (0.1, _transfer),
    "transforms": (0.15, _transforms),
    "exchange": (0.15, _exchange),
    "optimizer": (0.2, _optimizer),
    "trace": (0.1, _trace),
    "callbacks": (0.1, _callbacks),
    "tracking": (0.1, _tracking),
}
"""For each part, the share of a step from which it gets advice, and what advises."""
