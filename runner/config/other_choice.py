"""What an experiment file sets for its choice of a group, if a different choice is made: on the
command line, or by an experiment that builds on it.

What the other choice's file does not set is left out of the config; the rest stays, as Hydra has
it. Both are reported. Only files decide, so that composing imports no component.
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
        is_given: Whether on the command line.
        sets: What the file sets there, and no later file does.
        others: What the files of choices set there now, by path.
        made: Mappings there that were components, or rules, with the choice before.
    """

    file: str
    path: str
    before: str
    now: str
    is_given: bool
    sets: tuple[FileValue, ...]
    others: Mapping[str, FileValue]
    made: frozenset[str]


def changes(loader: Loader, given: Sequence[str], experiment: str | None) -> list[Change]:
    """The groups for which the (valid) overrides choose another option and below which the file of
    `experiment=` sets something.
    """
    chosen_by_user = {
        group: names
        for text in given
        if (group := _group(text, loader)) not in ("", *_REDUCED)
        for names in [_names(text)]
    }
    if experiment is None or not _may_matter(loader, f"{_FILES}{experiment}", chosen_by_user):
        return []
    final = _Choices(loader, given)
    whole = _Choices(loader, [override_of_experiment(experiment)])
    found = list[Change]()
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
            asked = chosen_by_user.get(
                f"{group}@{path}", chosen_by_user.get(group) if key not in whole.apart else None
            )
            before, now = alone.chosen.get(key, ()), final.chosen.get(key, ())
            if (
                group in _REDUCED
                or before == now
                or now != (whole.chosen.get(key, ()) if asked is None else asked)
            ):
                continue  # a reduced experiment has its own data
            same = {name for name, value in alone.others.items() if final.others.get(name) == value}
            sets = [
                value
                for value in final.last.values()
                if value.config == file
                and value.path.startswith(f"{path}.")
                and value.path not in same
            ]
            if sets:
                found.append(
                    Change(
                        file,
                        path,
                        _words(before),
                        _words(now),
                        asked is not None,
                        tuple(sets),
                        final.others,
                        alone.made,
                    )
                )
    return found


def weights_caution(
    loader: Loader, given: Sequence[str], chosen: Mapping[str, str], cfg: DictConfig
) -> list[Problem]:
    """A caution that `debug=...` starts without the weights that the experiment's file names."""
    now = OmegaConf.select(cfg, "initialise.weights", throw_on_resolution_failure=False)
    if (
        not {"debug", "experiment"} <= chosen.keys()
        or now is not None
        or any(text.startswith("initialise.weights=") for text in given)
    ):
        return []
    defaults = [
        one
        for one in loader.select(given).defaults
        if (one.config_path or "").startswith(("debug/", "initialise/", _FILES))
    ]
    values = [value for value in values_of(loader, defaults) if value.path == "initialise.weights"]
    asked = next((value for value in reversed(values) if value.config.startswith(_FILES)), None)
    if asked is None or asked.value is None or not values[-1].config.startswith("debug/"):
        return []
    words = (
        f"debug={chosen['debug']} begins with random weights, not with those of "
        f"{_FILES}{asked.config.removeprefix(_FILES)}, because its sizes differ"
    )
    return [
        Problem(
            "initialise.weights",
            words,
            hint=f"initialise.weights={asked.value} asks for them",
            where=values[-1].where,
        )
    ]


