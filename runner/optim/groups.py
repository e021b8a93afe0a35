"""Parameter groups by pattern: options of their own, layer-wise learning rates, frozen parts."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_few, nearest
from samewise.runner.optim.frozen import bare_statistics, freeze
from samewise.runner.optim.matching import KINDS, Named, matching, named_parameters
from samewise.runner.optim.schedules.base import whole

REST = "rest"
"""Name of the group of all parameters that no rule matches."""


def parameter_groups(
    model: nn.Module, rules: Mapping[str, Any], *, prefixes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Sort the model's parameters into groups.

    A rule is `{match: PATTERN or list, OPTION: VALUE, ...}`; of several rules that match a
    parameter the first applies. Its options are those of the optimizer and

        lr_factor: NUMBER         multiplies the optimizer's learning rate
        frozen_until: EPOCHS      trains the parameters from this epoch on (`unfreezing`)
        frozen: true              freezes the parameters and the layers' running statistics
        frozen_statistics: train  keeps statistics of frozen layers following the batches

    A rule that freezes must take all that it matches, so that no earlier rule leaves a part of a
    layer trained. One that matches every parameter may freeze the rest.

    A rule `{layer_decay: NUMBER}` takes no parameters. It multiplies each learning rate by the
    number once for every block between the parameter's block and the last one (J. Howard, S. Ruder:
    ULMFiT, arXiv 1801.06146). With `unfreeze_every: EPOCHS`, each block is trained that much later
    than the one behind it (`unfreezing`). The blocks are the model's direct children that have
    parameters; a module that `blocks` names is replaced by its children. A norm, and parameters
    outside of any child (a class token, a position embedding), belong to the block before them, or
    to the first block. For ViTs with a class token and ResNets these are the levels of timm's
    `param_groups_layer_decay`, which counts attention pooling, a norm after average pooling and
    each of two heads as the head.

    Args:
        model: The model. Parameters that a rule freezes get `requires_grad=False`; parameters that
            are frozen already belong to no group.
        rules: Rules by name, in order; `runner.optim.matching` describes the patterns. A rule of
            null is left out.
        prefixes: Only parameters below these go into groups (a phase's share); rules are looked up
            in the whole model.

    Returns:
        One dict a group, in the order of each group's first parameter: `name`, `params` as (name,
        parameter) pairs in the model's order, the rule's options, and `lr_factor` if the learning
        rate is a multiple of the optimizer's.

    Raises:
        ConfigError: A rule is malformed or matches nothing, or nothing is left to train.
    """
    parameters = named_parameters(model)
    share_names = {parameter.name for parameter in named_parameters(model, prefixes)}
    _require_parts(model, prefixes)
    rule_of_parameter, options, factors, _ = _rules(model, rules, parameters)
    groups: dict[tuple[str, float | None], dict[str, Any]] = {}
    for parameter in parameters:
        if parameter.name not in share_names or not parameter.tensor.requires_grad:
            continue
        rule = rule_of_parameter.get(parameter.name, REST)
        factor = factors.get(parameter.name)
        # A group has one learning rate, so layer-wise factors divide a rule's parameters
        group = groups.get((rule, factor))
        if group is None:
            group = groups[rule, factor] = {
                "name": rule,
                "params": [],
                **{
                    key: value
                    for key, value in options.get(rule, {}).items()
                    # No optimizer has this option: `unfreezing` applies it
                    if key != "frozen_until"
                },
            }
            if factor is not None:
                group["name"] = f"{rule} x {factor:.4g}"
                _multiply(group, factor)
        group["params"].append((parameter.name, parameter.tensor))
    place = f" below {', '.join(prefixes)}" if prefixes else ""
    ConfigError.raise_if(
        not groups,
        "param_groups",
        f"no parameter{place} is left to train",
        hint="unfreeze some in param_groups or initialise.frozen",
    )
    return list(groups.values())


def freeze_groups(model: nn.Module, rules: Mapping[str, Any]) -> None:
    """Freeze what the rules freeze, before a strategy splits the model by what is trained.

    Raises:
        ConfigError: As for `parameter_groups`.
    """
    _rules(model, rules, named_parameters(model))


def epochs_frozen(model: nn.Module, rules: Mapping[str, Any]) -> list[tuple[Named, int]]:
    """Return the parameters that are trained later, each with its first epoch.

    The epoch is the rule's `frozen_until`, or the block's.

    Raises:
        ConfigError: As for `parameter_groups`.
    """
    parameters = named_parameters(model)
    rule_of_parameter, options, _, waits = _rules(model, rules, parameters)
    first_epochs = [
        (
            parameter,
            options.get(rule_of_parameter.get(parameter.name, REST), {}).get(
                "frozen_until", waits.get(parameter.name, 0)
            ),
        )
        for parameter in parameters
    ]
    return [(parameter, epochs) for parameter, epochs in first_epochs if epochs]


