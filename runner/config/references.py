"""References of a config (`${...}`), and the limit on the size of their values.

A few lines, each repeating another value twice, can exceed any memory. A run's config.yaml is
resolved; its head records which values were copies (`header`), so that an override changes the
copies too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from samewise.runner.config.tree import at, differences, plain
from samewise.runner.config.yaml_files import VALUES, too_many
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.secrets import redact

LARGEST = 5_000_000
"""Characters and values of a whole config: a hundred times those of the largest here."""

LINKS = 50
"""References in a row: following a chain takes time by the square of its length."""

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_SHORT = 200
"""Characters of a value that may be a part of another's path."""


_PLAIN = re.compile(r"\$\{(?:oc\.select:)?[\w.\[\]/@-]+(?:,[\w.-]+)?\}")
"""A reference to another value of the config. Others, such as `${oc.env:HOME}`, are not restored: a
config may come from somebody else."""


def find_references(cfg: DictConfig) -> dict[str, str]:
    """Return the text of each value that only refers to others, by path."""
    return {
        ".".join(map(str, path)): value
        for path, value in _leaves(OmegaConf.to_container(cfg, resolve=False))
        if isinstance(value, str)
        and _refers_only(value)
        # The text is written into config.yaml, where a secret should not be
        and redact(value) == value
        # The joined path would lead elsewhere
        and not any("." in str(part) for part in path)
    }


