"""Select and sort listed runs by their fields, metrics and settings.

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

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import at, flat
from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records import header
from samewise.runner.records.files import read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.runs.listing import (
    ListedRun,
    differing,
    list_runs,
    settings_of,
    tagged,
    warn_of,
)
from samewise.runner.runs.stored_runs import list_stored
from samewise.runner.sweeps.results import State

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda value, text: str(text) in str(value),
}


def matching(runs: Iterable[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """Return the runs that meet all conditions.

    Args:
        runs: The runs.
        conditions: `state=failed`, `valid/accuracy>0.9`, `label~lr=0.1`, `scheduler=cosine`,
            `clip_norm=null`.

    Raises:
        ConfigError: A condition cannot be parsed, names a value that no run has, or compares it
            with an impossible one.
    """
    selected = all_runs = list(runs)
    for condition in conditions:
        # `<=` comes before `<`, which would match its beginning
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
        values = values_of("--where", key, all_runs)
        _require_value(condition, key, list(values.values()), sign, text)
        selected = [run for run in selected if _holds(values[run.folder], sign, text)]
    return selected


def _holds(value: Any, sign: str, text: str) -> bool:
    """Whether a value meets a condition."""
    if text == "null" and sign in ("=", "!="):
        return (value is None) is (sign == "=")
    if value is None:
        return False
    if isinstance(value, int | float) and sign != "~":
        return _COMPARISONS[sign](float(value), float(text))
    if isinstance(value, list) and sign in ("=", "!="):
        with contextlib.suppress(yaml.YAMLError):
            return _COMPARISONS[sign](value, read_yaml(text))
    return _COMPARISONS[sign](str(value), text)


def sort_runs(runs: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Sort by a field or metric, the largest first; runs without it last.

    Args:
        runs: The runs.
        key: Name of the field or metric; with `-` before it, the smallest is first.

    Raises:
        ConfigError: No run has it.
    """
    name, sign = key.removeprefix("-"), 1 if key.startswith("-") else -1
    values = values_of("--sort", name, runs)
    with_value = [x for x in runs if values[x.folder] is not None]
    are_numbers = all(isinstance(values[x.folder], int | float) for x in with_value)
    ordered = sorted(
        with_value, key=lambda x: sign * values[x.folder] if are_numbers else str(values[x.folder])
    )
    return [*ordered, *(x for x in runs if values[x.folder] is None)]


def values_of(option: str, key: str, runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Return each run's value of a field, metric, setting or choice of a group, by folder.

    Args:
        option: The command's option, for the error.
        key: Name of the value. A run that lacks it has None.
        runs: The runs.

    Raises:
        ConfigError: No run has it.
    """
    # Two columns of the table have friendlier titles than their fields
    key = {"overridden": "label", "time": "seconds"}.get(key, key)
    names = [
        *(name for name in ListedRun.__dataclass_fields__ if name not in ("also", "metrics")),
        *dict.fromkeys(
            name for run in runs for name in (*tagged(run.tags), *run.metrics, *run.also)
        ),
    ]
    if key in names:
        return {run.folder: run.get(key) for run in runs}
    configs = {run.folder: settings_of(run.folder) for run in runs}
    values = {folder: _setting(folder, config, key) for folder, config in configs.items()}
    if (
        runs
        and all(value is None for value in values.values())
        and key not in (settings := dict(flat(next(filter(None, configs.values()), {}))))
    ):
        # For `lr`, `optimizer.lr`
        full_path = next((path for path in settings if path.endswith(f".{key}")), None)
        raise ConfigError(
            Problem(
                option,
                "no such column, metric or setting",
                key,
                hint=f"did you mean '{full_path}'?" if full_path else nearest(key, names),
            )
        )
    return {
        folder: str(value).lower() if isinstance(value, bool) else value
        for folder, value in values.items()
    }


def _setting(folder: str, config: Mapping[str, Any], key: str) -> Any:
    """Return a setting; for a group, the choice that the config's header names."""
    value = at(config, key)
    return (
        header.read(read_text(RunFolder(Path(folder)).config) or "")[0].get(key)
        if config and isinstance(value, Mapping | None)
        else value
    )


def _require_value(condition: str, key: str, values: Sequence[Any], sign: str, text: str) -> None:
    """Refuse an unknown state, and a comparison of numbers with text."""
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


def select(
    run_root: Path, *, uri: str | None, where: Sequence[str], sort: str | None, diff: bool
) -> tuple[list[ListedRun], dict[str, dict[str, Any]]]:
    """Return the runs of a folder, or of the MLflow store at `uri`, that meet all conditions.

    They are in the order of `sort`. With `diff`, the settings that affect the result and differ
    between them follow, by folder and path.
    """
    runs, stored = list_stored(uri) if uri else (list_runs(run_root), {})
    selected = matching(runs, where)
    ordered = sort_runs(selected, sort) if sort else selected
    return ordered, (stored if uri else varying(ordered)) if diff else {}


def varying(runs: Sequence[ListedRun]) -> dict[str, dict[str, Any]]:
    """Return the settings that affect the result and differ between runs, by folder and path.

    A damaged config gives a warning.
    """
    composed = {run.folder: _composed(RunFolder(Path(run.folder)).config) for run in runs}
    settings = differing(
        {
            folder: dict(flat(identity(config.whole))) if config else {}
            for folder, config in composed.items()
        }
    )
    # Files by the users' names
    for path in SOURCES:
        naming = {x: run for x, run in composed.items() if run and path in settings[x]}
        values = [settings[folder][path] for folder in naming]
        names = saved.named_contents(path, values, [*naming.values()])
        for folder, name in zip(naming, names, strict=True):
            settings[folder][path] = name
    return settings


def _composed(file: Path) -> Composed | None:
    try:
        return saved.config_in(file)
    except ConfigError as error:
        warn_of(file, error)
        return None
