"""Select and sort listed runs by their fields, metrics and settings.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from samewise.runner.config.fingerprint import identity, named_contents
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import at, flat
from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records import index
from samewise.runner.records.folder import RunFolder
from samewise.runner.runs.listing import (
    ListedRun,
    as_lines,
    differing,
    list_runs,
    setting,
    setting_lines,
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


def matching(
    runs: Iterable[ListedRun], conditions: Sequence[str], run_root: Path
) -> list[ListedRun]:
    """Return the runs that meet all conditions.

    Args:
        runs: The runs.
        conditions: `state=failed`, `valid/accuracy>0.9`, `label~lr=0.1`, `scheduler=cosine`,
            `clip_norm=null`.
        run_root: The run root whose index is used.

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
        values = values_of("--where", key, all_runs, run_root)
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


def sort_runs(runs: Sequence[ListedRun], key: str, run_root: Path) -> list[ListedRun]:
    """Sort by a field or metric, the largest first; runs without it last.

    Args:
        runs: The runs.
        key: Name of the field or metric; with `-` before it, the smallest is first.
        run_root: The run root whose index is used.

    Raises:
        ConfigError: No run has it.
    """
    name, sign = key.removeprefix("-"), 1 if key.startswith("-") else -1
    values = values_of("--sort", name, runs, run_root)
    with_value = [x for x in runs if values[x.folder] is not None]
    are_numbers = all(isinstance(values[x.folder], int | float) for x in with_value)
    ordered = sorted(
        with_value, key=lambda x: sign * values[x.folder] if are_numbers else str(values[x.folder])
    )
    return [*ordered, *(x for x in runs if values[x.folder] is None)]


def values_of(option: str, key: str, runs: Sequence[ListedRun], run_root: Path) -> dict[str, Any]:
    """Return each run's value of a field, metric, setting or choice of a group, by folder.

    Args:
        option: The command's option, for the error.
        key: Name of the value. A run that lacks it has None.
        runs: The runs.
        run_root: The run root whose index is used.

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
    lines = setting_lines(run_root, [run.folder for run in runs])
    values = {folder: setting(x, key) for folder, x in lines.items()}
    if runs and all(value is None for value in values.values()):
        first = next(filter(None, lines.values()), "")
        paths = [json.loads(line)[0] for line in first.splitlines() if line[0] == "["]
        if key not in paths:
            # For `lr`, `optimizer.lr`
            full_path = next((path for path in paths if path.endswith(f".{key}")), None)
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


def _require_value(condition: str, key: str, values: Sequence[Any], sign: str, text: str) -> None:
    """Refuse an unknown state, and a comparison of numbers with text."""
    ConfigError.raise_if(
        key == "state" and sign in ("=", "!=") and text not in State.__members__,
        "--where",
        "no such state",
        condition,
        f"one of: {', '.join(State)}",
        nearest(text, State),
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
    selected = matching(runs, where, run_root)
    ordered = sort_runs(selected, sort, run_root) if sort else selected
    return ordered, (stored if uri else varying(ordered, run_root)) if diff else {}


def varying(runs: Sequence[ListedRun], run_root: Path) -> dict[str, dict[str, Any]]:
    """Return the settings that affect the result and differ between runs, by folder and path.

    A damaged config gives a warning.
    """
    folders = [run.folder for run in runs]
    texts, with_files = _identities(run_root, folders)
    settings = differing({folder: texts.get(folder, "") for folder in folders})
    # Files by the users' names
    for path in SOURCES:
        naming = [x for x in folders if texts.get(x) and path in settings[x]]
        values = [settings[x][path] for x in naming]
        configs = [with_files.get(x, ({}, {})) for x in naming]
        for folder, name in zip(naming, named_contents(path, values, configs), strict=True):
            settings[folder][path] = name
    return settings


def identities(run_root: Path, folders: Sequence[str]) -> dict[str, str]:
    """Return the settings of runs that affect the result, `as_lines`, by folder.

    A damaged config gives a warning and an empty text.
    """
    return _identities(run_root, folders)[0]


def _identities(
    run_root: Path, folders: Sequence[str]
) -> tuple[dict[str, str], dict[str, tuple[Any, Any]]]:
    """Return `identities`, and the whole config and names of files of runs that need them."""
    texts = dict(index.entries(run_root, "identity", ("config.yaml",), folders, _read_identity))
    # Other files, which may have changed, decide too where weights are taken over
    with_files = {
        x: json.loads(text)["whole and names"] for x, text in texts.items() if text[:1] == "{"
    }
    return texts | {
        x: as_lines(flat(identity(whole))) for x, (whole, _) in with_files.items()
    }, with_files


def _read_identity(folder: RunFolder) -> str:
    """Return the settings that affect the result, `as_lines`; with files of weights, all of them."""
    # Imported late, as OmegaConf and Hydra are slow to import
    from samewise.runner.config import saved

    try:
        config = saved.config_in(folder.config)
    except ConfigError as error:
        warn_of(folder.config, error)
        return ""
    if any(isinstance(at(config.whole, path), str) for path in SOURCES):
        return json.dumps({"whole and names": (config.whole, config.sources)})
    return as_lines(flat(identity(config.whole)))
