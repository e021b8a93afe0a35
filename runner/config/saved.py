"""The configs of runs on disk, with overrides applied.

`records.found` finds the runs. Imports neither torch nor mlflow.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import compose, header
from samewise.runner.config.annotations import is_typed
from samewise.runner.config.compose import Composed
from samewise.runner.config.tree import differences, flat, paths, plain
from samewise.runner.errors import ConfigError, Problem, first_line, nearest
from samewise.runner.records import shapes
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
    problems: list[Problem] = []
    for override in overrides:
        key, separator, _ = override.partition("=")
        if override.startswith("~"):
            hint = (
                f"write {key[1:]}=null if it may be null, or compose the experiment again: "
                f"experiment={saved.choices.get('experiment', 'NAME')} {override}"
            )
            problems.append(
                Problem(key[1:], "a key of a run's config cannot be removed", override, hint=hint)
            )
            continue
        if whole := _list_above(cfg, key.lstrip("+")):
            problems.append(
                Problem(
                    key,
                    "is an element of a list, which is only set as a whole in a run's config",
                    override,
                    hint=f"'{whole}=[...]'",
                )
            )
            continue
        exists = OmegaConf.select(cfg, key.lstrip("+"), default=_ABSENT) is not _ABSENT
        if key.startswith("++"):  # sets a key or adds it
            override, key = (override[2:], key[2:]) if exists else (override[1:], key[1:])
        try:
            # A second run was given in place of an override
            if not separator and Path(override).exists():
                problems.append(
                    Problem(
                        override,
                        "is not an override",
                        expected="KEY=VALUE",
                        hint="give one run at a time",
                    )
                )
                continue
            override_config = OmegaConf.from_dotlist([override.removeprefix("+")])
            if (
                separator
                and key.startswith("+")
                and not exists
                and _is_open(cfg, key[1:].rpartition(".")[0])
            ):
                with open_dict(cfg):
                    cfg = OmegaConf.merge(cfg, override_config)
                OmegaConf.set_struct(cfg, True)
                continue
            if not separator or key.startswith("+") or not exists:
                hint = (
                    f"write it without the +: {override[1:]}"
                    if exists and separator
                    else nearest(key.removeprefix("+"), paths(cfg))
                )
                problems.append(
                    Problem(
                        key,
                        "is in the run's config"
                        if exists and separator
                        else "no such key in the run's config",
                        override,
                        hint=hint,
                    )
                )
                continue
            if isinstance(OmegaConf.select(cfg, key), DictConfig) and not isinstance(
                OmegaConf.select(override_config, key), DictConfig
            ):
                keys = (
                    "its keys are "
                    f"{', '.join(name for name in cast(dict[str, Any], OmegaConf.select(cfg, key)) if name != '_target_')}"
                )
                problems.append(
                    Problem(
                        key,
                        "is a group of the run's config; only values can be overridden",
                        override,
                        f"{key}.NAME=VALUE",
                        keys,
                    )
                )
                continue
            cfg = OmegaConf.merge(cfg, override_config)
        except OmegaConfBaseException as error:
            hint = f"'+{key}.NAME=VALUE' adds a key" if "is not in struct" in str(error) else ""
            problems.append(Problem(key, first_line(error), override, hint=hint))
    before: Any = OmegaConf.select(saved.cfg, "evaluate.monitor", throw_on_resolution_failure=False)
    problems += [problem for some in compose.settle(cfg, overrides, before) for problem in some]
    if problems:
        raise ConfigError(*problems)
    # Configs of earlier versions do not record which values were copies
    if overrides and header.read_references(read_text(file) or "") is None:
        for caution in _cautions_of_copies(plain(saved.cfg), overrides):
            print(f"warning: {caution}", file=sys.stderr)
    label = _merge_labels(saved.label, compose.label_of(overrides))
    return dataclasses.replace(saved, cfg=cfg, overrides=tuple(overrides), label=label)


def _list_above(cfg: DictConfig, key: str) -> str:
    """The path of the first list that a key leads into; empty if there is none."""
    above = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
    return next(
        (
            path
            for path in above
            if isinstance(
                OmegaConf.select(cfg, path, throw_on_resolution_failure=False), ListConfig
            )
        ),
        "",
    )


def _is_open(cfg: DictConfig, path: str) -> bool:
    """Return whether keys may be added at a path: to components, not to samewise's own settings."""
    return (
        bool(path)
        and isinstance(OmegaConf.select(cfg, path), DictConfig)
        and not is_typed(cfg, path)
    )


def _cautions_of_copies(whole: Any, overrides: Sequence[str]) -> Iterator[Problem]:
    """Warn of copies that an override leaves unchanged where the config records no references."""
    values, changed = (
        dict(flat(whole)),
        dict.fromkeys(override.partition("=")[0] for override in overrides),
    )
    for key in changed:
        value, name = values.get(key), key.rpartition(".")[2]
        alike = [
            path
            for path, other in values.items()
            if path not in changed and other == value and type(other) is type(value)
        ]
        copies = [
            path
            for path in alike
            if path.rpartition(".")[2] == name
            or (isinstance(value, str) and path.partition(".")[0] == key.partition(".")[0])
        ]
        if copies and value not in (None, "") and not isinstance(value, bool):
            message = (
                "the config, written by an earlier version, does not say which values are "
                "copies of this one; these keep its old value"
            )
            yield Problem(key, message, value, hint=f"to change them too, set {', '.join(copies)}")


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


_ABSENT = object()
__all__ = ["RUN", "below", "config_in", "find", "satisfies", "trusted_config_of"]
