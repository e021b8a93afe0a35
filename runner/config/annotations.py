"""Signatures as a config sees them: argument names, and whether a value fits an annotation.

Only what is surely wrong is refused.

typeguard's `check_type` does not serve here: it judges Python values, and a config's value has yet
to become one: a list for a tuple, text for a Path or an enum, a mapping with a `_target_` for any
object; and `true` is not a whole number.
"""

import collections.abc
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

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


Schema = dict[str, Any]

REFERENCE: Schema = {"$ref": "#/definitions/reference"}
"""What may stand for any value: an interpolation, or `???` for what another file or the command
line gives."""
ANY: Schema = {"$ref": "#/definitions/any"}
"""A value of which nothing is known but that the components in it are components."""
PART: Schema = {"$ref": "#/definitions/part"}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "null": (type(None),),
}
"""Python's types of a config's scalars, by their names in JSON Schema."""


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
        return annotation not in (int, float, bool, str)
    return _is_valid(value, _schema_of(annotation))


def _is_valid(value: Any, schema: Schema) -> bool:
    """Return whether a value fits a schema that `schema_of` makes, as far as that can be wrong."""
    if schema == ANY or "additionalProperties" in schema:
        return schema == ANY or isinstance(value, Mapping)
    if schema == PART:
        return not isinstance(value, str | int | float | list | None)
    if "anyOf" in schema:
        return any(_is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        # OmegaConf reads `Mode.min` as `min`
        name = value.rpartition(".")[2] if isinstance(value, str) else value
        return value in schema["enum"] or name in schema["enum"]
    if schema == REFERENCE:
        return isinstance(value, str) and ("${" in value or value == "???")
    if schema["type"] != "array":
        kinds = _KINDS[schema["type"]]
        # bool is a subclass of int in Python
        return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    items: Any = schema["items"]
    if not isinstance(value, list) or len(value) != schema.get("maxItems", len(value)):
        return False
    each = items if isinstance(items, list) else [items] * len(value)
    return all(map(_is_valid, value, each))


def schema_of(annotation: Any) -> Schema:
    """The JSON Schema of an annotation's values, and of what may replace them."""
    inner = _schema_of(annotation)
    return (
        inner
        if inner in (ANY, {"type": "string"})
        else _any_of([*inner.get("anyOf", [inner]), REFERENCE])
    )


def _any_of(several: list[Schema]) -> Schema:
    return {
        "anyOf": [schema for place, schema in enumerate(several) if schema not in several[:place]]
    }


def _schema_of(annotation: Any) -> Schema:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Union or isinstance(annotation, types.UnionType):
        several = [_schema_of(item) for item in inner]
        return (
            ANY
            if ANY in several
            else _any_of([part for item in several for part in item.get("anyOf", [item])])
        )
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is typing.Annotated:
        return _schema_of(inner[0])
    if annotation is None or annotation is type(None):
        return {"type": "null"}
    kind = origin or annotation
    if not isinstance(kind, type):
        return ANY
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if issubclass(kind, Path):
        return {"type": "string"}
    if issubclass(kind, enum.Enum):
        return {
            "enum": list(
                dict.fromkeys(
                    item
                    for member in kind
                    for item in (member.name, member.value)
                    if isinstance(item, str | int | float)
                )
            )
        }
    if kind in _SEQUENCES:
        # Text is a sequence of texts in Python, but not a list or a tuple
        is_text = kind not in (list, tuple, set) and (not inner or inner[0] in (str, Any))
        return {"anyOf": [_sequence(kind, inner), PART, *([{"type": "string"}] if is_text else [])]}
    if kind in _MAPPINGS:
        return {
            "type": "object",
            "additionalProperties": schema_of(inner[1]) if len(inner) == 2 else ANY,
        }
    if kind is collections.abc.Callable or any(
        f"{base.__module__}.{base.__qualname__}" in OBJECTS for base in kind.__mro__
    ):
        return PART
    return ANY


def _sequence(kind: type, inner: tuple[Any, ...]) -> Schema:
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return {
            "type": "array",
            "items": [schema_of(item) for item in inner],
            "minItems": len(inner),
            "maxItems": len(inner),
        }
    return {"type": "array", "items": schema_of(inner[0]) if inner else ANY}


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
    if not isinstance(owner, DictConfig) or name not in list(owner):
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
