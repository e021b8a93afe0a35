"""Parameter groups by pattern: options that differ from the optimizer's, layer-wise learning rates,
frozen parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_few, nearest
from samewise.runner.optim.frozen import bare_statistics, freeze
from samewise.runner.optim.matching import KINDS, Named, matching, named_parameters

REST = "rest"
"""The name of the group of everything that no rule matches."""


def parameter_groups(
    model: nn.Module, rules: Mapping[str, Any], *, prefixes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Sort the model's parameters into groups.

    If several rules match a parameter, the first one applies.

    A rule is `{match: PATTERN or list, OPTION: VALUE, ...}`: any option of the optimizer,
    `lr_factor`, `frozen_until: EPOCHS` (`unfreezing`) or `frozen: true`, which freezes the layers'
    running statistics too, unless it says `frozen_statistics: train`. One that freezes must take
    all that it matches, unless that is every parameter: then it freezes the rest. Or it is
    `{layer_decay: NUMBER}`, which takes no parameters but multiplies each learning rate by the
    number once for every block between it and the last one (J. Howard, S. Ruder: ULMFiT, arXiv
    1801.06146). With `unfreeze_every: EPOCHS` beside it each block waits so long for the one behind
    it (`unfreezing`). The blocks are the model's direct children that have parameters, and in the
    place of a module that `blocks` names each of its children. A norm, or parameters that no such
    child holds (a class token, a position embedding), belong to the block before them, or if there
    is none to the one after: for ViTs with a class token, and ResNets, these are the levels of
    timm's `param_groups_layer_decay`, which counts attention pooling, a norm after average pooling
    and each of two heads as the head.

    Returns one dict a group, in the order of each group's first parameter: `name`, `params` as
    (name, parameter) pairs in the model's order, the rule's options, and `lr_factor` if the
    learning rate is a multiple of the optimizer's. ConfigError if a rule is malformed or matches
    nothing, or nothing is left to train.

    Args:
        model: Its parameters that a rule freezes get `requires_grad=False`; those that already are
            frozen belong to no group.
        rules: By name, in order; `runner.optim.matching` describes the patterns. A rule of null is
            left out.
        prefixes: Only parameters below these go into groups (a phase's share); rules are looked up
            in the whole model.
    """
    every = named_parameters(model)
    share = {one.name for one in named_parameters(model, prefixes)}
    _require_parts(model, prefixes)
    taken, options, factors, _ = _rules(model, rules, every)
    groups: dict[tuple[str, float | None], dict[str, Any]] = {}
    for one in every:
        if one.name not in share or not one.parameter.requires_grad:
            continue
        rule = taken.get(one.name, REST)
        factor = factors.get(one.name)
        group = groups.get((rule, factor))
        if group is None:
            group = groups[rule, factor] = {
                "name": rule,
                "params": [],
                **{
                    key: value
                    for key, value in options.get(rule, {}).items()
                    if key != "frozen_until"
                },
            }
            if factor is not None:
                group["name"] = f"{rule} x {factor:.4g}"
                _multiply(group, factor)
        group["params"].append((one.name, one.parameter))
    if not groups:
        where = f" below {', '.join(prefixes)}" if prefixes else ""
        hint = "unfreeze some in param_groups or initialise.frozen"
        raise ConfigError(
            Problem("param_groups", f"no parameter{where} is left to train", hint=hint)
        )
    return list(groups.values())


def freeze_groups(model: nn.Module, rules: Mapping[str, Any]) -> None:
    """Freeze what the rules freeze, before a strategy splits the model by what is trained.

    Raises as `parameter_groups` does.
    """
    _rules(model, rules, named_parameters(model))


def epochs_frozen(model: nn.Module, rules: Mapping[str, Any]) -> list[tuple[Named, int]]:
    """The parameters that are trained later, each with its epoch: its rule's `frozen_until`, or its
    block's. Raises as `parameter_groups` does.
    """
    every = named_parameters(model)
    taken, options, _, waits = _rules(model, rules, every)
    found = [
        (
            one,
            options.get(taken.get(one.name, REST), {}).get("frozen_until", waits.get(one.name, 0)),
        )
        for one in every
    ]
    return [(one, epochs) for one, epochs in found if epochs]


