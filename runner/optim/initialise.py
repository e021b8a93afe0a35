"""A model's weights before the first step: by rules, from a file, parametrised, frozen. Computed on the CPU in the `init` stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.optim.frozen import bare_statistics, freeze
from samewise.runner.optim.matching import Named, matching, named_parameters
from samewise.runner.optim.parametrise import parametrise
from samewise.runner.optim.weights import load_weights
from samewise.runner.optim.whitening import Images, whitening_

METHODS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "constant": nn.init.constant_,
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "trunc_normal": nn.init.trunc_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "whitening": whitening_,
}
"""torch.nn.init, with its arguments, and what looks at training images."""

SETTINGS: Final = ("rules", "weights", "sha256", "into", "strict", "exclude", "parametrisations", "frozen", "frozen_statistics")


def initialise(model: nn.Module, settings: Mapping[str, Any], *, made_by: str = "", images: Images | None = None) -> None:
    """Initialise `model` in place: rules, then weights from a file, then parametrisations, then what is frozen.

    ConfigError if a setting is wrong, a pattern matches nothing, or the file does not fit the model.

    Args:
        model: On the CPU. Random methods draw from the default generator, in the model's order of parameters.
        settings: The config's `initialise`; every key may be missing. `rules`: by name (or a list), in order, each
            `{match: PATTERN, weight: METHOD, bias: METHOD}`, a METHOD being a name of `METHODS` or `{method: NAME, ...its arguments}`; each weight and
            bias goes by the first rule that sets it. `weights`, `sha256`, `into`, `strict`, `exclude`: see `weights.load_weights`. `parametrisations`: see
            `parametrise`. `frozen`: patterns of parameters that are not trained; `frozen_statistics`: freeze (if missing) or train, see `frozen.freeze`.
        made_by: The model's `_target_`, whose published weights may be given by a short name.
        images: Training images for the methods that look at some; None: these leave weights as they are, since others are loaded afterwards.
    """
    given: dict[str, Any] = plain(settings) if isinstance(settings, DictConfig) else dict(settings)
    unknown = [Problem(f"initialise.{key}", "no such key", hint=nearest(key, SETTINGS)) for key in given if key not in SETTINGS]
    if unknown:
        raise ConfigError(*unknown)
    _apply_rules(model, given.get("rules") or {}, images)
    load_weights(
        model,
        given.get("weights"),
        sha256=given.get("sha256"),
        into=given.get("into"),
        strict=given.get("strict", True),
        exclude=given.get("exclude") or (),
        parametrise=partial(parametrise, model, given.get("parametrisations") or {}),
        made_by=made_by,
    )
    meant = matching(given["frozen"], [*named_parameters(model), *bare_statistics(model)], path="initialise.frozen") if given.get("frozen") else []
    freeze(model, meant, path="initialise.frozen_statistics", statistics=given.get("frozen_statistics", "freeze"))


def _apply_rules(model: nn.Module, rules: Mapping[str, Any] | Sequence[Any], images: Images | None) -> None:
    named = rules if isinstance(rules, Mapping) else {str(index): rule for index, rule in enumerate(rules)}
    every = named_parameters(model)
    chosen: dict[str, tuple[str, Callable[[Tensor], Any]]] = {}
    problems: list[Problem] = []
    for name, rule in named.items():
        if rule is None:
            continue
        try:
            for one, method in _match_rules(rule, every, f"initialise.rules.{name}"):
                chosen.setdefault(one.name, (str(name), method))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    for one in every:
        if one.name in chosen:
            name, method = chosen[one.name]
            _initialise(one, method, f"initialise.rules.{name}", images)


def _match_rules(rule: Any, every: Sequence[Named], path: str) -> list[tuple[Named, Callable[[Tensor], Any]]]:
    """The parameters that each rule initialises, with the method."""
    expected = "{match: PATTERN, weight: METHOD, bias: METHOD}, with at least one of the methods"
    if not isinstance(rule, Mapping):
        raise ConfigError(Problem(path, "is not a rule", rule, expected))
    keys = cast("Mapping[str, Any]", rule)
    methods = {key: _method(keys[key], f"{path}.{key}") for key in ("weight", "bias") if keys.get(key) is not None}
    if "match" not in keys or not methods or set(keys) - {"match", "weight", "bias"}:
        raise ConfigError(Problem(path, "is not a rule", dict(keys), expected))
    found = matching(keys["match"], every, path=f"{path}.match")
    pairs = [(one, methods[part]) for one in found if (part := "bias" if one.is_bias else "weight") in methods]
    if not pairs:
        raise ConfigError(Problem(path, f"matches parameters, but no {' or '.join(methods)} among them", dict(keys), f"such as {found[0].name}"))
    return pairs


def _method(given: Any, path: str) -> Callable[[Tensor], Any]:
    settings: dict[str, Any] = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {"method": given}
    name = settings.pop("method", None)
    if name not in METHODS:
        words = "is not a method of initialisation"
        raise ConfigError(Problem(f"{path}.method" if isinstance(given, Mapping) else path, words, name, hint=nearest(str(name), METHODS)))
    method = METHODS[name]
    accepted = [key for key in inspect.signature(method).parameters if key not in ("tensor", "generator", "images")]
    unknown = [key for key in settings if key not in accepted]
    if unknown:
        raise ConfigError(Problem(f"{path}.{unknown[0]}", f"is not an argument of {name}", settings[unknown[0]], hint=nearest(unknown[0], accepted)))
    if name == "constant" and "val" not in settings:
        raise ConfigError(Problem(f"{path}.val", "is missing (the constant to fill with)"))
    return partial(method, **settings)


def _initialise(one: Named, method: Callable[..., Any], path: str, images: Images | None) -> None:
    try:
        with torch.no_grad():
            method(one.parameter, **({"images": images} if "images" in inspect.signature(method).parameters else {}))
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(Problem(path, f"cannot initialise {one.name} {list(one.parameter.shape)}: {error}")) from None
