"""A component's arguments as JSON Schema: names, types and descriptions (see `annotations`)."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from samewise.runner.config.annotations import (
    ANY,
    PART,
    Schema,
    evaluate,
    forwarded_arguments,
    schema_of,
)
from samewise.runner.errors import truncate

DEFAULTS: Schema = {"type": "array"}
"""Hydra's list of what a file builds on; what it may name, the schema of the file says."""
SHARED: dict[str, Schema] = {
    "any": {
        "if": {"type": "object", "required": ["_target_"]},
        "then": PART,
        "else": {"additionalProperties": ANY, "items": ANY},
    },
    "reference": {"type": "string", "pattern": r"\$\{|^\?\?\?$"},
}
"""Definitions that these lead to."""

UNDESCRIBED = {
    "aux_logits": "Whether to have auxiliary outputs, as published "
    "weights do; samewise trains without "
    "them.",
    "drop_rate": "The share of values that dropout sets to zero after each layer.",
    "dropout": "The share of values that dropout sets to zero before the last layer.",
    "groups": "Into how many groups the channels of a block's 3x3 convolution are divided.",
    "image_size": "The height and width of the images.",
    "init_weights": "Whether to draw the initial weights as the paper does; "
    "otherwise layers keep torch's.",
    "input_size": "The height and width of the images.",
    "norm_layer": "The class of the normalisation layers.",
    "num_classes": "The number of outputs, one for each class.",
    "stochastic_depth_prob": "The probability of skipping the last block in "
    "training; earlier blocks are skipped "
    "less often.",
    "transform_input": "Whether images that are normalised for ImageNet are "
    "normalised to [-1, 1] instead, as "
    "the published weights need.",
    "width_per_group": "The channels of each group in the first stage's 3x3 "
    "convolutions, of a base of 64.",
    "zero_init_residual": "Whether each block begins as the identity: the scale "
    "of its last normalisation is 0.",
}
"""Arguments of torchvision's models that no docstring of theirs describes."""


def call_schema(component: Callable[..., Any]) -> Schema:
    """A component's mapping: the arguments that a class or function accepts."""
    about, described = description(component), arguments(component)
    schema: Schema = {"type": "object", "properties": {}, "additionalProperties": False} | (
        {"description": about} if about else {}
    )
    try:
        parameters = inspect.signature(component).parameters.values()
    except (TypeError, ValueError):  # its arguments are unknown
        return schema | {"additionalProperties": ANY}
    for parameter in parameters:
        if parameter.name == "params" and re.match(
            r"(torch|samewise\.runner)\.optim\.", f"{component.__module__}."
        ):
            continue  # come from the model
        if parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            argument = schema_of(evaluate(parameter.annotation, component))
            # An argument with the default None takes null, whatever its annotation says
            if parameter.default is None and "anyOf" in argument:
                argument = {"anyOf": [*argument["anyOf"], {"type": "null"}]}
            elif parameter.default is None and argument == {"type": "string"}:
                argument = {"type": ["string", "null"]}
            text = described.get(parameter.name, "")
            schema["properties"][parameter.name] = (
                argument | default_of(parameter.default) | ({"description": text} if text else {})
            )
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            further = forwarded_arguments(component)
            names = {*(described if further is None else further)} - {
                parameter.name,
                *schema["properties"],
            }
            schema["properties"] |= {
                name: ANY | ({"description": described[name]} if name in described else {})
                for name in sorted(names)
            }
            schema["additionalProperties"] = ANY if further is None else False
    schema["properties"] |= {
        "_target_": {"type": "string"},
        "_partial_": {"type": "boolean"},
        "_args_": {"type": "array", "items": ANY},
        "defaults": DEFAULTS,
    }
    return schema


def description(component: Any) -> str:
    """The first paragraph of a docstring."""
    return _join_lines((inspect.getdoc(component) or "").partition("\n\n")[0])


def arguments(component: Any) -> dict[str, str]:
    """Return descriptions of arguments: of a class and its bases, or a function and its product.

    The nearest counts.
    """
    returned = (
        component
        if isinstance(component, type)
        else evaluate(inspect.signature(component).return_annotation, component)
    )
    documented = [component, *(returned.__mro__ if isinstance(returned, type) else ())]
    described = dict[str, str]()
    if component.__module__.startswith("torchvision.models."):
        described |= {
            name: text
            for name, text in UNDESCRIBED.items()
            if name in inspect.signature(returned).parameters
        }
    # The nearest docstring counts, so it comes last
    for owner in reversed(documented):
        described |= _described(inspect.cleandoc(owner.__doc__ or ""))
    for name, text in described.items():
        if (elsewhere := re.match(r"As in `(\w+)`", text)) and (
            other := vars(sys.modules[component.__module__]).get(elsewhere[1])
        ):
            described[name] = arguments(other)[name]
    return described


def _described(docstring: str) -> dict[str, str]:
    """The arguments in a docstring of Google's or torch's style."""
    section = re.search(
        r"^(?:Args|Arguments|Parameters):[ ]*\n((?:[ ]+\S.*\n|\s*\n)+)",
        docstring + "\n",
        re.MULTILINE,
    )
    if section is None:
        return {}
    indent = re.match(r" *", section[1])
    read = [
        re.match(r"\*{0,2}(\w+(?:, \w+)*)\s*(?:\(.*?\))?\s*:(.*)", entry, re.DOTALL)
        for entry in re.split(
            rf"^ {{{len(indent[0]) if indent else 4}}}(?=\S)", section[1], flags=re.MULTILINE
        )
    ]
    return {name: _join_lines(match[2]) for match in read if match for name in match[1].split(", ")}


def default_of(value: Any) -> Schema:
    """An argument's default, where JSON can hold it."""
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def _join_lines(text: str) -> str:
    return truncate(" ".join(text.split()), 300)


def closed_object(properties: Mapping[str, Any], **further: Any) -> Schema:
    """A mapping with these keys and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    } | further