def _require_parts(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Raise a ConfigError for each prefix without parameters in the model."""
    parts = list(dict.fromkeys(one.name.partition(".")[0] for one in named_parameters(model)))
    missing = [prefix for prefix in prefixes if not named_parameters(model, [prefix])]
    if missing:
        kind, expected = (
            type(model).__name__,
            "a model with the parts that the recipe's phases train",
        )
        raise ConfigError(
            *(
                Problem(
                    "model",
                    f"has no part '{prefix}', which the recipe trains",
                    kind,
                    expected,
                    nearest(prefix, parts),
                )
                for prefix in missing
            )
        )


def _rules(
    model: nn.Module, rules: Mapping[str, Any], every: Sequence[Named]
) -> tuple[dict[str, str], dict[str, dict[str, Any]], dict[str, float], dict[str, int]]:
    """Which rule applies to each parameter, each rule's options, and by parameter the layer-wise
    factors and epochs; freezes what the rules freeze.
    """
    taken: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    factors: dict[str, float] = {}
    waits: dict[str, int] = {}
    problems: list[Problem] = []
    for name, rule in rules.items():
        path = f"param_groups.{name}"
        if rule is None:
            continue
        if not isinstance(rule, Mapping) or ("match" in rule) == ("layer_decay" in rule):
            expected = "{match: PATTERN, OPTION: VALUE, ...} or {layer_decay: NUMBER}"
            problems.append(Problem(path, "is not a rule for parameter groups", rule, expected))
            continue
        settings = {str(key): value for key, value in cast("Mapping[str, Any]", rule).items()}
        try:
            if "layer_decay" in settings and factors:
                first = next(
                    other
                    for other, rule in rules.items()
                    if isinstance(rule, Mapping) and "layer_decay" in rule
                )
                problems.append(
                    Problem(
                        path,
                        f"is a second layer-wise decay: '{first}' is one",
                        rule,
                        "one",
                        f"~param_groups.{first} removes the first",
                    )
                )
                continue
            if "layer_decay" in settings:
                factors, waits = _block_settings(settings, every, path)
                continue
            frozen, statistics = (
                settings.pop("frozen", False),
                settings.pop("frozen_statistics", None),
            )
            found = matching(
                settings.pop("match"),
                [*every, *bare_statistics(model)] if frozen is True else every,
                path=f"{path}.match",
            )
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if statistics is not None and frozen is not True:
            problems.append(
                Problem(
                    f"{path}.frozen_statistics",
                    "has no effect: the rule does not freeze anything",
                    statistics,
                    "frozen: true in the same rule",
                )
            )
        elif not isinstance(frozen, bool):
            problems.append(
                Problem(f"{path}.frozen", "is neither true nor false", frozen, "true or false")
            )
        elif (
            (until := settings.get("frozen_until", 1)) is True
            or not isinstance(until, int)
            or until < 1
            or (frozen and "frozen_until" in settings)
        ):
            problems.append(
                Problem(
                    f"{path}.frozen_until",
                    "is not a valid number of epochs",
                    until,
                    "at least 1, in a rule without frozen: true",
                )
            )
        elif "lr_factor" in settings and not _possible(settings["lr_factor"]):
            problems.append(
                Problem(
                    f"{path}.lr_factor",
                    "is not a valid factor",
                    settings["lr_factor"],
                    "a number of at least 0",
                )
            )
        elif "lr" in settings and "lr_factor" in settings:
            problems.append(Problem(path, "gives both lr and lr_factor", expected="one of them"))
        options[name] = settings
        mine = [one for one in found if taken.setdefault(one.name, name) == name]
        if (
            (frozen is True or "frozen_until" in settings)
            and len(mine) < len(found)
            and not {one.name for one in every} <= {one.name for one in found}
        ):
            problems.append(
                _not_frozen_problem(
                    [one.name for one in found if taken[one.name] != name], taken, path
                )
            )
        if frozen is True:
            freeze(
                model,
                mine,
                path=f"{path}.frozen_statistics",
                statistics="freeze" if statistics is None else statistics,
            )
    if problems:
        raise ConfigError(*problems)
    return taken, options, factors, waits


def _not_frozen_problem(names: Sequence[str], taken: Mapping[str, str], path: str) -> Problem:
    """The problem of a layer that would be frozen except for its norms or biases, because an
    earlier rule matches those.
    """
    earlier = ", ".join(dict.fromkeys(f"'{taken[name]}'" for name in names))
    hint = (
        "put this rule first, or leave them out of its pattern; match: '*' matches all that no "
        "earlier rule matches"
    )
    return Problem(
        path,
        f"would not freeze all that it matches: {earlier} comes first and matches "
        f"{first_few(names, 3)}",
        hint=hint,
    )


def _block_settings(
    rule: Mapping[str, Any], every: Sequence[Named], path: str
) -> tuple[dict[str, float], dict[str, int]]:
    """The learning rate factor of each parameter, and the epoch from which it is trained."""
    decay, pause, opened = (
        rule["layer_decay"],
        rule.get("unfreeze_every", 0),
        rule.get("blocks") or [],
    )
    if set(rule) - {"layer_decay", "unfreeze_every", "blocks"} or not _possible(decay):
        expected = (
            "{layer_decay: NUMBER}, with a number of at least 0, usually below 1; optionally "
            "also unfreeze_every and blocks"
        )
        raise ConfigError(Problem(path, "is not a layer-wise decay", dict(rule), expected))
    if (
        isinstance(pause, bool)
        or not isinstance(pause, int)
        or pause < (1 if "unfreeze_every" in rule else 0)
    ):
        raise ConfigError(
            Problem(
                f"{path}.unfreeze_every",
                "is not a valid number of epochs",
                pause,
                "a whole number of at least 1",
            )
        )
    opened = [opened] if isinstance(opened, str) else list(opened)
    modules = dict.fromkeys(
        one.name[:place]
        for one in every
        for place in range(len(one.name))
        if one.name[place] == "."
    )
    if wrong := [name for name in opened if name not in modules]:
        raise ConfigError(
            *(
                Problem(
                    f"{path}.blocks",
                    "is not a module with parameters",
                    name,
                    hint=nearest(str(name), modules),
                )
                for name in wrong
            )
        )
    behind, blocks = dict[str, int](), _blocks(every, opened)
    for number, (_, names) in enumerate(blocks, start=1):
        behind |= dict.fromkeys(names, len(blocks) - number)
    return {name: decay**count for name, count in behind.items()}, {
        name: pause * count for name, count in behind.items()
    }


def _blocks(every: Sequence[Named], opened: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The blocks in the order of the model's parameters, each with its name and its parameters'."""
    parts = list[tuple[str, list[Named]]]()
    for one in every:
        inside = max(
            (f"{name}." for name in opened if one.name.startswith(f"{name}.")), key=len, default=""
        )
        key = inside + one.name.removeprefix(inside).partition(".")[0]
        if not parts or parts[-1][0] != key:
            parts.append((key, []))
        parts[-1][1].append(one)
    # Whether the last one found is more than norms and the like
    found, whole = (
        list[tuple[str, list[str]]](),
        False,
    )
    for key, those in parts:
        slight = all(
            isinstance(one.module, KINDS["norm"]) or _is_bare(one.name, opened) for one in those
        )
        if not found or (whole and not slight):
            found.append((key, []))
        elif not slight:
            found[-1] = key, found[-1][1]
        found[-1][1].extend(one.name for one in those)
        whole = whole or not slight
    return found


def _is_bare(name: str, opened: Sequence[str]) -> bool:
    """Whether a parameter is the model's own, or that of a module around one in `opened`, rather
    than a block's.
    """
    around = name.rpartition(".")[0]
    return not around or any(one.startswith(f"{around}.") for one in opened)


def ranked_blocks(model: nn.Module, rules: Mapping[str, Any]) -> list[str]:
    """The names of the blocks that a rule of `layer_decay` ranks, from the input to the output as
    it takes them to be; none without such a rule.
    """
    rule = next(
        (rule for rule in rules.values() if isinstance(rule, Mapping) and "layer_decay" in rule),
        None,
    )
    opened = (rule or {}).get("blocks") or []
    return (
        []
        if rule is None
        else [
            name
            for name, _ in _blocks(
                named_parameters(model), [opened] if isinstance(opened, str) else list(opened)
            )
        ]
    )


def _multiply(group: dict[str, Any], factor: float) -> None:
    if "lr" in group:
        group["lr"] *= factor
    else:
        group["lr_factor"] = group.get("lr_factor", 1.0) * factor


def _possible(factor: object) -> bool:
    return isinstance(factor, int | float) and not isinstance(factor, bool) and factor >= 0
