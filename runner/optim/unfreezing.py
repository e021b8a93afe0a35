"""Gradual unfreezing: parameters that are trained from a later epoch.

J. Howard, S. Ruder: ULMFiT, arXiv 1801.06146, section 3.3. Until then the parameters gather no
gradient, so no optimizer touches them or counts a step of theirs, and layers that wait as a whole
keep their statistics. Which parameters wait is a function of the step, and no state.
"""

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
    """Parameters that are not trained before step `until`, counted from 0."""

    until: int
    """Step from which the first of them are trained."""
    parameters: Sequence[Tensor]
    """All parameters that wait until this step or longer."""
    layers: Sequence[nn.Module]
    """Layers with statistics that wait as a whole."""


def waiting(
    model: nn.Module,
    rules: Mapping[str, Any],
    *,
    steps_per_epoch: int,
    parts: Sequence[Sequence[str]] = ((),),
) -> list[Waiting]:
    """List the parameters that `frozen_until` or `unfreeze_every` keep frozen, the next ones first.

    Args:
        model: The model.
        rules: The config's `param_groups`.
        steps_per_epoch: Steps of an epoch.
        parts: Prefixes of the parameters that each phase trains.

    Raises:
        ConfigError: A rule is malformed, or a phase trains nothing at the beginning.
    """
    waits = [
        (epochs, parameter)
        for parameter, epochs in epochs_frozen(model, rules)
        if parameter.tensor.requires_grad
    ]
    first_epochs = {parameter.name: epochs for epochs, parameter in waits}
    for prefixes in parts:
        first_epoch = min(
            (
                first_epochs.get(parameter.name, 0)
                for parameter in named_parameters(model, prefixes)
                if parameter.tensor.requires_grad
            ),
            default=0,
        )
        place = f" below {', '.join(prefixes)}" if prefixes else ""
        ConfigError.raise_if(
            first_epoch,
            "param_groups",
            f"no parameter{place} is trained in the first {first_epoch} epochs",
            {name: rule[key] for name, key, rule in waiting_rules(rules)},
            "at least one parameter group without frozen_until",
        )
    return [
        _waiting(
            model,
            [parameter for first_epoch, parameter in waits if first_epoch >= first_epochs],
            first_epochs * steps_per_epoch,
        )
        for first_epochs in sorted({first_epochs for first_epochs, _ in waits})
    ]


def _waiting(model: nn.Module, parameters: Sequence[Named], until: int) -> Waiting:
    tensors = [x.tensor for x in parameters]
    # A layer counts as frozen only while its parameters are
    with temporarily_frozen(tensors):
        return Waiting(until, tensors, frozen_layers(model, parameters))


def cautions(
    rules: Mapping[str, Any],
    waiting_parameters: Sequence[Waiting] = (),
    *,
    steps_per_epoch: int,
    total_steps: int,
) -> list[Problem]:
    """Warn of parameters that wait for an epoch beyond the end of training."""
    last = {
        "frozen_until": 0,
        "unfreeze_every": max((x.until for x in waiting_parameters), default=0),
    }
    waits = [
        (name, key, rule[key], max(last[key], rule[key] * steps_per_epoch))
        for name, key, rule in waiting_rules(rules)
    ]
    return [
        Problem(
            f"param_groups.{name}.{key}",
            "training ends before this epoch, so what is frozen until then is never trained",
            epochs,
            hint="lower it, raise max_epochs, or set frozen: true",
        )
        for name, key, epochs, until in waits
        if until >= total_steps
    ]


def waiting_rules(rules: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return (rule's name, its key with the epochs, rule) for each rule that delays training."""
    return [
        (name, key, cast("Mapping[str, Any]", rule))
        for name, rule in rules.items()
        if isinstance(rule, Mapping)
        for key in (("frozen_until", "unfreeze_every"))
        if key in rule
    ]
