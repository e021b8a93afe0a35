"""Writes a config as an experiment file: only the choices and values in which it differs from its
base.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from samewise.runner.config import other_choice
from samewise.runner.config.catalogue import choices_of
from samewise.runner.config.compose import Composed, compose
from samewise.runner.config.fingerprint import data_places, identity
from samewise.runner.config.project import Project, override_of_experiment
from samewise.runner.config.tree import at, differences, plain, same
from samewise.runner.config.yaml_files import write_yaml
from samewise.runner.errors import ConfigError, Problem

LEFT_OUT = ("name", "run_root", "device", "tracking", "launcher", "sweeper")
"""Keys for where a run was executed and recorded, not what it was."""
_REDUCED = ("debug", "debug/sizes")
"""Groups that come after an experiment: what they set is written as values."""


def render(wanted: Composed, name: str, *, project: Project, head: list[str]) -> str:
    """The text of an experiment file of that name that composes to `wanted`, with `head` as
    comments; ConfigError if a choice of `wanted` no longer exists.
    """
    builds_on = wanted.choices.get("experiment")
    changed, base = _base(wanted, builds_on, project)
    if any(
        other_choice.LEFT_OUT in caution.message for caution in base.cautions
    ):  # files that build on it would repeat the warning
        builds_on = None
        changed, base = _base(wanted, None, project)
    defaults = [
        *(
            [f"/experiment/{builds_on}" if "/" in name else builds_on] if builds_on else []
        ),  # Hydra looks beside the file
        *(
            {f"{'' if '@' in group else 'override '}/{group}": choice}
            for group, choice in changed.items()
        ),
        "_self_",
    ]
    return _text({"defaults": defaults, **_values(base.cfg, wanted.whole)}, head)


def render_whole(wanted: Composed, *, project: Project, head: list[str]) -> str:
    """The same with all values and full paths: for a project that has no other configs."""
    places = data_places(wanted.whole)
    for key in ("initialise.weights", "resume_from"):
        value = at(wanted.whole, key)
        if isinstance(value, str) and Path(value).expanduser().exists():
            places[key] = Path(value).expanduser()
    for key, place in places.items():
        OmegaConf.update(wanted.cfg, key, str(place.resolve()))
    defaults = list[Any]()
    for group in _groups(wanted, compose(["~experiment"], project=project).choices):
        choice = wanted.choices.get(group)
        if "@" not in group:
            known = choice in choices_of(group, project=project)
            defaults.append({f"override /{group}": choice if known else None})
    values: Any = OmegaConf.to_container(wanted.cfg, resolve=False, enum_to_str=True)
    said = {"defaults": [*defaults, "_self_"]}
    return _text(said | {key: value for key, value in values.items() if key not in LEFT_OUT}, head)


def _text(said: Mapping[str, Any], head: list[str]) -> str:
    text = write_yaml(dict(said), default_flow_style=None, width=120)
    return "\n".join(["# @package _global_", *(f"# {line}" for line in head), text])


def _base(
    wanted: Composed, builds_on: str | None, project: Project
) -> tuple[dict[str, str | None], Composed]:
    """The choices that differ from an experiment, or from the root.

    And the config that they compose to.
    """
    first = [override_of_experiment(builds_on) if builds_on else "~experiment"]
    changed = dict(_changed_choices(wanted, compose(first, project=project).choices))
    chosen = [
        f"~{group}" if choice is None else f"{'+' if '@' in group else ''}{group}={choice}"
        for group, choice in changed.items()
    ]
    return changed, compose([*first, *chosen], project=project)


def save(text: str, file: Path, wanted: Composed, *, name: str, project: Project) -> None:
    """Write the text that `render` returned to a new file.

    If it does not compose to `wanted`, remove the file and raise a ConfigError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "x", encoding="utf-8") as handle:
        handle.write(text)
    try:
        require_same(wanted, name=name, project=project)
    except BaseException:
        file.unlink()
        raise


def require_same(wanted: Composed, *, name: str, project: Project) -> None:
    """Raise a ConfigError if the experiment of that name does not compose to `wanted`."""
    made = compose([f"experiment={name}"], project=project)
    if found := differences(identity(wanted.whole), identity(made.whole)):
        hint = "a file can add and change values, but not remove them; nothing was written"
        raise ConfigError(
            *[
                Problem(
                    path,
                    "cannot be written as an experiment",
                    before,
                    f"the file would give {after}",
                    hint,
                )
                for path, before, after in found
            ]
        )


def _changed_choices(wanted: Composed, base: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    for group in _groups(wanted, base):
        choice = wanted.choices.get(group)
        # Unrecorded: as values
        several = (
            choice is None
            and wanted.whole.get(group)
            and not any(one.startswith(f"{group}@") for one in wanted.choices)
        )
        if choice != base.get(group) and not several:
            yield group, choice


def _groups(wanted: Composed, base: Mapping[str, str]) -> list[str]:
    """The groups of which an experiment chooses."""
    return sorted({*wanted.choices, *base} - {"experiment", *_REDUCED, *LEFT_OUT})


def _values(base: DictConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values to set in addition to `base`: those without references first, then what still
    differs, so that references that give the value stay.
    """
    cfg, found = copy.deepcopy(base), dict[str, Any]()
    OmegaConf.set_struct(cfg, False)
    for references in (False, True):
        for path, value in list(
            _differences(cfg, cast(Mapping[str, Any], plain(cfg)), wanted, references=references)
        ):
            node = found
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
            OmegaConf.update(
                cfg, ".".join(path), value, force_add=True, merge=isinstance(value, dict)
            )
    if "monitor" in found.get(
        "evaluate", {}
    ):  # the base's mode, even if it is the same, is found by the name of the base's monitor
        found["evaluate"].setdefault("mode", wanted["evaluate"]["mode"])
    return found


def _differences(
    cfg: Any,
    base: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    references: bool,
    under: tuple[str, ...] = (),
) -> Iterator[tuple[Any, Any]]:
    """Paths and values of `wanted` that differ from `base`; a list counts as one value."""
    for key, value in wanted.items():
        if (not under and key in LEFT_OUT) or (key in base and same(base[key], value)):
            continue
        refers = _refers(cfg, key)
        if isinstance(value, dict) and isinstance(base.get(key), dict) and not refers:
            yield from _differences(
                cfg[key],
                base[key],
                cast(dict[str, Any], value),
                references=references,
                under=(*under, key),
            )
        elif references or not refers:
            yield (*under, key), value


def _refers(cfg: Any, key: str) -> bool:
    """Whether a value is a reference, or a list that contains one."""
    if not isinstance(cfg, DictConfig) or OmegaConf.is_missing(cfg, key):
        return False
    if OmegaConf.is_interpolation(cfg, key):
        return True
    value = cfg.get(key)
    return isinstance(value, ListConfig) and "${" in str(
        OmegaConf.to_container(value, resolve=False)
    )
