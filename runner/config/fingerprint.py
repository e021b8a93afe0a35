"""An experiment's identity: the part of its config that can change a result, the user's own code that this reaches, and their hash.

Imports neither torch nor mlflow, nor that code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from samewise.runner.config.tree import flat, without
from samewise.runner.errors import ConfigError
from samewise.runner.records import hugging_face, sources
from samewise.runner.records.files import read_json

OUTSIDE = frozenset(
    {
        "name",
        "run_root",
        "device",  # recorded in the environment: the same experiment on another device is compared, not confused
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
        "reproducibility.level",  # a name for the settings beside it
        "reproducibility.other_environment",
        "reproducibility.fill_uninitialized_memory",
    }
)
"""Paths that cannot change a result."""

HOST_KEYS = re.compile(r"(^|_)(root|dir|path)$|^download$")
"""Keys of `dataset` that say where the data lie on this machine; what they hold is fingerprinted in the environment."""

REPORTS = ("progress", "throughput", "learning_rate")
"""Callbacks that only report: their names in configs, and their modules'."""
REPORTING = re.compile(rf"^samewise\.runner\.callbacks\.({'|'.join(REPORTS)})\.")

AVERAGE = "samewise.runner.callbacks.ema.ExponentialMovingAverage"
FSDP = "samewise.runner.strategies.fsdp.FSDP"


def is_outside(path: str) -> bool:
    """Whether what is set at a path cannot change a result, as far as the path tells."""
    parts = path.replace("@", ".").replace("/", ".").split(".")
    if parts[0] == "callbacks" and len(parts) > 1 and parts[1] in REPORTS:
        return True
    return any(".".join(parts[:end]) in OUTSIDE for end in range(1, len(parts) + 1)) or (parts[0] == "dataset" and bool(HOST_KEYS.search(parts[-1])))


def fingerprint_of(whole: dict[str, Any]) -> str:
    """The sha256 of `identity`, in hexadecimal (64 digits)."""
    text = json.dumps(identity(whole), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def combine(config: str, code: Mapping[str, Any]) -> str:
    """An experiment's fingerprint: its config's where that reaches no code of the user's, else of both."""
    text = json.dumps({"config": config, "code": code}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest() if code else config


def targets(whole: Mapping[str, Any]) -> list[str]:
    """The classes and functions that a plain config names for what can change a result."""
    return sorted({value for path, value in flat(without(dict(whole), OUTSIDE)) if path.rpartition(".")[2] == "_target_" and isinstance(value, str)})


def reached_code(whole: Mapping[str, Any], packages: Sequence[str]) -> sources.Code:
    """The user's own code that a plain config reaches by way of these packages."""
    own = [name for name in targets(whole) if any(name.startswith(f"{package}.") for package in packages)]
    return sources.reach(own, packages, follows=lambda name: name.partition(".")[0] != "samewise")


def identity(whole: dict[str, Any]) -> dict[str, Any]:
    """A config that `plain` has made plain, less what cannot change a result and less this machine's paths. A value that is still missing is `???`."""
    strategy: Any = whole.get("strategy")
    callbacks: Any = whole.get("callbacks")
    initialise: Any = whole.get("initialise")
    kept = cast(dict[str, Any], without(whole, OUTSIDE))
    if isinstance(strategy, dict) and cast(dict[str, Any], strategy).get("rank_invariant") is True:
        del kept["strategy"]  # any number of ranks gives the same bits, by whatever means
    if isinstance(callbacks, dict):
        kept["callbacks"] = {name: call for name, call in cast(dict[str, Any], kept["callbacks"]).items() if not _only_reports(call)}
    if isinstance(kept.get("dataset"), dict):
        kept["dataset"] = _without_host(kept["dataset"])
    if isinstance(initialise, dict) and "weights" in initialise:
        kept["initialise"]["weights"] = _content(cast(dict[str, Any], initialise)["weights"])
    _spell_out(kept)
    _leave_out(kept)
    if (taken_over := _content(kept.pop("resume_from", None))) is not None:
        kept["resume_from"] = taken_over
    return kept


def _spell_out(kept: dict[str, Any]) -> None:
    """Write down defaults that once were others, so that what an older version trained with those is another experiment."""
    rules: Any = kept.get("param_groups")
    for rule in (kept.get("initialise"), *(cast(dict[str, Any], rules).values() if isinstance(rules, dict) else ())):
        if isinstance(rule, dict) and cast(dict[str, Any], rule).get("frozen"):
            rule.setdefault("frozen_statistics", "freeze")
    strategy: Any = kept.get("strategy")
    if isinstance(strategy, dict) and cast(dict[str, Any], strategy).get("_target_") == FSDP:
        strategy.setdefault("activation_checkpointing", [])
    callbacks: Any = kept.get("callbacks")
    for call in cast(dict[str, Any], callbacks).values() if isinstance(callbacks, dict) else ():
        if isinstance(call, dict) and cast(dict[str, Any], call).get("_target_") == AVERAGE:
            call.update({"decay": None, "every_steps": 1, "rescale": False} | call)


def _leave_out(kept: dict[str, Any]) -> None:
    """Take out settings that older versions did not have, where they change nothing, so that what those trained is the same experiment."""
    evaluate: Any = kept.get("evaluate")
    if isinstance(evaluate, dict) and cast(dict[str, Any], evaluate).get("limit", 0) is None:
        del evaluate["limit"]
    if cast(dict[str, Any], kept.get("compile") or {}).get("mode") == "off":
        del kept["compile"]


def _without_host(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_host(value) for key, value in cast(dict[str, Any], node).items() if not HOST_KEYS.search(key)}
    if isinstance(node, list):
        return [_without_host(value) for value in cast(list[Any], node)]
    return node


def _only_reports(callback: Any) -> bool:
    return callback is None or (isinstance(callback, dict) and bool(REPORTING.match(str(cast(dict[str, Any], callback).get("_target_", "")))))


def _content(weights: Any) -> Any:
    """A file, the folder of a checkpoint or what Hugging Face's cache has, by what is in it; anything else (the name of published weights, None) as it is."""
    if not isinstance(weights, str):
        return weights
    try:
        path = hugging_face.snapshot(weights) if weights.startswith(hugging_face.PREFIX) else Path(weights).expanduser()  # as whoever loads it finds it
        files = hugging_face.files_at(path)
    except ConfigError:  # told by whoever loads it
        return weights
    manifest = path / "manifest.json"
    if manifest.is_file():
        return f"sha256:{read_json(manifest, {'sha256?': str}).get('sha256')}"
    return f"sha256:{hugging_face.digest_of(files)}" if files[0].is_file() else weights
