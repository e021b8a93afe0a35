"""Gradual unfreezing: parameters that are trained from a later epoch (J. Howard, S. Ruder: ULMFiT,
arXiv 1801.06146, section 3.3).

Until then they gather no gradient, so that no optimizer touches them or counts a step of theirs,
and the statistics of layers that wait as a whole are held. What waits is a function of the step,
and no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.frozen import frozen_layers, temporarily_frozen
from samewise.runner.optim.groups import epochs_frozen
from samewise.runner.optim.matching import Named, named_parameters


@final
@dataclass(frozen=True)
class Waiting:
    """Parameters that are not trained before step `until` (from 0), which trains the next of them.

    All parameters that wait till then or longer, and the layers with statistics that wait as a
    whole.
    """

    until: int
    parameters: Sequence[Tensor]
    layers: Sequence[nn.Module]


def waiting(
    model: nn.Module,
    rules: Mapping[str, Any],
    *,
    steps_per_epoch: int,
    parts: Sequence[Sequence[str]] = ((),),
) -> list[Waiting]:
    """The parameters that rules with `frozen_until: EPOCHS` or `unfreeze_every: EPOCHS` keep
    frozen, the next to be trained first.

    `parts` are the prefixes of the parameters that each phase trains. ConfigError if a rule is
    malformed, or a phase trains nothing at the beginning.
    """
    waits = [
        (epochs, one) for one, epochs in epochs_frozen(model, rules) if one.parameter.requires_grad
    ]
    until = {one.name: epochs for epochs, one in waits}
    for prefixes in parts:
        least = min(
            (
                until.get(one.name, 0)
                for one in named_parameters(model, prefixes)
                if one.parameter.requires_grad
            ),
            default=0,
        )
        if least:
            where = f" below {', '.join(prefixes)}" if prefixes else ""
            told = {name: rule[key] for name, key, rule in _waiting_rules(rules)}
            words = f"no parameter{where} is trained in the first {least} epochs"
            raise ConfigError(
                Problem(
                    "param_groups", words, told, "at least one parameter group without frozen_until"
                )
            )
    return [
        _waiting(model, [one for least, one in waits if least >= until], until * steps_per_epoch)
        for until in sorted({until for until, _ in waits})
    ]


def _waiting(model: nn.Module, named: Sequence[Named], until: int) -> Waiting:
    parameters = [one.parameter for one in named]
    with temporarily_frozen(parameters):
        return Waiting(until, parameters, frozen_layers(model, named))


def cautions(
    rules: Mapping[str, Any],
    later: Sequence[Waiting] = (),
    *,
    steps_per_epoch: int,
    total_steps: int,
) -> list[Problem]:
    """Warnings about parameters that wait for an epoch beyond the end of training."""
    words, hint = (
        "training ends before this epoch, so what is frozen until then is never trained",
        "lower it, raise max_epochs, or set frozen: true",
    )
    last = {"frozen_until": 0, "unfreeze_every": max((one.until for one in later), default=0)}
    found = [
        (name, key, rule[key], max(last[key], rule[key] * steps_per_epoch))
        for name, key, rule in _waiting_rules(rules)
    ]
    return [
        Problem(f"param_groups.{name}.{key}", words, epochs, hint=hint)
        for name, key, epochs, until in found
        if until >= total_steps
    ]


def _waiting_rules(rules: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(rule's name, its key with the epochs, rule)."""
    keys = ("frozen_until", "unfreeze_every")
    return [
        (name, key, cast("Mapping[str, Any]", rule))
        for name, rule in rules.items()
        if isinstance(rule, Mapping)
        for key in keys
        if key in rule
    ]
