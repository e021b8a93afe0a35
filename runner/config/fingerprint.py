"""An experiment's identity: what can change a result, in config and user code, and its hash.

Imports neither torch nor mlflow, nor that code.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import at, flat, without
from samewise.runner.errors import ConfigError
from samewise.runner.records import hugging_face, sources
from samewise.runner.records.files import read_json

OUTSIDE = frozenset(
    {
        "name",
        "run_root",
        "device",  # recorded in the environment: the same experiment can be compared across devices
        "activation_checkpointing",
        "compile.max_graphs",
        "loader.num_workers",
        "loader.prefetch_factor",
        "loader.pin_memory",
        "checkpoint",
        "evaluate.pictures",
        "evaluate.also",
        "recipe.reads",  # how `predict` reads a user's file
        "strategy.init_method",
        "strategy.join_timeout_s",
        "strategy.timeout_s",
        "strategy.max_restarts",
        "strategy.shrink",
        "strategy.grace_s",
        "trace",
        "tracking",
        "launcher",
        "sweeper",
        "debug",
        "reproducibility.level",  # a name for the adjacent settings
        "reproducibility.other_environment",
        "reproducibility.fill_uninitialized_memory",
        "reproducibility.detect_anomaly",
    }
)
"""Paths that cannot change a result."""

ADDED = (
    *("evaluate.limit", "loader.limit", "clip_value", "clip_adaptive", "skip_spikes"),
    *("reference_batch_size", "reference_power", "clip_norms"),
    *("strategy.shard_size", "strategy.offload"),
)
"""Settings that older versions lacked. With null, or empty, they change nothing."""

HOST_KEYS = re.compile(r"(^|_)(root|dir|path)$|^download$")
"""Keys of `dataset` for the data's location on this machine; their content is fingerprinted in the
environment."""

REPORTS = ("progress", "throughput", "learning_rate", "time_limit")
"""Callbacks that only report: their names in configs, and their modules'."""
REPORTING = re.compile(rf"^samewise\.runner\.callbacks\.({'|'.join(REPORTS)})\.")

AVERAGE = "samewise.runner.callbacks.ema.ExponentialMovingAverage"
FSDP = "samewise.runner.strategies.fsdp.FSDP"
OURS = "samewise.datasets."
DIGEST = "sha256:"
COCO = "samewise.datasets.coco.COCO"


def is_outside(path: str) -> bool:
    """Return whether a path's value cannot change a result, judging by the path alone."""
    parts = path.replace("@", ".").replace("/", ".").split(".")
    if parts[0] == "callbacks" and len(parts) > 1 and parts[1] in REPORTS:
        return True
    return any(".".join(parts[:end]) in OUTSIDE for end in range(1, len(parts) + 1)) or (
        parts[0] == "dataset" and bool(HOST_KEYS.search(parts[-1]))
    )


def finds_data(path: str) -> bool:
    """Return whether a path's value locates data.

    It can change a result, though not the fingerprint.
    """
    parts = path.split(".")
    return parts[0] == "dataset" and any(
        part != "download" and HOST_KEYS.search(part) for part in parts[1:]
    )


def data_places(whole: Mapping[str, Any]) -> dict[str, Path]:
    """The data set's settings that are existing paths on this machine."""
    return {
        name: place
        for name, value in flat({"dataset": whole.get("dataset") or {}}, lists=False)
        if isinstance(value, str) and value and is_outside(name)
        if (place := Path(value).expanduser()).exists()
    }


