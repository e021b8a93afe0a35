"""The types of the schema, in a person's words."""

from __future__ import annotations

from typing import get_args

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config.annotations import describe_type


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
    if hasattr(kind, "__dataclass_fields__"):
        words = f"a mapping of {', '.join(kind.__dataclass_fields__)}"
    elif inner := get_args(kind)[-1:]:  # of dict[str, X], the only kind of several values in the schema
        words = f"a mapping of names to values, each {describe_type(inner[0]) or 'of any kind'}"
    else:
        words = describe_type(kind) or "Any"
    return words + (" or null" if node._metadata.optional else "")  # pyright: ignore[reportPrivateUsage]
