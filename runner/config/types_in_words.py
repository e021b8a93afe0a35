"""The types of the schema, in a person's words."""

from __future__ import annotations

import enum
from typing import get_args

from omegaconf import DictConfig, OmegaConf


def is_typed(cfg: DictConfig, path: str) -> bool:
    """Whether what is at a path has keys of the schema, and no others."""
    kind = OmegaConf.get_type(OmegaConf.select(cfg, path))
    return kind is not None and hasattr(kind, "__dataclass_fields__")


def expected_type(cfg: DictConfig, path: str) -> str:
    """The type of a typed key, in words."""
    parent, _, name = path.rpartition(".")
    owner = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(owner, DictConfig):
        return ""
    node = owner._get_node(name)  # pyright: ignore[reportPrivateUsage]
    if node is None or isinstance(node, list):
        return ""
    kind = node._metadata.ref_type  # pyright: ignore[reportPrivateUsage]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        words = _members(kind)
    else:
        simple = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        inner = get_args(kind)[-1:]  # of dict[str, X], the only kind of several values in the schema
        each = [_members(one) if isinstance(one, type) and issubclass(one, enum.Enum) else simple.get(one, "of any kind") for one in inner]
        words = f"a mapping of names to values, each {each[0]}" if each else simple.get(kind, getattr(kind, "__name__", str(kind)))
        if hasattr(kind, "__dataclass_fields__"):
            words = f"a mapping of {', '.join(kind.__dataclass_fields__)}"
    return words + (" or null" if node._metadata.optional else "")  # pyright: ignore[reportPrivateUsage]


def _members(kind: type[enum.Enum]) -> str:
    return "one of: " + ", ".join(kind.__members__)
