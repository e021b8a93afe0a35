"""Selects and sorts listed runs by their fields, metrics and settings.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from samewise.runner.config import header, saved
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.tree import at, flat
from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records.files import read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.runs.listing import ListedRun, settings_of, warn_of
from samewise.runner.sweeps.results import State

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda value, text: str(text) in str(value),
}


def matching(runs: Iterable[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """The runs that meet all conditions: `state=failed`, `valid/accuracy>0.9`, `label~lr=0.1`,
    `scheduler=cosine`, `clip_norm=null`.

    ConfigError if a condition cannot be parsed, names a value that no run has, or compares it with
    an impossible one.
    """
    found = everything = list(runs)
    for condition in conditions:
        match = re.fullmatch(r"([\w/. -]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.+)", condition)
        if match is None:
            raise ConfigError(
                Problem(
                    "--where",
                    "is not a valid condition",
                    condition,
                    "NAME=VALUE, NAME>VALUE, NAME~PART, ...",
                    "state=finished, 'valid/accuracy>0.9'",
                )
            )
        key, sign, text = match.groups()
        values = values_of("--where", key, everything)
        _require_value(condition, key, list(values.values()), sign, text)
        found = [one for one in found if _holds(values[one.folder], sign, text)]
    return found


def _holds(value: Any, sign: str, text: str) -> bool:
    if text == "null" and sign in ("=", "!="):
        return (value is None) is (sign == "=")
    if value is None:
        return False
    if isinstance(value, int | float) and sign != "~":
        return _COMPARED[sign](float(value), float(text))
    if isinstance(value, list) and sign in ("=", "!="):
        with contextlib.suppress(yaml.YAMLError):
            return _COMPARED[sign](value, read_yaml(text))
    return _COMPARED[sign](str(value), text)


def sort_runs(runs: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Sort by a field or metric, the largest first (`-KEY`: the smallest first).

    Runs without it last. A ConfigError if no run has it.
    """
    name, sign = key.removeprefix("-"), 1 if key.startswith("-") else -1
    values = values_of("--sort", name, runs)
    known = [one for one in runs if values[one.folder] is not None]
    numbers = all(isinstance(values[one.folder], int | float) for one in known)
    ordered = sorted(
        known, key=lambda one: sign * values[one.folder] if numbers else str(values[one.folder])
    )
    return [*ordered, *(one for one in runs if values[one.folder] is None)]


def values_of(option: str, key: str, runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Each run's value of a field, metric or setting, or its choice of a group, by folder.

    None if it has none.

    ConfigError, with the option's name as its path, if no run has it.
    """
    known = [
        *ListedRun.__dataclass_fields__,
        *dict.fromkeys(name for one in runs for name in (*one.metrics, *one.also)),
    ]
    if key in known:
        return {one.folder: one.get(key) for one in runs}
    configs = {one.folder: settings_of(one.folder) for one in runs}
    values = {folder: _setting(folder, config, key) for folder, config in configs.items()}
    if (
        runs
        and all(value is None for value in values.values())
        and key not in (settings := dict(flat(next(filter(None, configs.values()), {}))))
    ):
        # Lr: optimizer.lr
        meant = next((path for path in settings if path.endswith(f".{key}")), None)
        raise ConfigError(
            Problem(
                option,
                "no such column, metric or setting",
                key,
                hint=f"did you mean '{meant}'?" if meant else nearest(key, known),
            )
        )
    return {
        folder: str(value).lower() if isinstance(value, bool) else value
        for folder, value in values.items()
    }


def _setting(folder: str, config: Mapping[str, Any], key: str) -> Any:
    found = at(config, key)
    return (
        header.read(read_text(RunFolder(Path(folder)).config) or "")[0].get(key)
        if config and isinstance(found, Mapping | None)
        else found
    )


def _require_value(condition: str, key: str, values: Sequence[Any], sign: str, text: str) -> None:
    """Refuse an unknown state, and a numeric comparison with a value that is not a number."""
    if key == "state" and sign in ("=", "!=") and text not in State.__members__:
        raise ConfigError(
            Problem(
                "--where",
                "no such state",
                condition,
                f"one of: {', '.join(State)}",
                nearest(text, State),
            )
        )
    if (
        sign != "~"
        and not (text == "null" and sign in ("=", "!="))
        and any(isinstance(value, int | float) for value in values)
    ):
        try:
            float(text)
        except ValueError:
            raise ConfigError(
                Problem(
                    "--where",
                    "compares a number with text",
                    condition,
                    "NAME=NUMBER, NAME>NUMBER, ...",
                )
            ) from None


def varying(runs: Sequence[ListedRun]) -> dict[str, dict[str, Any]]:
    """The settings that affect the result and differ between runs: by folder, the values by path of
    the config. A damaged config gives a warning.
    """
    known = {one.folder: _identity(RunFolder(Path(one.folder)).config) for one in runs}
    paths = dict.fromkeys(path for config in known.values() for path in config)
    kept = [
        path
        for path in paths
        if len({repr(config.get(path, "-")) for config in known.values() if config}) > 1
    ]
    return {
        folder: {path: config.get(path, "-") for path in kept} for folder, config in known.items()
    }


def _identity(file: Path) -> dict[str, Any]:
    try:
        return dict(flat(identity(saved.config_in(file).whole)))
    except ConfigError as error:
        warn_of(file, error)
        return {}
