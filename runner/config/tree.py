"""Configs as trees: values by path. Imports neither torch nor mlflow."""

import copy
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.errors import ConfigError


def plain(node: Any) -> Any:
    """A config as dicts, lists and scalars, with interpolations resolved.

    A missing value, or a reference to one, is `???`.

    An unresolvable interpolation stays as it is written: composing has reported it. Only
    interpolations are looked up: a lookup takes several times as long.
    """
    if isinstance(node, DictConfig | ListConfig):
        return _resolved(node, (), OmegaConf.to_container(node, resolve=False))
    return node.value if isinstance(node, enum.Enum) else node


def flat(node: Any, under: str = "", *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Each path and value of a plain config.

    An empty mapping or list is a value, and with `lists=False` so is a list of scalars.
    """
    items: Any = (
        list(node.items())
        if isinstance(node, Mapping)
        else list(enumerate(cast(list[Any], node)))
        if isinstance(node, list)
        else ()
    )
    if under and (
        not items
        or (
            not lists
            and isinstance(node, list)
            and not any(isinstance(item, Mapping | list) for item in cast(list[Any], node))
        )
    ):
        yield under, node
        return
    for key, value in items:
        yield from flat(value, f"{under}.{key}" if under else str(key), lists=lists)


def at(node: Any, path: str | Sequence[str], otherwise: Any = None) -> Any:
    """The value at a path of a plain config.

    `otherwise` if the path leads through a scalar, None if a key is missing.
    """
    for part in path.split(".") if isinstance(path, str) else path:
        if isinstance(node, Mapping):
            node = cast(Mapping[str, Any], node).get(part)
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(cast(list[Any], node)):
            node = node[int(part)]
        else:
            return otherwise
    return node


def with_values(node: Any, values: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """A plain config with other values at some paths; the rest is shared with the original."""
    changed = copy.copy(node)
    for (key, *path), value in values:
        key = key if isinstance(node, list) else str(key)
        changed[key] = with_values(changed[key], [(path, value)]) if path else value
    return changed


def without(node: dict[str, Any], outside: frozenset[str], under: str = "") -> Any:
    """The mapping without the values at some paths."""
    remaining = dict[str, Any]()
    for key, value in node.items():
        path = f"{under}{key}"
        if path not in outside:
            remaining[key] = (
                without(cast(dict[str, Any], value), outside, f"{path}.")
                if isinstance(value, dict)
                else value
            )
    return remaining


def differences(
    a: DictConfig | Mapping[str, Any], b: DictConfig | Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return the differences of two configs: (path, value in `a`, value in `b`), sorted by path.

    A missing key's value is `???`. A mapping or list that only one has is compared by its paths,
    not with the other's emptiness.
    """
    before, right = (
        dict(flat(plain(side) if isinstance(side, DictConfig) else side)) for side in (a, b)
    )
    filled = {
        ".".join(parts[:end])
        for path in before.keys() ^ right.keys()
        for parts in [path.split(".")]
        for end in range(1, len(parts))
    }
    return [
        (path, before.get(path, "???"), right.get(path, "???"))
        for path in sorted(before.keys() | right.keys())
        if not same(before.get(path, ...), right.get(path, ...))
        and not (path in filled and before.get(path, right.get(path)) in ({}, []))
    ]


def shown(value: Any) -> str:
    """A value from `differences`, as a message shows it."""
    return "absent" if value == "???" else repr(value)


def leaves(
    cfg: DictConfig | ListConfig, under: str = ""
) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Each value's path, unresolved content, and a function that resolves it.

    ConfigError if a key is a number or another value that is not text.
    """
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, raw in (
        cast(dict[Any, Any], whole).items() if isinstance(whole, dict) else enumerate(whole)
    ):
        path = f"{under}.{key}" if under else str(key)
        ConfigError.raise_if(
            isinstance(cfg, DictConfig) and not isinstance(key, str),
            path,
            "the key is not text, which components would not get as it is",
            key,
            f"text, such as '{key}'",
            "quote it",
        )
        if isinstance(raw, dict | list):
            yield from leaves(cast(Any, cfg)[key], path)
        else:
            yield path, raw, partial(getitem, cast(Any, cfg), key)


def differing_keys(a: DictConfig, b: DictConfig) -> tuple[str, ...]:
    """The paths at which two configs differ, without those that `b` computes from others."""
    changed = [path for path, _, _ in differences(a, b)]
    computed = {path for path, raw, _ in leaves(b) if isinstance(raw, str) and "${" in raw}
    return tuple(path for path in changed if path not in computed) or tuple(changed)


def paths(cfg: DictConfig | ListConfig) -> Iterator[str]:
    """The path of every value and of every mapping."""
    containers = set[str]()
    for path, _, _ in leaves(cfg):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if whole not in containers:
                containers.add(whole)
                yield whole


def _resolved(cfg: Any, path: tuple[Any, ...], content: Any) -> Any:
    """The unresolved content at a path with its interpolations resolved."""
    if isinstance(content, dict):
        return {
            str(key): _resolved(cfg, (*path, key), part)
            for key, part in cast(dict[Any, Any], content).items()
        }
    if isinstance(content, list):
        return [
            _resolved(cfg, (*path, place), part)
            for place, part in enumerate(cast(list[Any], content))
        ]
    if not isinstance(content, str) or "${" not in content:
        return plain(content)
    try:
        return plain(reduce(getitem, path, cfg))
    except OmegaConfBaseException:
        return content


def overlaps(path: str, keys: Iterable[str]) -> bool:
    """Whether a path leads to one of some keys, into one, or to a mapping around one."""
    return any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are of one type and equal; NaN equals itself."""
    # 1, 1.0 and True are equal in Python
    return type(a) is type(b) and (a == b or (a != a and b != b))


def list_above(cfg: DictConfig, key: str) -> str:
    """The path of the first list that a key leads into; empty if there is none."""
    return next(
        (
            path
            for path in [key[: dot.start()] for dot in re.finditer(r"\.", key)]
            if isinstance(
                OmegaConf.select(cfg, path, throw_on_resolution_failure=False), ListConfig
            )
        ),
        "",
    )
