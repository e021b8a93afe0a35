"""Weights that are computed from other parameters: weight norm, spectral norm, orthogonal matrices, by pattern."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from torch import nn
from torch.nn.utils import parametrizations

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.optim.matching import matching, named_parameters

KINDS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
"""torch.nn.utils.parametrizations, with their arguments."""


def parametrise(model: nn.Module, rules: Mapping[str, Any]) -> list[str]:
    """Parametrise the matched weights (T. Salimans, D. Kingma: weight norm, arXiv 1602.07868; T. Miyato et al.: spectral norm, arXiv 1802.05957).

    Args:
        model: Changed in place; the parameters' names change with it (`fc.weight` to `fc.parametrizations.weight.original0`).
        rules: By name: `{match: PATTERN, kind: weight_norm, spectral_norm or orthogonal, ...its arguments}`. Biases that match are left alone.

    Returns:
        The names of the weights that were parametrised, as they were before.

    Raises:
        ConfigError: a rule is malformed, matches nothing, or a weight cannot be parametrised so.
    """
    done: list[str] = []
    for name, rule in rules.items():
        path = f"initialise.parametrisations.{name}"
        if rule is None:
            continue
        if not isinstance(rule, Mapping) or "match" not in rule or "kind" not in rule:
            raise ConfigError(Problem(path, "is not a rule", rule, "{match: PATTERN, kind: KIND, ...}"))
        settings = dict(cast("Mapping[str, Any]", rule))
        pattern, kind = settings.pop("match"), settings.pop("kind")
        if kind not in KINDS:
            raise ConfigError(Problem(f"{path}.kind", "is not a parametrisation", kind, hint=nearest(str(kind), KINDS)))
        accepted = [key for key in inspect.signature(KINDS[kind]).parameters if key not in ("module", "name")]
        unknown = [key for key in settings if key not in accepted]
        if unknown:
            raise ConfigError(Problem(f"{path}.{unknown[0]}", f"is not an argument of {kind}", settings[unknown[0]], hint=nearest(unknown[0], accepted)))
        weights = [one for one in matching(pattern, named_parameters(model), path=f"{path}.match") if not one.is_bias]
        for one in weights:
            try:
                KINDS[kind](one.module, name=one.name.rpartition(".")[2], **settings)
            except (ValueError, RuntimeError, KeyError) as error:
                raise ConfigError(Problem(path, f"cannot make {kind} of {one.name} {list(one.parameter.shape)}: {error}")) from None
            done.append(one.name)
    return done
