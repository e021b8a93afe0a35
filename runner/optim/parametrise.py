"""Weights computed from other parameters: weight norm, spectral norm, orthogonal matrices, LoRA."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.optim.matching import Named, matching, named_parameters


@final
class LowRank(nn.Module):
    """Weight, float[out, ...], plus a trained product of two small matrices, initially zero.

    Further dimensions of the weight are flattened. E. Hu et al.: LoRA, arXiv 2106.09685;
    initialised as in its code.
    """

    def __init__(self, weight: Tensor, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_down = nn.Parameter(weight.new_empty(rank, math.prod(weight.shape[1:])))
        self.lora_up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.lora_up @ self.lora_down).view_as(weight)


def lora(
    module: nn.Module, name: str = "weight", *, rank: int = 8, alpha: float | None = None
) -> nn.Module:
    """Freeze a weight, and train a low-rank change to it.

    Args:
        module: Module with the weight; changed in place.
        name: The weight's name in the module.
        rank: Rank of the change.
        alpha: The change is multiplied by `alpha / rank`; None: by 1.

    Returns:
        The module.

    Raises:
        ValueError: The weight is not a matrix, or the rank is too large.
    """
    weight = cast("Tensor", getattr(module, name))
    largest = min(weight.shape[0], math.prod(weight.shape[1:])) if weight.dim() > 1 else 0
    if not isinstance(rank, int) or not 1 <= rank <= largest:  # pyright: ignore[reportUnnecessaryIsInstance] (a config's)
        raise ValueError(
            f"a rank of {rank} is not valid: it must be from 1 to {largest}"
            if largest
            else "it is not a matrix"
        )
    with torch.no_grad():
        change = LowRank(weight, rank=rank, scale=1.0 if alpha is None else alpha / rank)
    parametrize.register_parametrization(module, name, change)
    cast("Any", module).parametrizations[name].original.requires_grad_(False)
    return module


KINDS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "lora": lora,
}
"""Functions of torch.nn.utils.parametrizations, with their arguments, and `lora`."""


def parametrise(model: nn.Module, rules: Mapping[str, Any]) -> None:
    """Parametrise the weights that match.

    Weight norm: T. Salimans, D. Kingma, arXiv 1602.07868. Spectral norm: T. Miyato et al., arXiv
    1802.05957.

    Args:
        model: The model; changed in place. Names of parameters change with it (`fc.weight` to
            `fc.parametrizations.weight.original0`).
        rules: Rules by name: `{match: PATTERN, kind: one of KINDS, ...its arguments}`. Biases that
            match are left alone.

    Raises:
        ConfigError: A rule is malformed or matches nothing, or a weight cannot be parametrised.
    """
    for name, rule in rules.items():
        path = f"initialise.parametrisations.{name}"
        if rule is None:
            continue
        if not isinstance(rule, Mapping) or "match" not in rule or "kind" not in rule:
            raise ConfigError(
                Problem(path, "is not a rule", rule, "{match: PATTERN, kind: KIND, ...}")
            )
        settings = dict(cast("Mapping[str, Any]", rule))
        pattern, kind = settings.pop("match"), settings.pop("kind")
        if kind not in KINDS:
            raise ConfigError(
                Problem(
                    f"{path}.kind", "is not a parametrisation", kind, hint=nearest(str(kind), KINDS)
                )
            )
        accepted = [
            key
            for key in inspect.signature(KINDS[kind]).parameters
            if key not in ("module", "name")
        ]
        unknown = [key for key in settings if key not in accepted]
        if unknown:
            raise ConfigError(
                Problem(
                    f"{path}.{unknown[0]}",
                    f"is not an argument of {kind}",
                    settings[unknown[0]],
                    hint=nearest(unknown[0], accepted),
                )
            )
        for parameter in matching(pattern, named_parameters(model), path=f"{path}.match"):
            # A pattern such as `layer4.*` also matches biases, which none of the kinds is for
            if not parameter.is_bias:
                _require_own_weight(parameter, kind, pattern, path)
                _parametrise_weight(parameter, kind, settings, path)


def _require_own_weight(parameter: Named, kind: str, pattern: Any, path: str) -> None:
    """Raise a ConfigError for a tied weight: parametrised, it would become another weight."""
    # A module with several names is one place, whose weight stays shared
    places = {
        (id(module), name.rpartition(".")[2])
        for name, module in zip(parameter.names, parameter.modules, strict=True)
    }
    if len(places) > 1:
        message = (
            f"cannot make {kind} of {parameter.name}: it is also "
            f"{', '.join(parameter.names[1:])}, which would then be another weight"
        )
        hint = "leave shared weights out of the pattern"
        raise ConfigError(Problem(f"{path}.match", message, pattern, hint=hint))


def _parametrise_weight(
    parameter: Named, kind: str, settings: Mapping[str, Any], path: str
) -> None:
    try:
        KINDS[kind](parameter.module, name=parameter.name.rpartition(".")[2], **settings)
    except (ValueError, RuntimeError, KeyError) as error:
        shape = list(parameter.tensor.shape)
        message = f"cannot make {kind} of {parameter.name} {shape}: {error}"
        raise ConfigError(Problem(path, message)) from None


def merge(model: nn.Module) -> None:
    """Replace parametrised weights by their values, with the same bits, under the plain names.

    Args:
        model: The model in eval mode; changed in place, and no longer trained.
    """
    # A list, since merging removes modules
    for module in list(model.modules()):
        for name in (
            list(cast("Any", module).parametrizations)
            if parametrize.is_parametrized(module)
            else ()
        ):
            parametrisation = cast("Any", module).parametrizations[name]
            for tensor_name, tensor in list(parametrisation.named_parameters(recurse=False)):
                # A copy, as torch writes into the tensor, and another layer may share it. Without
                # gradient, as in evaluation: an LSTM chooses its kernels by that.
                setattr(
                    parametrisation,
                    tensor_name,
                    nn.Parameter(tensor.detach().clone(), requires_grad=False),
                )
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            if isinstance(module, nn.RNNBase):
                # A recurrent layer keeps a list of its weights, which `to` renews.
                module.to(device=getattr(module, name).device)
