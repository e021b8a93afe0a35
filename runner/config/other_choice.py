"""Settles an experiment file's settings for a group whose choice is replaced by another.

The command line or an experiment that builds on the file may choose another. Settings that the other choice's file does not have are left out of the config; the rest stays, as
Hydra has it. Both are reported. Only files decide, so that composing imports no component.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.config.instantiate import SPECIAL
from samewise.runner.config.loader import Loader
from samewise.runner.config.origins import FileValue, values_in, values_of
from samewise.runner.config.project import override_of_experiment
from samewise.runner.config.tree import at, overlaps
from samewise.runner.errors import Problem

_FILES = "experiment/"
_REDUCED = ("experiment", "debug", "debug/sizes")
LEFT_OUT = "left out: "
_MAKES_ONE = ("_target_", "match", "layer_decay")
"""Keys that every component, or rule for parameter groups, has."""


@dataclass(frozen=True)
class Change:
    """A group whose choice differs from the one that an experiment file was written for.

    Args:
        experiment: The experiment that the file makes: `experiment=first`.
        path: Where the group's values are: `optimizer`.
        before: What the file was written for: `sgd`; empty: nothing.
        now: What is chosen; empty: nothing.
        is_explicit: Whether on the command line.
        settings: What the file sets there, and no later file does.
        alternatives: What the files of choices set there now, by path.
        former: What they set there for the file alone.
    """

    experiment: str
    path: str
    before: str
    now: str
    is_explicit: bool
    settings: list[FileValue]
    alternatives: Mapping[str, FileValue]
    former: Mapping[str, FileValue]


def changes(loader: Loader, overrides: Sequence[str], experiment: str | None) -> list[Change]:
    """Return the groups whose choice is replaced and for which `experiment=` has settings.

    The overrides must be valid.
    """
    names = {text.lstrip("+~").partition("=")[0].partition("@")[0] for text in overrides}
    groups = {name for name in names if name not in _REDUCED and loader.is_group(name)}
    files = [
        name
        for default in loader.select(overrides).defaults
        if (name := str(default.config_path)).startswith(_FILES)
    ]
    if experiment is None or not (groups or len(files) > 1):
        return []
    chosen, values = _select(loader, overrides)
    chosen_by_file, _ = _select(loader, [override_of_experiment(experiment)])
    last = {value.path: value for value in values}.values()
    alternatives = {x.path: x for x in values if not x.config.startswith(_FILES)}
    changed = list[Change]()
    for file in files:
        alone, values = _select(loader, [override_of_experiment(file.removeprefix(_FILES))])
        former = {x.path: x for x in values if not x.config.startswith(_FILES)}
        for key in sorted({*alone, *chosen}):
            (group, path), before, now = key, alone.get(key, []), chosen.get(key, [])
            settings = [x for x in last if x.config == file and x.path.startswith(f"{path}.")]
            # A reduced experiment has its own data
            is_meant = group in groups or now == chosen_by_file.get(key, [])
            if settings and before != now and is_meant and group not in _REDUCED:
                changed.append(
                    Change(
                        file.replace("/", "=", 1),
                        path,
                        _text(before),
                        _text(now),
                        group in groups,
                        settings,
                        alternatives,
                        former,
                    )
                )
    return changed


def settle(cfg: DictConfig, changed: Sequence[Change], overrides: Sequence[str]) -> list[Problem]:
    """Remove from the config, in place, what the files of the choices in `changes` do not set.

    Values set by overrides stay.

    Returns what was left out and what stays, one problem for each group and file.
    """
    if not changed:
        return []
    by_user = {
        path
        for override in OverridesParser.create().parse_overrides(list(overrides))
        if "." in override.key_or_group or isinstance(override.value(), dict)
        for path, _ in values_in(override.value(), override.key_or_group)
    }
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    cautions, misfits = list[Problem](), set[str]()
    for change in changed:
        settings = [
            value
            for value in change.settings
            # An override may have removed the value, or set it
            if at(whole, value.path, ...) is not ... and not overlaps(value.path, by_user)
        ]
        removed = {value.path: _misfit(whole, value.path, change) for value in settings}
        here = {
            misfit
            for misfit in removed.values()
            if misfit and all(removed.get(path) for path, _ in values_in(at(whole, misfit), misfit))
        }
        misfits |= here
        # First the one that changes results unnoticed
        retained = [x for x in settings if not removed[x.path] and _is_news(x, change, whole)]
        if retained and change.is_explicit:
            cautions.append(_kept_caution(change, retained))
        if dropped := [value for value in settings if removed[value.path] in here]:
            cautions.append(_left_out_caution(change, dropped, here))
    with open_dict(cfg):
        for path in misfits:
            above, _, key = path.rpartition(".")
            del OmegaConf.select(cfg, above)[key]
    return cautions


def _select(
    loader: Loader, overrides: Sequence[str]
) -> tuple[dict[tuple[str, str], list[str]], list[FileValue]]:
    """Return the choices, by group and path of its values, and the values that files set."""
    defaults = loader.select(overrides).defaults
    chosen = dict[tuple[str, str], list[str]]()
    for default in defaults:
        group, _, name = (default.config_path or "").rpartition("/")
        # A choice may build on another of its group
        builds_on = (default.parent or "").rpartition("/")[0] == group
        if group and default.package and not builds_on:
            chosen.setdefault((group, default.package), []).append(name)
    return chosen, list(values_of(loader, defaults))


def _misfit(whole: Any, path: str, change: Change) -> str:
    """The path, or that of a mapping above it, that has no place in the config.

    Empty if there is one.
    """
    parts, first = path.split("."), max(change.path.count(".") + 1, 2)
    for end in range(first, len(parts) + 1):
        prefix = ".".join(parts[:end])
        value, owner = at(whole, prefix), at(whole, parts[: end - 1])
        was_component = any(f"{prefix}.{key}" in change.former for key in _MAKES_ONE)
        if was_component and not any(key in value for key in _MAKES_ONE):
            return prefix
        if any(f"{other}.".startswith(f"{prefix}.") for other in change.alternatives):
            continue
        if "_target_" in owner:
            return "" if parts[end - 1] in SPECIAL else prefix
    return ""


def _is_news(value: FileValue, change: Change, whole: Any) -> bool:
    """Return whether a kept value can change a result and differs from the choice's own."""
    other = change.alternatives.get(value.path)
    if other is None:
        # A setting of the former choice alone has no effect unless something refers to it
        return not is_outside(value.path) and (
            value.path not in change.former or f"${{{value.path}}}" in str(whole)
        )
    is_new = other != change.former.get(value.path) and other.value != value.value
    return is_new and "/" in other.config and not is_outside(value.path)


