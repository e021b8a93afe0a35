"""Signatures as a config sees them: argument names, and whether a value fits an annotation.

Only what is surely wrong is refused.

typeguard's `check_type` does not serve here: it judges Python values, and a config's value has yet
to become one: a list for a tuple, text for a Path or an enum, a mapping with a `_target_` for any
object; and `true` is not a whole number.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, cast

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config.schema import Experiment

_SEQUENCES = (
    list,
    tuple,
    set,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
OBJECTS = ("torch.Tensor", "torch.nn.modules.module.Module", "torch.dtype", "torch.Generator")
"""Classes that no scalar of a config can stand for."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by name."""


def evaluate(annotation: Any, component: Callable[..., Any]) -> Any:
    """Evaluate the annotation to an object; `Any` if it is missing or cannot be evaluated."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    function = inspect.unwrap(component.__init__ if isinstance(component, type) else component)
    # Names in an annotation are those of the module that defines the function
    scope = getattr(function, "__globals__", None) or vars(sys.modules[component.__module__])
    try:
        # The source's own annotation, from a package that the config may name
        return eval(annotation, dict(scope))
    except Exception:
        return Any


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` (a scalar, list or dict of a config) matches `annotation`."""
    if isinstance(value, Mapping) and "_target_" in value:
        # An object: only plain scalars certainly do not match
        return annotation not in (
            int,
            float,
            bool,
            str,
        )
    origin = typing.get_origin(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return True
    if origin is Union or isinstance(annotation, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if origin is typing.Annotated:
        return fits(value, typing.get_args(annotation)[0])
    if annotation is None or annotation is type(None):
        return value is None
    if (origin or annotation) in _SEQUENCES:
        return _fits_sequence(value, origin or annotation, typing.get_args(annotation))
    if (origin or annotation) in _MAPPINGS:
        return isinstance(value, Mapping)
    if origin is collections.abc.Callable or annotation in (Callable, typing.Callable):
        return not isinstance(value, str | int | float | list) and value is not None
    return _fits_class(value, annotation) if isinstance(annotation, type) else True


def describe_type(annotation: Any) -> str:
    """Describe the annotation in words; empty if there is none."""
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return ""
    if annotation is None or annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is Union or isinstance(annotation, types.UnionType):
        members = typing.get_args(annotation)
        # Objects that no value of a config can stand for are not named
        plain = [
            member
            for member in members
            if member is not type(None)
            and not (isinstance(member, type) and _name(member) in OBJECTS)
        ]
        return " or ".join(
            dict.fromkeys(
                filter(
                    None,
                    map(
                        describe_type,
                        [member for member in members if member in plain or member is type(None)]
                        if plain
                        else members,
                    ),
                )
            )
        )
    if typing.get_origin(annotation) is Literal:
        return "one of: " + ", ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of: " + ", ".join(annotation.__members__)
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(
        annotation
    )
    if name:
        return name
    return (
        annotation.__qualname__
        if isinstance(annotation, type) and not typing.get_args(annotation)
        else str(annotation).replace("typing.", "").replace("collections.abc.", "")
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fits_class(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    # bool is a subclass of int in Python
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is str or issubclass(kind, Path):
        return isinstance(value, str)
    if issubclass(kind, enum.Enum):
        # OmegaConf reads `Mode.min` as `min`
        members = kind.__members__
        return (
            not isinstance(value, str)
            or value.removeprefix(f"{kind.__name__}.") in members
            or value in [member.value for member in members.values()]
        )
    if _name(kind) in OBJECTS or any(_name(base) == OBJECTS[1] for base in kind.__mro__):
        return not isinstance(value, str | int | float) and value is not None
    return True


def _fits_sequence(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    # Text is a sequence of texts in Python, but not a list or a tuple
    if isinstance(value, str):
        return origin not in (list, tuple, set) and (not inner or inner[0] in (str, Any))
    if not isinstance(value, list):
        return False
    items = cast(list[Any], value)
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return len(items) == len(inner) and all(
            fits(item, kind) for item, kind in zip(items, inner, strict=True)
        )
    return not inner or all(fits(item, inner[0]) for item in items)


def argument_names(component: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments that a class or function accepts; None if unknown."""
    try:
        parameters = inspect.signature(component).parameters
    except (TypeError, ValueError):
        return None
    further = (
        forwarded_arguments(component)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        else []
    )
    return (
        None
        if further is None
        else [
            *(name for name, parameter in parameters.items() if parameter.kind in NAMED),
            *further,
        ]
    )


def forwarded_arguments(component: Callable[..., Any]) -> list[str] | None:
    """The arguments that torchvision's model functions forward to the class that they return.

    None if unknown.
    """
    returned = evaluate(inspect.signature(component).return_annotation, component)
    if not component.__module__.startswith("torchvision.models.") or not isinstance(returned, type):
        return None
    parameters = inspect.signature(returned).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def is_typed(cfg: DictConfig, path: str) -> bool:
    """Return whether the schema defines the keys at a path and allows no others."""
    kind = OmegaConf.get_type(OmegaConf.select(cfg, path))
    return kind is not None and hasattr(kind, "__dataclass_fields__")


def expected_type(cfg: DictConfig, path: str) -> str:
    """The type of a typed key, in words."""
    parent, _, name = path.rpartition(".")
    owner = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(owner, DictConfig):
        return ""
    if name not in list(owner):
        return ""
    kind = _annotation(path)
    kinds = (
        [member for member in typing.get_args(kind) if member is not type(None)]
        if isinstance(kind, types.UnionType)
        else [kind]
    )
    is_optional, kind = kind is Any or kinds != [kind], kinds[0]
    if hasattr(kind, "__dataclass_fields__"):
        expected = f"a mapping of {', '.join(kind.__dataclass_fields__)}"
    elif inner := typing.get_args(kind)[
        -1:
    ]:  # from dict[str, X] or list[X], the only container types in the schema
        expected = (
            f"a {'list' if typing.get_origin(kind) is list else 'mapping of names to values'}, "
            f"each {describe_type(inner[0]) or 'of any kind'}"
        )
    else:
        expected = describe_type(kind) or "Any"
    return expected + (" or null" if is_optional else "")


def _annotation(path: str) -> Any:
    """Return the schema's annotation of the value at a path."""
    kind: Any = Experiment
    for name in path.split("."):
        hints = typing.get_type_hints(kind) if hasattr(kind, "__dataclass_fields__") else {}
        kind = hints.get(name, typing.get_args(kind)[1] if typing.get_origin(kind) is dict else Any)
    return kind