def dependents(cfg: DictConfig, keys: Iterable[str]) -> list[tuple[Any, ...]] | None:
    """Return the paths of values, and of those that refer to them, also through others.

    What refers in another way than `${PATH}` is taken to refer to everything.

    Args:
        cfg: The config.
        keys: The values' paths, with dots.

    Returns:
        The paths; None if one of the values is not there, or is a mapping or list.
    """
    leaves = {
        tuple(map(str, path)): (path, value)
        for path, value in _leaves(OmegaConf.to_container(cfg, resolve=False))
    }
    affected = {tuple(key.split(".")) for key in keys}
    if not affected <= leaves.keys():
        return None
    targets = {
        path: [_target(match[1], path) for match in _INNERMOST.finditer(value)]
        # Its value decides what it refers to
        if "\\" not in value and "$" not in _PLAIN.sub("", value)
        else [()]
        for path, (_, value) in leaves.items()
        if isinstance(value, str) and "${" in value
    }
    size = 0
    while size < len(affected):
        size = len(affected)
        affected |= {
            path
            for path, sources in targets.items()
            # One refers to the other, or to what is in it
            if any(x[: len(y)] == y[: len(x)] for x in sources for y in affected)
        }
    return [leaves[path][0] for path in affected]


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the content of each value that is no mapping or list."""
    if isinstance(node, Mapping | list):
        for key, part in (
            cast(Mapping[Any, Any], node).items()
            if isinstance(node, Mapping)
            else enumerate(cast(list[Any], node))
        ):
            yield from _leaves(part, (*path, key))
    else:
        yield path, node


def _refers_only(text: str) -> bool:
    if "${" not in text or "\\" in text:
        return False
    rest = text
    while (shorter := _PLAIN.sub("_", rest)) != rest:
        rest = shorter
    return "$" not in rest


def restore_references(cfg: DictConfig, references: Mapping[str, str]) -> None:
    """Turn values of a resolved config back into references, where they still equal their source.

    Raises:
        ValueError: They would change another value.
        ConfigError: See `require_modest_references`.
    """
    values = plain(cfg)
    restored = {
        path: text
        for path, text in references.items()
        if _refers_only(text) and at(values, path, ...) is not ...
    }
    for path, text in restored.items():
        *above, last = path.split(".")
        if any(".".join(above[:end]) in restored for end in range(1, len(above) + 1)):
            continue  # it would be written into what the other refers to
        parent: Any = OmegaConf.select(cfg, ".".join(above)) if above else cfg
        parent[int(last) if isinstance(parent, ListConfig) else last] = text
    require_modest_references(cfg)
    for _ in restored:  # one that is put back may be what another refers to
        after = plain(cfg)
        edited = [path for path in restored if at(after, path) != at(values, path)]
        for path in edited:
            OmegaConf.update(cfg, path, at(values, path), merge=False)
        if not edited:
            break
    if changes := differences(cfg, values):
        raise ValueError(f"its references give {changes[0][0]} another value")


def require_modest_references(cfg: DictConfig) -> None:
    """Check the size of the resolved config.

    Raises:
        ConfigError: It would have over `VALUES` values, be larger than `LARGEST`, or chain over
            `LINKS` references.
    """
    whole = OmegaConf.to_container(cfg, resolve=False)
    sizes = dict[tuple[str, ...], tuple[int, int, int]]()
    try:
        size, links, values = _measure(whole, (), whole, sizes)
    except RecursionError:
        # A chain that exceeds Python's stack exceeds the limit too
        size, links, values = 0, LINKS + 1, 0
    ConfigError.raise_if(
        links > LINKS,
        "",
        "values of the config refer to each other in too long a chain",
        expected=f"at most {LINKS} in a row",
        hint="refer to the first of them",
    )
    if size >= LARGEST:
        path = max((path for path, (size, *_) in sizes.items() if size >= LARGEST), key=len)
        raise ConfigError(
            Problem(
                ".".join(path),
                "repeats other values so often that it would not fit into memory",
                at(whole, path),
                f"a config of at most {LARGEST:,} characters, with all its ${{...}} resolved",
            )
        )
    if (
        values > VALUES
    ):  # the total of all files with references resolved: each file alone is within the limit
        raise too_many("the config")


def _measure(
    whole: Any, path: tuple[str, ...], node: Any, sizes: dict[tuple[str, ...], tuple[int, int, int]]
) -> tuple[int, int, int]:
    """(characters and values below a path, up to `LARGEST`; longest chain of references; values).

    Zero for a cycle, which is reported elsewhere.
    """
    if path not in sizes:
        sizes[path] = 0, 0, 0
        own = 1
        if isinstance(node, str) and "${" in node:
            parts, measure = _follow(whole, path, node, sizes)
            size, links, own = len(measure), 1, 0
        elif isinstance(node, Mapping | list):
            items = (
                cast(Mapping[Any, Any], node).items()
                if isinstance(node, Mapping)
                else enumerate(cast(list[Any], node))
            )
            parts = [_measure(whole, (*path, str(key)), part, sizes) for key, part in items]
            size, links = 0, 0
        else:
            parts, size, links = [], len(str(node)), 0
        size += sum(size for size, *_ in parts)
        sizes[path] = (
            # Values that each repeat another twice make sums of any size
            min(1 + size, LARGEST),
            links + max((links for _, links, _ in parts), default=0),
            own + sum(values for *_, values in parts),
        )
    return sizes[path]


def _follow(
    whole: Any, path: tuple[str, ...], text: str, sizes: dict[tuple[str, ...], tuple[int, int, int]]
) -> tuple[list[tuple[int, int, int]], str]:
    """Return the size of each reference in a text, and the remaining text.

    The innermost comes first, since its value may be part of another's path.
    """
    parts = list[tuple[int, int, int]]()
    while match := _INNERMOST.search(text):
        before, after = text[: match.start()], text[match.end() :]
        target = _target(match[1], path)
        parts.append(_measure(whole, target, at(whole, target), sizes))
        is_part = before.rfind("${") > before.rfind("}")
        text = (
            before + (_text_at(whole, target) if is_part and parts[-1][0] <= _SHORT else "") + after
        )
    return parts, text


def _target(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a reference: `a.b`, `a[0]`, `..b`, `oc.select:a.b,DEFAULT`."""
    name = reference.partition(":")[2].partition(",")[0] if ":" in reference else reference
    name = name.strip()
    dots = len(name) - len(name.lstrip("."))
    return (
        *(path[:-dots] if dots else ()),
        *(part for part in re.split(r"[.\[\]]", name[dots:]) if part),
    )


def _text_at(whole: Any, path: tuple[str, ...]) -> str:
    """The text at a path with its own references replaced; it is short, so they are few."""
    text = str(at(whole, path))
    while match := _INNERMOST.search(text):
        text = (
            text[: match.start()] + _text_at(whole, _target(match[1], path)) + text[match.end() :]
        )
    return text
