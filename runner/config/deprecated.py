"""Renames settings of an older samewise in overrides and files, with a warning."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from samewise.runner.errors import ConfigError, Problem

DEPRECATED: dict[str, str] = {}
"""By its path each setting's new path; or, with a space in it, a message that says what to write
instead."""


def rename_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides with the new names; ConfigError with the message of a setting that was removed."""
    return [_rename_override(text) for text in overrides] if DEPRECATED else list(overrides)


def rename_settings(config: DictConfig, place: str, under: str = "") -> DictConfig:
    """Return the content of a file under the settings' new names.

    Args:
        config: The file's content.
        place: The file's name.
        under: The path under which Hydra puts the content.

    Raises:
        ConfigError: A setting was removed; with its message.
    """
    prefix = f"{under}." if under else ""
    renames = {old: new for old, new in DEPRECATED.items() if old.startswith(prefix)}
    values: Any = OmegaConf.to_container(config, resolve=False) if renames else None
    if not isinstance(values, dict):
        return config
    for old, new in renames.items():
        if (value := _take(cast(dict[str, Any], values), old.removeprefix(prefix))) is not _ABSENT:
            _put(
                cast(dict[str, Any], values), _new_name(old, new, place).removeprefix(prefix), value
            )
    return OmegaConf.create(cast(dict[str, Any], values))


def restore_names(config: dict[str, Any]) -> None:
    """Give settings of a plain config their first names: a rename changes no fingerprint."""
    for old, new in DEPRECATED.items():
        if " " not in new and (value := _take(config, new)) is not _ABSENT:
            _put(config, old, value)


def _rename_override(text: str) -> str:
    sign, key, rest = cast(
        "re.Match[str]", re.fullmatch(r"([+~]*)([^=]*)(.*)", text, re.DOTALL)
    ).groups()
    for old, new in DEPRECATED.items():
        if f"{key}.".startswith(f"{old}."):
            return f"{sign}{_new_name(old, new, text)}{key.removeprefix(old)}{rest}"
    return text


def _new_name(old: str, new: str, place: str) -> str:
    if " " in new:
        raise ConfigError(Problem(old, "is no longer a setting", hint=new, where=place))
    _warn(
        f"{place}: {old} is now called {new}; the old name will be an error in the next "
        "minor version"
    )
    return new


@cache
def _warn(text: str) -> None:
    """Once in a process: a sweep composes its overrides for each point."""
    print(f"warning: {text}", file=sys.stderr)


# Not None, which a setting may have as its value
_ABSENT: Any = object()


def _take(values: dict[str, Any], path: str) -> Any:
    """Remove and return the value at a path; `_ABSENT` if there is none."""
    *above, key = path.split(".")
    for part in above:
        inner: Any = values.get(part)
        if not isinstance(inner, dict):
            return _ABSENT
        values = cast(dict[str, Any], inner)
    return values.pop(key, _ABSENT)


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *above, key = path.split(".")
    for part in above:
        values = values.setdefault(part, {})
    values[key] = value
