"""Rules for components: each `_target_` is allowed, and its arguments match its signature.

Nothing is called.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from samewise.runner.config.annotations import NAMED, argument_names, describe_type, evaluate, fits
from samewise.runner.config.instantiate import SPECIAL, locate
from samewise.runner.config.project import Project
from samewise.runner.config.tree import at
from samewise.runner.errors import ConfigError, Problem, nearest

Node = Mapping[str, Any]

REQUIRED = (
    "recipe",
    "model",
    "scheduler",
    "precision",
    "strategy",
    "dataset.train",
    "dataset.valid",
)
"""What must be a component."""

NO_SUCH_ARGUMENT, WRONG_TYPE = "has no such argument", "wrong type"


def problems_in(part: Node, project: Project) -> list[Problem]:
    """Problems of the components under some keys of a plain config."""
    return list(_problems_below(part, "", project.packages))


def required_are_there(whole: Node) -> Iterator[Problem]:
    for path in REQUIRED:
        node = at(whole, path, "???")
        if node != "???" and not (isinstance(node, Mapping) and "_target_" in node):
            yield Problem(
                path,
                "is not a component",
                node,
                "a mapping with a _target_",
                f"`samewise list {path.split('.')[0]}` shows the choices",
            )
    for path in (
        "transforms.train.sample",
        "transforms.train.batch",
        "transforms.eval.sample",
        "transforms.eval.batch",
    ):
        node = at(whole, path, "???")
        listed = isinstance(node, list) and all(
            isinstance(item, Mapping) or _is_unresolved(item) for item in node
        )
        if not listed and node is not None and not _is_unresolved(node):
            yield Problem(
                path,
                "is not a list of transforms",
                node,
                "a list of mappings with a _target_; [] for none",
            )
    callbacks = whole.get("callbacks")
    for name, node in (cast(Node, callbacks) if isinstance(callbacks, Mapping) else {}).items():
        # Settings of a callback that was not chosen
        if isinstance(node, Mapping) and "_target_" not in node:
            yield Problem(
                f"callbacks.{name}",
                "is not a component",
                node,
                "a mapping with a _target_",
                f"`callbacks=[default,{name}]` chooses it, `~callbacks.{name}` removes its settings",
            )
    optimizer = whole.get("optimizer")
    if (
        isinstance(optimizer, Mapping)
        and "_target_" in optimizer
        and (phases := _phase_keys(cast(Node, optimizer)))
    ):
        yield Problem(
            "optimizer",
            f"mixes one optimizer for everything with one for each of: {', '.join(phases)}",
            optimizer["_target_"],
            "one or the other",
            f"`optimizer@optimizer.{phases[0]}=CHOICE` chooses the optimizer of one phase",
        )
    elif isinstance(optimizer, Mapping) and "_target_" not in optimizer:
        several = cast(Node, optimizer).values()
        if not several or not all(
            isinstance(item, Mapping) and "_target_" in item for item in several
        ):
            yield Problem(
                "optimizer",
                "is not a component",
                optimizer,
                "a mapping with a _target_, or several of them by phase",
                "`samewise list optimizer` shows the choices",
            )


def _phase_keys(optimizer: Node) -> list[str]:
    """The keys of the optimizer's node that contain an optimizer for one phase."""
    return [
        name for name, node in optimizer.items() if isinstance(node, Mapping) and "_target_" in node
    ]


def _problems_below(node: Any, path: str, packages: Sequence[str]) -> Iterator[Problem]:
    """The problems of a node and of everything below it."""
    if isinstance(node, Mapping):
        mapping = cast(Node, node)
        # A missing target is reported by `settings.nothing_is_missing`
        if "_target_" in mapping and mapping["_target_"] != "???":
            yield from _component_problems(mapping, path, packages)
        for key, part in mapping.items():
            yield from _problems_below(part, f"{path}.{key}" if path else key, packages)
    elif isinstance(node, list):
        for index, part in enumerate(cast(list[Any], node)):
            yield from _problems_below(part, f"{path}.{index}", packages)


def _component_problems(node: Node, path: str, packages: Sequence[str]) -> Iterator[Problem]:
    try:
        component = locate(node["_target_"], path, packages)
    except ConfigError as error:
        yield from error.problems
        return
    try:
        parameters = inspect.signature(component).parameters
    except (TypeError, ValueError):  # its arguments are unknown
        return
    yield from _unknown_arguments(node, path, component)
    yield from _missing_arguments(node, path, component, parameters)
    yield from _mistyped_arguments(node, path, component, parameters)


def _unknown_arguments(node: Node, path: str, component: Callable[..., Any]) -> Iterator[Problem]:
    names = argument_names(component)
    if names is None:
        return
    phases = _phase_keys(node) if path == "optimizer" else []
    for key, value in node.items():
        if key not in names and key not in SPECIAL and key not in phases:
            # An optimizer's `params` come from the model, never from a config
            alike = nearest(key, (name for name in names if name != "params")) or "it takes none"
            remove = f"leave it out, or remove it with ~{path}.{key}"
            yield Problem(
                f"{path}.{key}",
                f"{component.__qualname__} {NO_SUCH_ARGUMENT}",
                value,
                hint=f"{alike} Or {remove}"
                if alike.startswith("did you mean")
                else f"{remove}; {alike}",
            )


def _missing_arguments(
    node: Node,
    path: str,
    component: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
) -> Iterator[Problem]:
    # The other arguments are given when the partial is called
    if node.get("_partial_", False):
        return
    if path == "loader.order":
        yield Problem(
            path,
            "lacks _partial_: true, since samewise itself gives it the data set and the seed",
            hint=f"+{path}._partial_=true",
        )
        return
    positional = len(node.get("_args_") or ())
    for place, (name, parameter) in enumerate(parameters.items()):
        if (
            parameter.kind in NAMED
            and parameter.default is inspect.Parameter.empty
            and name not in node
            and place >= positional
        ):
            yield Problem(
                f"{path}.{name}",
                f"{component.__qualname__} needs this argument",
                expected=describe_type(evaluate(parameter.annotation, component)),
                hint=f"+{path}.{name}=VALUE",
            )


def _mistyped_arguments(
    node: Node,
    path: str,
    component: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
) -> Iterator[Problem]:
    for name, parameter in parameters.items():
        if (
            parameter.kind in NAMED
            and name in node
            and name not in SPECIAL
            and not _is_unresolved(node[name])
        ):
            annotation = evaluate(parameter.annotation, component)
            # `width: int = None` takes null, though its annotation does not say so
            if not fits(node[name], annotation) and not (
                parameter.default is None and node[name] is None
            ):
                yield Problem(f"{path}.{name}", WRONG_TYPE, node[name], describe_type(annotation))


def _is_unresolved(value: Any) -> bool:
    """Return whether a value is missing or an unresolvable interpolation, which others report."""
    return isinstance(value, str) and (value == "???" or "${" in value)
