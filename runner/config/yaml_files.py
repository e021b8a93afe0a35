"""Reads YAML, with limits on a file's size and depth, checked before it is parsed.

And in someone else's file, no values of this machine or user.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import yaml

from samewise.runner.errors import ConfigError, Problem

VALUES = 10_000
"""Values of a file, and of a whole config: those that stand for others (`*name`) count as often as
they are repeated. OmegaConf takes 1 ms for each."""
DEPTH = 100

Interpolations = Literal["all", "own", "none"]
"""Which `${...}` a file may have: all; those that lead to other values of the config; none, as a
saved config is resolved."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# So many letters of a text count as one more value
_LONG = 100
_OWN = re.compile(r"\$\{\s*(?:oc\.select\s*:)?[^{}:$]*\}")


def read_yaml(text: str) -> Any:
    """The value of a YAML text, without types of Python's own; yaml.YAMLError if it is none."""
    # Safe, and where libyaml was there to compile it, ten times as fast
    return yaml.load(text, Loader=_LOADER)


def write_yaml(value: Any, **style: Any) -> str:
    """Return the YAML text of plain values, in their order.

    Text that some reader takes for a number or a boolean is quoted.

    Args:
        value: Mappings, lists and scalars.
        style: As PyYAML's `dump` takes it.
    """
    return yaml.dump(value, allow_unicode=True, sort_keys=False, Dumper=_Dumper, **style)


class _Dumper(yaml.SafeDumper):
    pass


def _quote(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str",
        text,
        # PyYAML reads 1e-3 as text, YAML 1.2 as a number; `on` is a boolean in YAML 1.1 alone
        style="'"
        if text.lower() in ("y", "yes", "n", "no", "true", "false", "on", "off") or _is_number(text)
        else None,
    )


_Dumper.add_representer(str, _quote)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def require_modest(text: str, name: str, *, interpolations: Interpolations = "all") -> None:
    """Check the size, nesting and interpolations of a YAML text. Text that is no YAML passes.

    Raises:
        ConfigError: Too many values, nested too deeply, or a `${...}` that is not allowed.
    """
    try:
        _count(_events(text), name, interpolations)
    except RecursionError:
        raise _too_deep(name) from None


def _events(text: str) -> Iterator[Any]:
    events = list[Any]()
    for loader in (_LOADER, yaml.SafeLoader):  # the fast parser, whose result is the one used
        events.clear()
        depth = 0
        try:
            for event in yaml.parse(text, Loader=loader):
                events.append(event)
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if (
                    len(events) > 3 * VALUES or depth > DEPTH
                ):  # the rest is not read: a million brackets take minutes
                    break
        except yaml.YAMLError:
            continue
        break
    yield from events


def _count(events: Iterator[Any], name: str, interpolations: Interpolations) -> None:
    total, sizes, opened = 0, dict[str, int](), list[tuple[str | None, int]]()
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes |= {anchor: total - before} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            ConfigError.raise_if(
                event.anchor in (anchor for anchor, _ in opened),
                name,
                "has a value that contains itself",
                f"*{event.anchor}",
            )
            total += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            ConfigError.raise_if(
                interpolations == "own" and "${" in event.value and _is_refused(event.value),
                name,
                "asks for a value of this machine or user, which someone else's config file may "
                "not do",
                event.value,
                "${PATH.OF.A.VALUE} or ${oc.select:...}",
                "give the value on the command line, or keep the file in your project's own folder "
                "of configs ([tool.samewise] configs in pyproject.toml)",
            )
            ConfigError.raise_if(
                interpolations == "none" and "${" in event.value,
                name,
                "is not a run's config: a saved one holds values, and this refers to others",
                event.value,
            )
            size = 1 + len(event.value) // _LONG
            sizes |= {event.anchor: size} if event.anchor else {}
            total += size
        if total > VALUES:
            raise too_many(name)
        if len(opened) > DEPTH:
            raise _too_deep(name)


def _is_refused(value: str) -> bool:
    """Return whether an interpolation is left once those that refer to the config are removed."""
    reduced = ""
    while reduced != value:
        reduced, value = value, _OWN.sub("x", value)
    return ":" in value.partition("${")[2]


def too_many(name: str) -> ConfigError:
    """The error that `name` has more than `VALUES` values."""
    return ConfigError(
        Problem(
            name,
            "has too many values for a config",
            expected=f"at most {VALUES:,}, repeated ones counted each time",
            hint="put a long list into a separate file, and name that file in the config",
        )
    )


def _too_deep(name: str) -> ConfigError:
    return ConfigError(
        Problem(name, "is nested too deeply for a config", expected=f"at most {DEPTH} levels")
    )


def lines_of(text: str) -> dict[str, int]:
    """The line (from 1) of each value of a YAML file by its path: `optimizer.lr`, `defaults.2`.

    Call `require_modest` first.
    """
    lines = dict[str, int]()
    pending: list[tuple[str, Any]] = [("", yaml.compose(text, Loader=_LOADER))]
    for under, node in pending:
        if isinstance(node, yaml.MappingNode):
            parts = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            parts = [(str(number), item, item) for number, item in enumerate(node.value)]
        else:
            continue
        for name, mark, value in parts:
            path = f"{under}.{name}" if under else name
            lines[path] = mark.start_mark.line + 1
            pending.append((path, value))
    return lines
