"""Writes a config as an experiment file that holds only its differences from its base."""

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
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import at, differences, plain, same
from samewise.runner.config.yaml_files import write_yaml
from samewise.runner.errors import ConfigError, Problem

LEFT_OUT = ("name", "run_root", "device", "tracking", "launcher", "sweeper")
"""Keys for where a run was executed and recorded, not what it was."""
_REDUCED = ("debug", "debug/sizes")
"""Groups that come after an experiment: what they set is written as values."""


def render(composed: Composed, name: str, *, project: Project, head: list[str]) -> str:
    """Return the text of an experiment file of that name that composes to `composed`.

    Args:
        composed: The config to write.
        name: The experiment's name.
        project: The user's project.
        head: Lines to put first, as comments.

    Raises:
        ConfigError: A choice of `composed` no longer exists.
    """
    builds_on = composed.choices.get("experiment")
    changed, base = _base(composed, builds_on, project)
    if any(
        other_choice.LEFT_OUT in caution.message for caution in base.cautions
    ):  # files that build on it would repeat the warning
        builds_on = None
        changed, base = _base(composed, None, project)
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
    return _text({"defaults": defaults, **_values(base.cfg, composed.whole)}, head)


def render_whole(composed: Composed, *, project: Project, head: list[str]) -> str:
    """The same with all values and full paths: for a project that has no other configs."""
    places = data_places(composed.whole)
    # Paths are relative to the current folder, and the new project is in another
    for key in SOURCES:
        value = at(composed.whole, key)
        if isinstance(value, str) and Path(value).expanduser().exists():
            places[key] = Path(value).expanduser()
    for key, place in places.items():
        OmegaConf.update(composed.cfg, key, str(place.resolve()))
    defaults = list[Any]()
    for group in _groups(composed, compose(["~experiment"], project=project).choices):
        choice = composed.choices.get(group)
        if "@" not in group:
            # A choice that no file here has is written as values, below
            defaults.append(
                {
                    f"override /{group}": choice
                    if choice in choices_of(group, project=project)
                    else None
                }
            )
    # Unresolved, so that an override of a value still changes its copies
    values: Any = OmegaConf.to_container(composed.cfg, resolve=False, enum_to_str=True)
    return _text(
        {"defaults": [*defaults, "_self_"]}
        | {key: value for key, value in values.items() if key not in LEFT_OUT},
        head,
    )


def _text(content: Mapping[str, Any], head: list[str]) -> str:
    return "\n".join(
        [
            "# @package _global_",
            *(f"# {line}" for line in head),
            write_yaml(dict(content), default_flow_style=None, width=120),
        ]
    )


def _base(
    composed: Composed, builds_on: str | None, project: Project
) -> tuple[dict[str, str | None], Composed]:
    """The choices that differ from an experiment, or from the root.

    And the config that they compose to.
    """
    first = [override_of_experiment(builds_on) if builds_on else "~experiment"]
    changed = dict(_changed_choices(composed, compose(first, project=project).choices))
    return changed, compose(
        [
            *first,
            *[
                f"~{group}" if choice is None else f"{'+' if '@' in group else ''}{group}={choice}"
                for group, choice in changed.items()
            ],
        ],
        project=project,
    )


def save(text: str, file: Path, composed: Composed, *, name: str, project: Project) -> None:
    """Write the text that `render` returned to a new file.

    If it does not compose to `composed`, remove the file and raise a ConfigError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "x", encoding="utf-8") as handle:
        handle.write(text)
    try:
        require_same(composed, name=name, project=project)
    except BaseException:
        file.unlink()
        raise


def require_same(composed: Composed, *, name: str, project: Project) -> None:
    """Raise a ConfigError if the experiment of that name does not compose to `composed`."""
    again = compose([f"experiment={name}"], project=project)
    ConfigError.raise_all(
        Problem(
            path,
            "cannot be written as an experiment",
            before,
            f"the file would give {after}",
            "a file can add and change values, but not remove them; nothing was written",
        )
        for path, before, after in differences(identity(composed.whole), identity(again.whole))
    )


def _changed_choices(
    composed: Composed, base: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    for group in _groups(composed, base):
        choice = composed.choices.get(group)
        # Unrecorded: as values
        several = (
            choice is None
            and composed.whole.get(group)
            and not any(key.startswith(f"{group}@") for key in composed.choices)
        )
        if choice != base.get(group) and not several:
            yield group, choice


def _groups(composed: Composed, base: Mapping[str, str]) -> list[str]:
    """The groups of which an experiment chooses."""
    return sorted({*composed.choices, *base} - {"experiment", *_REDUCED, *LEFT_OUT})


def _values(base: DictConfig, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to set in addition to `base`.

    Values without references are set first, then what still differs, so that references that give
    the value stay.
    """
    cfg, values = copy.deepcopy(base), dict[str, Any]()
    OmegaConf.set_struct(cfg, False)
    for references in (False, True):
        for path, value in list(
            _differences(cfg, cast(Mapping[str, Any], plain(cfg)), target, references=references)
        ):
            node = values
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
            OmegaConf.update(
                cfg, ".".join(path), value, force_add=True, merge=isinstance(value, dict)
            )
    if "monitor" in values.get(
        "evaluate", {}
    ):  # the base's mode, even if it is the same, is found by the name of the base's monitor
        values["evaluate"].setdefault("mode", target["evaluate"]["mode"])
    return values


def _differences(
    cfg: Any,
    base: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    references: bool,
    under: tuple[str, ...] = (),
) -> Iterator[tuple[Any, Any]]:
    """Paths and values of `target` that differ from `base`; a list counts as one value."""
    for key, value in target.items():
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
    """Return whether a value is a reference, or a list that contains one."""
    if not isinstance(cfg, DictConfig) or OmegaConf.is_missing(cfg, key):
        return False
    if OmegaConf.is_interpolation(cfg, key):
        return True
    value = cfg.get(key)
    return isinstance(value, ListConfig) and "${" in str(
        OmegaConf.to_container(value, resolve=False)
    )