def _require_parts(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Raise a ConfigError for each prefix without parameters in the model."""
    parts = list(dict.fromkeys(x.name.partition(".")[0] for x in named_parameters(model)))
    ConfigError.raise_all(
        Problem(
            "model",
            f"has no part '{prefix}', which the recipe trains",
            type(model).__name__,
            "a model with the parts that the recipe's phases train",
            nearest(prefix, parts),
        )
        for prefix in prefixes
        if not named_parameters(model, [prefix])
    )


def _rules(
    model: nn.Module, rules: Mapping[str, Any], parameters: Sequence[Named]
) -> tuple[dict[str, str], dict[str, dict[str, Any]], dict[str, float], dict[str, int]]:
    """Apply the rules, and freeze what they freeze.

    Returns:
        The name of the rule of each parameter, each rule's options, and by parameter the layer-wise
        factors and first epochs.
    """
    rule_of_parameter: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    factors: dict[str, float] = {}
    waits: dict[str, int] = {}
    problems: list[Problem] = []
    for name, rule in rules.items():
        path = f"param_groups.{name}"
        if rule is None:
            continue
        if not isinstance(rule, Mapping) or ("match" in rule) == ("layer_decay" in rule):
            problems.append(
                Problem(
                    path,
                    "is not a rule for parameter groups",
                    rule,
                    "{match: PATTERN, OPTION: VALUE, ...} or {layer_decay: NUMBER}",
                )
            )
            continue
        settings = {str(key): value for key, value in cast("Mapping[str, Any]", rule).items()}
        try:
            if "match" in settings:
                options[name] = settings
                problems += _apply_rule(name, settings, model, parameters, rule_of_parameter)
            elif factors:
                layered = [
                    x for x, y in rules.items() if isinstance(y, Mapping) and "layer_decay" in y
                ]
                problems.append(
                    Problem(
                        path,
                        f"is a second layer-wise decay: '{layered[0]}' is one",
                        rule,
                        "one",
                        f"~param_groups.{layered[0]} removes the first",
                    )
                )
            else:
                factors, waits = _block_settings(settings, parameters, path)
        except ConfigError as error:
            # Every wrong rule is reported at once
            problems.extend(error.problems)
    ConfigError.raise_all(problems)
    return rule_of_parameter, options, factors, waits


def _apply_rule(
    name: str,
    settings: dict[str, Any],
    model: nn.Module,
    parameters: Sequence[Named],
    rule_of_parameter: dict[str, str],
) -> list[Problem]:
    """Give a rule what it matches and no earlier rule has, and freeze it as the rule says.

    Afterwards `settings` has the rule's options alone.
    """
    path = f"param_groups.{name}"
    frozen, statistics = (settings.pop(key, None) for key in ("frozen", "frozen_statistics"))
    candidates = [*parameters, *bare_statistics(model)] if frozen is True else parameters
    matches = matching(settings.pop("match"), candidates, path=f"{path}.match")
    own_matches = [x for x in matches if rule_of_parameter.setdefault(x.name, name) == name]
    problems = _option_problems(settings, frozen, statistics, path)
    if (
        (frozen is True or "frozen_until" in settings)
        and len(own_matches) < len(matches)
        # A rule for everything may freeze the rest
        and not {x.name for x in parameters} <= {x.name for x in matches}
    ):
        problems.append(
            _not_frozen_problem(
                [x.name for x in matches if rule_of_parameter[x.name] != name],
                rule_of_parameter,
                path,
            )
        )
    if frozen is True:
        freeze(
            model,
            own_matches,
            path=f"{path}.frozen_statistics",
            statistics="freeze" if statistics is None else statistics,
        )
    return problems


def _option_problems(
    settings: Mapping[str, Any], frozen: object, statistics: object, path: str
) -> list[Problem]:
    """Describe the first wrong option of a rule at `path`, if there is one."""
    until, factor = settings.get("frozen_until", 1), settings.get("lr_factor", 1.0)
    rules = [
        (
            statistics is not None and frozen is not True,
            Problem(
                f"{path}.frozen_statistics",
                "has no effect: the rule does not freeze anything",
                statistics,
                "frozen: true in the same rule",
            ),
        ),
        (
            not isinstance(frozen, bool | None),
            Problem(f"{path}.frozen", "is neither true nor false", frozen, "true or false"),
        ),
        (
            not whole(until, least=1) or (frozen and "frozen_until" in settings),
            Problem(
                f"{path}.frozen_until",
                "is not a valid number of epochs",
                until,
                "at least 1, in a rule without frozen: true",
            ),
        ),
        (
            not _is_factor(factor),
            Problem(f"{path}.lr_factor", "is not a valid factor", factor, "a number of at least 0"),
        ),
        (
            {"lr", "lr_factor"} <= settings.keys(),
            Problem(path, "gives both lr and lr_factor", expected="one of them"),
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken][:1]


def _not_frozen_problem(
    names: Sequence[str], rule_of_parameter: Mapping[str, str], path: str
) -> Problem:
    """Describe a rule that cannot freeze all it matches, as an earlier rule matches a part."""
    earlier = ", ".join(dict.fromkeys(f"'{rule_of_parameter[name]}'" for name in names))
    return Problem(
        path,
        f"would not freeze all that it matches: {earlier} comes first and matches "
        f"{first_few(names, 3)}",
        hint="put this rule first, or leave them out of its pattern; match: '*' matches all that "
        "no earlier rule matches",
    )


def _block_settings(
    rule: Mapping[str, Any], parameters: Sequence[Named], path: str
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the learning rate factor of each parameter, and the epoch from which it is trained."""
    decay, pause, opened_modules = (
        rule["layer_decay"],
        rule.get("unfreeze_every", 0),
        rule.get("blocks") or [],
    )
    ConfigError.raise_if(
        set(rule) - {"layer_decay", "unfreeze_every", "blocks"} or not _is_factor(decay),
        path,
        "is not a layer-wise decay",
        dict(rule),
        "{layer_decay: NUMBER}, with a number of at least 0, usually below 1; optionally "
        "also unfreeze_every and blocks",
    )
    ConfigError.raise_if(
        isinstance(pause, bool)
        or not isinstance(pause, int)
        or pause < (1 if "unfreeze_every" in rule else 0),
        f"{path}.unfreeze_every",
        "is not a valid number of epochs",
        pause,
        "a whole number of at least 1",
    )
    opened_modules = [opened_modules] if isinstance(opened_modules, str) else list(opened_modules)
    modules = dict.fromkeys(
        parameter.name[:place]
        for parameter in parameters
        for place in range(len(parameter.name))
        if parameter.name[place] == "."
    )
    ConfigError.raise_all(
        Problem(
            f"{path}.blocks",
            "is not a module with parameters",
            name,
            hint=nearest(str(name), modules),
        )
        for name in opened_modules
        if name not in modules
    )
    blocks_behind, blocks = dict[str, int](), _blocks(parameters, opened_modules)
    for number, (_, names) in enumerate(blocks, start=1):
        blocks_behind |= dict.fromkeys(names, len(blocks) - number)
    return {name: decay**count for name, count in blocks_behind.items()}, {
        name: pause * count for name, count in blocks_behind.items()
    }


def _blocks(
    parameters: Sequence[Named], opened_modules: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return the blocks in the order of the model's parameters, each with its parameters' names."""
    parts = list[tuple[str, list[Named]]]()
    for parameter in parameters:
        inside = max(
            (f"{name}." for name in opened_modules if parameter.name.startswith(f"{name}.")),
            key=len,
            default="",
        )
        key = inside + parameter.name.removeprefix(inside).partition(".")[0]
        if not parts or parts[-1][0] != key:
            parts.append((key, []))
        parts[-1][1].append(parameter)
    blocks = list[tuple[str, list[str]]]()
    # Whether the last block has more than norms and parameters outside of any child
    is_complete = False
    for key, members in parts:
        is_slight = all(
            isinstance(x.module, KINDS["norm"]) or _is_bare(x.name, opened_modules) for x in members
        )
        if not blocks or (is_complete and not is_slight):
            blocks.append((key, []))
        # A block that began with norms alone is named after the child that completes it
        elif not is_slight:
            blocks[-1] = key, blocks[-1][1]
        blocks[-1][1].extend(x.name for x in members)
        is_complete = is_complete or not is_slight
    return blocks


def _is_bare(name: str, opened_modules: Sequence[str]) -> bool:
    """Return whether a parameter is the model's own, or of a module around an opened one."""
    parent = name.rpartition(".")[0]
    return not parent or any(x.startswith(f"{parent}.") for x in opened_modules)


def _multiply(group: dict[str, Any], factor: float) -> None:
    # A rule's own rate is multiplied here, the optimizer's rate in `build`
    if "lr" in group:
        group["lr"] *= factor
    else:
        group["lr_factor"] = group.get("lr_factor", 1.0) * factor


def _is_factor(factor: object) -> bool:
    return isinstance(factor, int | float) and not isinstance(factor, bool) and factor >= 0