def _left_out_caution(change: Change, dropped: Sequence[FileValue], misfits: set[str]) -> Problem:
    # A removed group is a misfit as a whole
    paths = sorted(misfits - {change.path}) or [value.path for value in dropped]
    keys = [path.removeprefix(f"{change.path}.") for path in paths]
    are, them = ("is", "it") if len(keys) == 1 else ("are", "them")
    why = (
        "nothing is chosen now"
        if change.now in ("", "none")
        else f"{change.now} does not set {them}"
    )
    return Problem(
        change.path,
        f"{_and(keys)} {are} {LEFT_OUT}{change.experiment} sets {them} for "
        f"{change.before or 'no choice'}, and {why}",
        where=dropped[0].where,
    )


def _kept_caution(change: Change, retained: Sequence[FileValue]) -> Problem:
    keys = [f"{x.path.removeprefix(f'{change.path}.')}={_short(x.value)}" for x in retained]
    own = [change.alternatives[x.path] for x in retained if x.path in change.alternatives]
    settings = " ".join(f"{x.path}={_short(x.value)}" for x in own)
    return Problem(
        change.path,
        f"{change.now} keeps {_and(keys)}, which {change.experiment} sets for "
        f"{change.before or 'no choice'}",
        hint=f"keep them, or set {change.now}'s own values: {settings}" if own else "",
        where=retained[0].where,
    )


def _text(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]" if names else ""


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).replace(", ", ",")