def fingerprint_of(whole: dict[str, Any]) -> str:
    """The SHA-256 of `identity`: 64 hexadecimal digits."""
    # The spelling must never change: the folders of existing runs are named by its hash
    text = json.dumps(identity(whole), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def combine(config: str, code: Mapping[str, Any]) -> str:
    """Combine a config's fingerprint with that of the user code it reaches, if there is any."""
    text = json.dumps(
        {"config": config, "code": code}, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    # Without user code the fingerprint is the config's, as in versions that left code out
    return hashlib.sha256(text.encode()).hexdigest() if code else config


def targets(whole: Mapping[str, Any]) -> list[str]:
    """The classes and functions that a plain config names and that can change a result."""
    return sorted(
        {
            value
            for path, value in flat(without(dict(whole), OUTSIDE))
            if path.rpartition(".")[2] == "_target_" and isinstance(value, str)
        }
    )


def reached_code(whole: Mapping[str, Any], packages: Sequence[str]) -> sources.Code:
    """The user's code in these packages that a plain config reaches."""
    # samewise's own code is part of the environment, not of the experiment
    return sources.reach(
        [
            name
            for name in (targets(whole) if packages else ())
            if any(name.startswith(f"{package}.") for package in packages)
        ],
        packages,
        follows=lambda name: name.partition(".")[0] != "samewise",
    )


def identity(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a plain config without settings that cannot change a result and without local paths.

    A missing value stays `???`.
    """
    strategy: Any = whole.get("strategy")
    callbacks: Any = whole.get("callbacks")
    initialise: Any = whole.get("initialise")
    identified = cast(dict[str, Any], without(whole, OUTSIDE))
    if isinstance(strategy, dict) and cast(dict[str, Any], strategy).get("rank_invariant") is True:
        del identified["strategy"]  # any number of ranks gives the same bits
        if cast(dict[str, Any], strategy).get("sync_batch_norm"):
            identified["strategy"] = {"sync_batch_norm": True}
    if isinstance(callbacks, dict):
        identified["callbacks"] = {
            name: call
            for name, call in cast(dict[str, Any], identified["callbacks"]).items()
            if call is not None
            and not (isinstance(call, dict) and REPORTING.match(str(call.get("_target_", ""))))
        }
    if isinstance(identified.get("dataset"), dict):
        identified["dataset"] = _remove_host_settings(identified["dataset"])
    if isinstance(initialise, dict) and "weights" in initialise:
        identified["initialise"]["weights"] = _content(cast(dict[str, Any], initialise)["weights"])
    distil = identified.pop("distil", None) or {}
    if distil.get("teacher") is not None:
        identified["distil"] = {**distil, "weights": _content(distil["weights"])}
    _spell_out(identified)
    _remove_unchanged(identified)
    # Configs of versions without this setting have the same identity as its default
    if (taken_over := _content(identified.pop("resume_from", None))) is not None:
        identified["resume_from"] = taken_over
    return identified


def contents(whole: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each file in `SOURCES`, by setting."""
    return {
        path: content
        for path in SOURCES
        if str(content := _content(at(whole, path))).startswith(DIGEST)
    }


def named_contents(
    path: str, values: Sequence[Any], configs: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]
) -> list[Any]:
    """Return a setting of several runs with the users' names of files in place of their digests.

    Where different files have one name, the beginning of the digest follows.

    Args:
        path: The setting.
        values: The value in each run's `identity`.
        configs: Each run's plain config, and how the user named files in it.
    """
    names = [
        sources.get(path) or at(whole, path) if str(value).startswith(DIGEST) else value
        for value, (whole, sources) in zip(values, configs, strict=True)
    ]
    is_unique = len({*map(str, names)}) == len({*map(str, values)})
    return [
        name if is_unique or name == value else f"{name} ({str(value)[:19]})"
        for name, value in zip(names, values, strict=True)
    ]


def _spell_out(config: dict[str, Any]) -> None:
    """Write out defaults that changed since an older version.

    What that version trained with them stays a different experiment.
    """
    rules: Any = config.get("param_groups")
    for rule in (
        config.get("initialise"),
        *(cast(dict[str, Any], rules).values() if isinstance(rules, dict) else ()),
    ):
        if isinstance(rule, dict) and cast(dict[str, Any], rule).get("frozen"):
            rule.setdefault("frozen_statistics", "freeze")
    strategy: Any = config.get("strategy")
    if isinstance(strategy, dict) and cast(dict[str, Any], strategy).get("_target_") == FSDP:
        strategy.setdefault("activation_checkpointing", [])
    callbacks: Any = config.get("callbacks")
    for call in cast(dict[str, Any], callbacks).values() if isinstance(callbacks, dict) else ():
        if isinstance(call, dict) and cast(dict[str, Any], call).get("_target_") == AVERAGE:
            call.update({"decay": None, "every_steps": 1, "rescale": False} | call)


def _remove_unchanged(config: dict[str, Any]) -> None:
    """Remove settings that older versions lacked, where they change nothing.

    What those versions trained stays the same experiment.
    """
    for group, _, name in (path.rpartition(".") for path in ADDED):
        settings: Any = config.get(group) if group else config
        if isinstance(settings, dict) and cast(dict[str, Any], settings).get(name, 0) in (None, {}):
            del settings[name]
    if cast(dict[str, Any], config.get("compile") or {}).get("mode") == "off":
        del config["compile"]
    dataset: Any = config.get("dataset")
    for node in (
        (dataset, *cast(dict[str, Any], dataset).values()) if isinstance(dataset, dict) else ()
    ):
        if (
            isinstance(node, dict)
            and str(cast(dict[str, Any], node).get("_target_", OURS)).startswith(OURS)
            and node.get("decode") == "worker"
        ):
            del node["decode"]
    _remove_same_classes(dataset)


def _remove_same_classes(dataset: Any) -> None:
    """Remove the source of a COCO file's classes where it is the training's file.

    Files of an older version's run, which lack the setting, had the same classes.
    """
    splits = (
        {
            name: node
            for name, node in cast(dict[str, Any], dataset).items()
            if isinstance(node, dict)
        }
        if isinstance(dataset, dict)
        else {}
    )
    for node in splits.values():
        if node.get("_target_") == COCO and node.get("classes_from") in (
            None,
            splits.get("train", {}).get("annotations"),
        ):
            node.pop("classes_from", None)


def _remove_host_settings(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _remove_host_settings(value)
            for key, value in cast(dict[str, Any], node).items()
            if not HOST_KEYS.search(key)
        }
    if isinstance(node, list):
        return [_remove_host_settings(value) for value in cast(list[Any], node)]
    return node


def _content(weights: Any) -> Any:
    """Replace a file, a checkpoint's folder or a Hugging Face cache entry by its content's digest.

    Other values (a published name, None) stay.
    """
    if not isinstance(weights, str):
        return weights
    try:
        # Found as the loader finds it
        path = (
            hugging_face.snapshot(weights)
            if weights.startswith(hugging_face.PREFIX)
            else Path(weights).expanduser()
        )
        files = hugging_face.files_at(path)
    except ConfigError:  # reported by the loader
        return weights
    manifest = path / "manifest.json"
    if manifest.is_file():
        written = read_json(manifest, {"sha256?": str, "content?": str})
        # The file itself also says how long training took
        return f"{DIGEST}{written.get('content', written.get('sha256'))}"
    return f"{DIGEST}{hugging_face.digest_of(files)}" if files[0].is_file() else weights