def settle(cfg: DictConfig, changed: Sequence[Change], given: Sequence[str]) -> list[Problem]:
    """Remove from the config, in place, what the files of the choices in `changes` do not set.

    Values set by overrides stay.

    Returns what was left out and what stays, one problem for each group and file.
    """
    if not changed:
        return []
    read = [
        one
        for one in OverridesParser.create().parse_overrides(list(given))
        if "." in one.key_or_group or isinstance(one.value(), dict)
    ]
    by_user = {
        path for override in read for path, _ in values_in(override.value(), override.key_or_group)
    }
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    told, left = list[Problem](), dict[str, None]()
    for change in changed:
        sets = [
            value
            for value in change.sets
            if at(whole, value.path, ...) is not ... and not _overlaps(value.path, by_user)
        ]
        gone = {
            value.path: misfit for value in sets if (misfit := _misfit(whole, value.path, change))
        }
        unfit = {
            misfit
            for misfit in gone.values()
            if all(path in gone for path, _ in values_in(at(whole, misfit), misfit))
        }
        dropped = [value for value in sets if gone.get(value.path) in unfit]
        stays = (
            [value for value in sets if value.path not in gone and _is_news(value, change)]
            if change.is_given
            else []
        )
        left |= dict.fromkeys(sorted(unfit))
        told += [_left_out_caution(change, dropped, unfit)] if dropped else []
        told += [_kept_caution(change, stays)] if stays else []
    with open_dict(cfg):
        for path in left:
            above, _, key = path.rpartition(".")
            del OmegaConf.select(cfg, above)[key]
    return told


def _left_out_caution(change: Change, dropped: Sequence[FileValue], unfit: set[str]) -> Problem:
    keys = [f"{path}.".removeprefix(f"{change.path}.").rstrip(".") for path in sorted(unfit)]
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
    words = (
        f"{_and(keys)} {are} {LEFT_OUT}{_name(change)} sets {them} for "
        f"{change.before or 'no choice'}, and {why}"
    )
    return Problem(change.path, words, where=dropped[0].where)


def _kept_caution(change: Change, stays: Sequence[FileValue]) -> Problem:
    keys = _and(
        [f"{value.path.removeprefix(f'{change.path}.')}={_short(value.value)}" for value in stays]
    )
    own = [
        f"{value.path}={_short(change.others[value.path].value)}"
        for value in stays
        if value.path in change.others
    ]
    hint = f"set what you want; {change.now}'s own values: {' '.join(own)}" if own else ""
    return Problem(
        change.path,
        f"{change.now} keeps {keys}, which {_name(change)} sets for {change.before or 'no choice'}",
        hint=hint,
        where=stays[0].where,
    )


def _is_news(value: FileValue, change: Change) -> bool:
    """Whether a kept value can change a result and differs from what the choice sets anyway."""
    other = change.others.get(value.path)
    return not is_outside(value.path) and (
        other is None or (other.value != value.value and "/" in other.config)
    )


def _misfit(whole: Any, path: str, change: Change) -> str:
    """The path, or that of a mapping above it, that has no place in the config.

    Empty if there is one.
    """
    parts, first = path.split("."), change.path.count(".") + 1
    for end in range(first, len(parts) + 1):
        one, above = ".".join(parts[:end]), ".".join(parts[: end - 1])
        value, owner = at(whole, one), at(whole, above) if above else whole
        if (
            "." in one
            and one in change.made
            and isinstance(value, Mapping)
            and not any(key in value for key in _MAKES_ONE)
        ):
            return one
        if any(other == one or other.startswith(f"{one}.") for other in change.others):
            continue
        if end > first and "_target_" in owner:
            return "" if parts[end - 1] in SPECIAL else one
        if not (
            isinstance(value, Mapping) and any(two.startswith(f"{one}.") for two in change.made)
        ):
            return ""
    return ""


class _Choices:
    """The choices that overrides make, and the values that their files set."""

    def __init__(self, loader: Loader, given: Sequence[str]) -> None:
        defaults = loader.select(given).defaults
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
        self.others = {value.path: value for value in values if not value.config.startswith(_FILES)}
        self.made = frozenset(
            value.path.rpartition(".")[0]
            for value in self.others.values()
            if value.path.rpartition(".")[2] in _MAKES_ONE
        )


def _may_matter(loader: Loader, file: str, chosen: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether an experiment's file sets something below a chosen group, or builds on another
    experiment. Quick: most commands end here.
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


def _overlaps(path: str, others: set[str]) -> bool:
    return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in others)


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
