"""Finds runs of another samewise that differ only in settings that are new and have defaults.

Imports no component.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf, open_dict

import samewise
from samewise.runner.config import compose
from samewise.runner.config.check import settings_are_sound
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.tree import at, differences
from samewise.runner.errors import ConfigError
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder

_ABSENT = "???"


def as_trained(composed: Composed) -> Composed:
    """Return the experiment as another version of samewise trained it, without newer settings.

    A setting may be left out if it is an argument with its default: the call stays the same.
    Without such a run, the experiment is returned unchanged.
    """
    # A run of exactly this experiment counts before those of other versions
    if not settings_are_sound(composed) or composed.folder.path.exists():
        return composed
    now = identity(composed.whole)
    for version, fingerprint, before in _runs_of_other_versions(composed.folder.path.parent):
        if not (added := _defaults_added(before, now)):
            continue
        cfg = copy.deepcopy(composed.cfg)
        with open_dict(cfg):
            for path in added:
                above, _, key = path.rpartition(".")
                del cast(dict[str, Any], OmegaConf.select(cfg, above))[key]
        # The user's code counts as well, which equal configs do not show
        if (trained := replace(composed, cfg=cfg)).fingerprint == fingerprint:
            _note(
                composed.name,
                version,
                ", ".join(f"{path}={json.dumps(at(now, path))}" for path in added),
            )
            return trained
    return composed


@cache
def _note(name: str, version: str, added: str) -> None:
    """Say why an existing run counts; once for all points of a sweep."""
    note = (
        f"samewise {version} trained {name} without {added}, which is new since then and has "
        "its default: its run counts"
    )
    print(f"note: {note}; `train --fresh` trains it again", file=sys.stderr)


@cache
def _runs_of_other_versions(root: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """The runs of an experiment's name by other versions: version, fingerprint and identity.

    Read once for all points of a sweep.
    """
    runs = list[tuple[str, str, dict[str, Any]]]()
    for folder in map(RunFolder, sorted(root.glob("*/"))):
        try:
            environment = read_json(folder.environment, shapes.ENVIRONMENT) or {}
            version = environment.get("versions", {}).get("samewise")
            if version not in (None, samewise.__version__):
                runs.append(
                    (
                        version,
                        environment["fingerprint"],
                        identity(compose.load(folder.config).whole),
                    )
                )
        except ConfigError:  # a damaged run, or not a run
            continue
    return runs


def _defaults_added(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that only the later of two configs has.

    Empty if anything else differs, or if one of them changes something.
    """
    added = dict[str, None]()
    for path, value, _ in differences(before, now):
        parts = path.split(".")
        # The first that is new: a whole list, say
        place = next(
            (end for end in range(1, len(parts)) if at(before, parts[:end]) is None), len(parts)
        )
        if value != _ABSENT or not _has_default(now, parts[:place]):
            return []
        added[".".join(parts[:place])] = None
    return list(added)


def _has_default(config: Mapping[str, Any], parts: list[str]) -> bool:
    """Return whether a value is a component's argument with its default, or only referred to."""
    above: Any = at(config, parts[:-1])
    target = above.get("_target_") if isinstance(above, Mapping) else _ABSENT
    if target is None:  # references are resolved, and compared where they lead
        return parts[0] in ("dataset", "transforms") and not any(
            "_target_" in at(config, parts[:end]) for end in range(1, len(parts))
        )
    default = next(_defaults(str(target), parts[-1]), None)
    try:
        # As JSON, a tuple is a list, and 1 is neither 1.0 nor true
        return default is not None and json.dumps(ast.literal_eval(default)) == json.dumps(
            at(config, parts)
        )
    except (ValueError, TypeError):  # computed, or not a value of a config
        return False


def _defaults(target: str, argument: str) -> Iterator[ast.expr]:
    """The default of an argument of one of samewise's functions or classes, from its text.

    Nothing if it has none.
    """
    package, _, name = target.rpartition(".")
    # The module is read as text, so that composing imports no component
    file = Path(samewise.__file__).parent.joinpath(*package.split(".")[1:])
    # Whose modules a relative import means
    home = package if file.is_dir() else package.rpartition(".")[0]
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if package.partition(".")[0] != "samewise" or not file.is_file():
        return
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from _defaults(
                        f"{resolve_name('.' * node.level + (node.module or ''), home)}.{alias.name}",
                        argument,
                    )
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            yield from _in_signature(node.args, argument)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    yield from _in_signature(inner.args, argument)
                elif (
                    isinstance(inner, ast.AnnAssign)
                    and isinstance(inner.target, ast.Name)
                    and inner.target.id == argument
                    and inner.value
                ):  # of a dataclass
                    yield inner.value
            yield from (
                default
                for base in node.bases
                if isinstance(base, ast.Name)
                for default in _defaults(f"{package}.{base.id}", argument)
            )


def _in_signature(arguments: ast.arguments, name: str) -> Iterator[ast.expr]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    yield from (
        default for argument, default in defaults if argument.arg == name and default is not None
    )
