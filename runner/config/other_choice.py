"""Settles an experiment file's settings for a group whose choice is replaced by another.

The command line or an experiment that builds on the file may choose another. Settings that the
other choice's file does not have are left out of the config; the rest stays, as Hydra has it. Both
are reported. Only files decide, so that composing imports no component.
"""

from __future__ import annotations

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
from samewise.runner.config.tree import at
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
        file: The experiment file: `experiment/first`.
        path: Where the group's values are: `optimizer`.
        before: What the file was written for: `sgd`; empty: nothing.
        now: What is chosen; empty: nothing.
        is_explicit: Whether on the command line.
        settings: What the file sets there, and no later file does.
        alternatives: What the files of choices set there now, by path.
        targets: Mappings there that were components, or rules, with the choice before.
    """

    file: str
    path: str
    before: str
    now: str
    is_explicit: bool
    settings: tuple[FileValue, ...]
    alternatives: Mapping[str, FileValue]
    targets: frozenset[str]


def changes(loader: Loader, overrides: Sequence[str], experiment: str | None) -> list[Change]:
    """Return the groups whose choice is replaced and for which `experiment=` has settings.

    The overrides must be valid.
    """
    chosen_by_user = {
        group: names
        for text in overrides
        if (group := _group(text, loader)) not in ("", *_REDUCED)
        for names in [_names(text)]
    }
    if experiment is None or not _may_matter(loader, f"{_FILES}{experiment}", chosen_by_user):
        return []
    final = _Choices(loader, overrides)
    whole = _Choices(loader, [override_of_experiment(experiment)])
    changed = list[Change]()
    for file in dict.fromkeys(
        value.config for value in final.last.values() if value.config.startswith(_FILES)
    ):
        alone = (
            whole
            if file == f"{_FILES}{experiment}"
            else _Choices(loader, [override_of_experiment(file.removeprefix(_FILES))])
        )
        for key in sorted({*alone.chosen, *whole.chosen, *final.chosen}):
            group, path = key
            request = chosen_by_user.get(
                f"{group}@{path}", chosen_by_user.get(group) if key not in whole.apart else None
            )
            before, now = alone.chosen.get(key, ()), final.chosen.get(key, ())
            if (
                group in _REDUCED
                or before == now
                or now != (whole.chosen.get(key, ()) if request is None else request)
            ):
                continue  # a reduced experiment has its own data
            same = {
                name
                for name, value in alone.alternatives.items()
                if final.alternatives.get(name) == value
            }
            settings = [
                value
                for value in final.last.values()
                if value.config == file
                and value.path.startswith(f"{path}.")
                and value.path not in same
            ]
            if settings:
                changed.append(
                    Change(
                        file,
                        path,
                        _words(before),
                        _words(now),
                        request is not None,
                        tuple(settings),
                        final.alternatives,
                        alone.targets,
                    )
                )
    return changed


def weights_caution(
    loader: Loader, overrides: Sequence[str], chosen: Mapping[str, str], cfg: DictConfig
) -> list[Problem]:
    """A caution that `debug=...` starts without the weights that the experiment's file names."""
    now = OmegaConf.select(cfg, "initialise.weights", throw_on_resolution_failure=False)
    if (
        not {"debug", "experiment"} <= chosen.keys()
        or now is not None
        or any(text.startswith("initialise.weights=") for text in overrides)
    ):
        return []
    defaults = [
        default
        for default in loader.select(overrides).defaults
        if (default.config_path or "").startswith(("debug/", "initialise/", _FILES))
    ]
    values = [value for value in values_of(loader, defaults) if value.path == "initialise.weights"]
    request = next((value for value in reversed(values) if value.config.startswith(_FILES)), None)
    if request is None or request.value is None or not values[-1].config.startswith("debug/"):
        return []
    message = (
        f"debug={chosen['debug']} begins with random weights, not with those of "
        f"{_FILES}{request.config.removeprefix(_FILES)}, because its sizes differ"
    )
    return [
        Problem(
            "initialise.weights",
            message,
            hint=f"initialise.weights={request.value} asks for them",
            where=values[-1].where,
        )
    ]


def settle(cfg: DictConfig, changed: Sequence[Change], overrides: Sequence[str]) -> list[Problem]:
    """Remove from the config, in place, what the files of the choices in `changes` do not set.

    Values set by overrides stay.

    Returns what was left out and what stays, one problem for each group and file.
    """
    if not changed:
        return []
    read = [
        parsed
        for parsed in OverridesParser.create().parse_overrides(list(overrides))
        if "." in parsed.key_or_group or isinstance(parsed.value(), dict)
    ]
    by_user = {
        path for override in read for path, _ in values_in(override.value(), override.key_or_group)
    }
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    cautions, leftovers = list[Problem](), dict[str, None]()
    for change in changed:
        settings = [
            value
            for value in change.settings
            # An override may have removed the value, or set it
            if at(whole, value.path, ...) is not ... and not _overlaps(value.path, by_user)
        ]
        removed = {
            value.path: misfit
            for value in settings
            if (misfit := _misfit(whole, value.path, change))
        }
        misfits = {
            misfit
            for misfit in removed.values()
            if all(path in removed for path, _ in values_in(at(whole, misfit), misfit))
        }
        dropped = [value for value in settings if removed.get(value.path) in misfits]
        retained = (
            [value for value in settings if value.path not in removed and _is_news(value, change)]
            if change.is_explicit
            else []
        )
        leftovers |= dict.fromkeys(sorted(misfits))
        cautions += [_left_out_caution(change, dropped, misfits)] if dropped else []
        cautions += [_kept_caution(change, retained)] if retained else []
    with open_dict(cfg):
        for path in leftovers:
            above, _, key = path.rpartition(".")
            del OmegaConf.select(cfg, above)[key]
    return cautions


