"""The configs of runs on disk, with overrides applied.

`records.found` finds the runs. Imports neither torch nor mlflow.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config import compose
from samewise.runner.config.check.settings import keys_are_known
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import finds_data, is_outside
from samewise.runner.config.override_text import read_overrides
from samewise.runner.config.overrides import try_override
from samewise.runner.config.tree import at, differences, plain, same
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import header, shapes
from samewise.runner.records import trust as signatures
from samewise.runner.records.files import read_json, read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import RUN, below, find


def trusted_config_of(
    folder: RunFolder, overrides: Sequence[str] = (), *, trust: bool, received: str = ""
) -> Composed:
    """A run's saved config with overrides, for a command that instantiates its components.

    ConfigError as in `config_in` and `records.trust.require`.
    """
    composed = config_in(folder.config, overrides)
    signatures.require(folder.config, trust=trust, uses=signatures.MAKES, received=received)
    return composed


def config_in(file: Path, overrides: Sequence[str] = ()) -> Composed:
    """A saved config with overrides (`seed=1`, `+recipe.test_time_augmentation=flip`).

    Values that referred to an overridden one change with it.

    ConfigError if an override names no key of the config, or adds one that is there, or its value
    does not fit.
    """
    saved = compose.load(file)
    cfg: Any = saved.cfg
    before: Any = OmegaConf.select(cfg, "evaluate.monitor", throw_on_resolution_failure=False)
    # A second run may have been given in place of an override
    runs = [text for text in overrides if "=" not in text and Path(text).exists()]
    parsed, problems = read_overrides([text for text in overrides if text not in runs])
    problems += [Problem(x, "is not an override", hint="give one run at a time") for x in runs]
    for override in parsed:
        key = override.key_or_group
        present: Any = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        is_value = not override.is_delete() and not isinstance(override.value(), dict)
        if isinstance(present, DictConfig) and is_value:
            problems.append(
                Problem(
                    key,
                    "is a group of the run's config; only values can be overridden",
                    override.value(),
                    f"{key}.NAME=VALUE",
                    f"its keys are {', '.join(str(name) for name in present if name != '_target_')}",
                )
            )
        elif problem := try_override(override, cfg, {}):
            problems.append(problem)
    # An override with a + may add any key
    problems += keys_are_known(plain(cfg))
    sources = compose.named_sources(cfg)
    problems += [problem for some in compose.settle(cfg, overrides, before) for problem in some]
    ConfigError.raise_all(problems)
    if overrides and header.read_references(read_text(file) or "") is None:
        print(
            "warning: samewise 0.1 wrote this config, which does not say which values are copies "
            "of others: an override changes the named value alone",
            file=sys.stderr,
        )
    return dataclasses.replace(
        saved,
        cfg=cfg,
        overrides=tuple(overrides),
        label=_merge_labels(saved.label, compose.label_of(overrides)),
        sources={
            key: source
            for key, source in {**saved.sources, **sources}.items()
            if key in sources or OmegaConf.select(cfg, key) == at(saved.whole, key)
        },
    )


def changes(folder: RunFolder, composed: Composed) -> list[tuple[str, Any, Any]]:
    """Return the settings of a run that overrides change: path, value in the run, value here.

    Settings that decide no result are left out, except places of data.
    """
    recorded = config_in(folder.config)
    pairs = [
        (key, at(recorded.whole, key), at(composed.whole, key))
        for key in sorted(
            {override.partition("=")[0].lstrip("+") for override in composed.overrides}
        )
        if finds_data(key) or not is_outside(key)
    ]
    return [pair for pair in pairs if not same(pair[1], pair[2])]


def _merge_labels(before: str, after: str) -> str:
    """Add overrides to a label: each key once, with its last value."""
    tokens = re.split(r" (?=[\w.@/-]+=)", f"{before} {after}".strip())
    last = {word.partition("=")[0]: number for number, word in enumerate(tokens)}
    return " ".join(
        word for number, word in enumerate(tokens) if last[word.partition("=")[0]] == number
    )


def satisfies(folder: RunFolder, saved: Composed, cfg: DictConfig) -> bool:
    """Return whether a finished run of the same fingerprint satisfies a request.

    Its config is `saved`; `cfg` must have the same data paths and no other device.
    """
    device = (read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("device", {}).get("kind")
    same_data = (
        differences({"dataset": saved.whole["dataset"]}, {"dataset": plain(cfg.dataset)}) == []
    )
    return same_data and str(cfg.device) in ("auto", device)


__all__ = ["RUN", "below", "config_in", "find", "satisfies", "trusted_config_of"]