def _left_out_caution(change: Change, dropped: Sequence[FileValue], misfits: set[str]) -> Problem:
    keys = [f"{path}.".removeprefix(f"{change.path}.").rstrip(".") for path in sorted(misfits)]
    # Of a removed group
    keys = [key for key in keys if key] or [
        value.path.removeprefix(f"{change.path}.") for value in dropped
    ]
    are, them = ("is", "it") if len(keys) == 1 else ("are", "them")
    why = (
        f"{change.now} does not set {them}"
        if change.now not in ("", "none")
        else "nothing is chosen now"
    )
    message = (
        f"{_and(keys)} {are} {LEFT_OUT}{_name(change)} sets {them} for "
        f"{change.before or 'no choice'}, and {why}"
    )
    return Problem(change.path, message, where=dropped[0].where)


def _kept_caution(change: Change, retained: Sequence[FileValue]) -> Problem:
    keys = _and(
        [
            f"{value.path.removeprefix(f'{change.path}.')}={_short(value.value)}"
            for value in retained
        ]
    )
    own = [
        f"{value.path}={_short(change.alternatives[value.path].value)}"
        for value in retained
        if value.path in change.alternatives
    ]
    hint = f"set what you want; {change.now}'s own values: {' '.join(own)}" if own else ""
    return Problem(
        change.path,
        f"{change.now} keeps {keys}, which {_name(change)} sets for {change.before or 'no choice'}",
        hint=hint,
        where=retained[0].where,
    )


def _is_news(value: FileValue, change: Change) -> bool:
    """Return whether a kept value can change a result and differs from the choice's own."""
    other = change.alternatives.get(value.path)
    return not is_outside(value.path) and (
        other is None or (other.value != value.value and "/" in other.config)
    )


def _misfit(whole: Any, path: str, change: Change) -> str:
    """The path, or that of a mapping above it, that has no place in the config.

    Empty if there is one.
    """
    parts, first = path.split("."), change.path.count(".") + 1
    for end in range(first, len(parts) + 1):
        prefix, above = ".".join(parts[:end]), ".".join(parts[: end - 1])
        value, owner = at(whole, prefix), at(whole, above) if above else whole
        if (
            "." in prefix
            and prefix in change.targets
            and isinstance(value, Mapping)
            and not any(key in value for key in _MAKES_ONE)
        ):
            return prefix
        if any(other == prefix or other.startswith(f"{prefix}.") for other in change.alternatives):
            continue
        if end > first and "_target_" in owner:
            return "" if parts[end - 1] in SPECIAL else prefix
        if not (
            isinstance(value, Mapping)
            and any(two.startswith(f"{prefix}.") for two in change.targets)
        ):
            return ""
    return ""


class _Choices:
    """The choices that overrides make, and the values that their files set."""

    def __init__(self, loader: Loader, overrides: Sequence[str]) -> None:
        defaults = loader.select(overrides).defaults
        self.chosen = dict[tuple[str, str], tuple[str, ...]]()
        """By group and the path of its values; the choices that are made by another of the same
        group left out."""
        self.apart = set[tuple[str, str]]()
        """Those of a path that is not the group's own: `optimizer@optimizer.generator`."""
        for default in defaults:
            group, _, name = (default.config_path or "").rpartition("/")
            if (
                group
                and default.package
                and (default.parent or "").rpartition("/")[0] != group
                and not group.startswith("hydra")
            ):
                self.chosen[group, default.package] = (
                    *self.chosen.get((group, default.package), ()),
                    name,
                )
                self.apart |= (
                    {(group, default.package)} if "@" in str(default.override_key) else set()
                )
        values = list(values_of(loader, defaults))
        self.last = {value.path: value for value in values}
        self.alternatives = {
            value.path: value for value in values if not value.config.startswith(_FILES)
        }
        self.targets = frozenset(
            value.path.rpartition(".")[0]
            for value in self.alternatives.values()
            if value.path.rpartition(".")[2] in _MAKES_ONE
        )


def _may_matter(loader: Loader, file: str, chosen: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether an experiment's file has settings below a chosen group, or builds on another.

    Quick, since most commands end here.
    """
    read = loader.read(file)
    if any(
        entry != "_self_"
        and (
            isinstance(entry, str) or any(str(key).split()[-1:] == ["/experiment"] for key in entry)
        )
        for entry in read.defaults
    ):
        return True
    keys = set(map(str, read.config))
    for group, names in chosen.items():
        package = (
            loader.read(f"{group.partition('@')[0]}/{names[0]}").package if names else None
        ) or "_group_"
        if (
            package.replace("_group_", group.partition("@")[2] or group).partition(".")[0] in keys
            or not names
        ):
            return True
    return False


def _names(text: str) -> tuple[str, ...]:
    """The choices in an override: `[default,ema]` has several, `null` none."""
    names = text.partition("=")[2].strip("[] ")
    return (
        ()
        if names in ("", "null")
        else tuple(name.strip(" '\"").removesuffix(".yaml") for name in names.split(","))
    )


def _group(text: str, loader: Loader) -> str:
    """The group that an override chooses from; empty if it sets a value."""
    key, _, value = text.lstrip("+~").partition("=")
    return key if not value.startswith("{") and loader.is_group(key.partition("@")[0]) else ""


def _overlaps(path: str, keys: set[str]) -> bool:
    return any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def _name(change: Change) -> str:
    return change.file.replace("/", "=", 1)


def _words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]" if names else ""


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _short(value: Any) -> str:
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value).replace(", ", ",")
    )
