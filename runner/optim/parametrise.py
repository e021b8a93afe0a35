"""Weights computed from other parameters: weight norm, spectral norm, orthogonal, LoRA, pruned."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

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


@final
class Mask(nn.Module):
    """Weight with zeros where the mask, bool[...], is false."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def pruned(
    module: nn.Module,
    name: str = "weight",
    *,
    amount: float = 0.5,
    dim: int | None = None,
    threshold: float | None = None,
) -> nn.Module:
    """Set a weight's smallest elements to zero, and keep them there.

    Args:
        module: Module with the weight; changed in place.
        name: The weight's name in the module.
        amount: Share of the elements or slices, a float; or their number, an int.
        dim: Prune whole slices along this dimension, by their 2-norms; 0: outputs. None: elements.
        threshold: Prune the elements whose magnitude is at most this, whatever their share.

    Returns:
        The module.

    Raises:
        ValueError: The amount is not from 0 to 1, or the weight has no such dimension.
    """
    weight = cast("Tensor", getattr(module, name)).detach()
    method = prune.L1Unstructured(amount) if dim is None else prune.LnStructured(amount, 2, dim)
    mask = (
        method.compute_mask(weight, torch.ones_like(weight)).bool()
        if threshold is None
        else weight.abs() > threshold
    )
    return parametrize.register_parametrization(module, name, Mask(mask))


KINDS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "lora": lora,
    "pruned": pruned,
}
"""Functions of torch.nn.utils.parametrizations, with their arguments, `lora` and `pruned`."""


def parametrise(model: nn.Module, rules: Mapping[str, Any]) -> None:
    """Parametrise the weights that match.

    Weight norm: T. Salimans, D. Kingma, arXiv 1602.07868. Spectral norm: T. Miyato et al., arXiv
    1802.05957.

    Args:
        model: The model; changed in place. Names of parameters change with it (`fc.weight` to
            `fc.parametrizations.weight.original0`).
        rules: Rules by name: `{match: PATTERN, kind: one of KINDS, ...its arguments}`. Biases that
            match are left alone. `pruned` with `globally: true` compares the weights of all layers
            that match.

    Raises:
        ConfigError: A rule is malformed or matches nothing, or a weight cannot be parametrised.
    """
    for name, rule in rules.items():
        path = f"initialise.parametrisations.{name}"
        if rule is None:
            continue
        ConfigError.raise_if(
            not isinstance(rule, Mapping) or "match" not in rule or "kind" not in rule,
            path,
            "is not a rule",
            rule,
            "{match: PATTERN, kind: KIND, ...}",
        )
        settings = dict(cast("Mapping[str, Any]", rule))
        pattern, kind = settings.pop("match"), settings.pop("kind")
        ConfigError.raise_if(
            kind not in KINDS,
            f"{path}.kind",
            "is not a parametrisation",
            kind,
            hint=nearest(str(kind), KINDS),
        )
        accepted = [
            key
            for key in inspect.signature(KINDS[kind]).parameters
            if key not in ("module", "name")
        ] + ["globally"] * (kind == "pruned")
        ConfigError.raise_all(
            Problem(
                f"{path}.{key}", f"is not an argument of {kind}", value, hint=nearest(key, accepted)
            )
            for key, value in settings.items()
            if key not in accepted
        )
        # A pattern such as `layer4.*` also matches biases, which none of the kinds is for
        weights = [
            parameter
            for parameter in matching(pattern, named_parameters(model), path=f"{path}.match")
            if not parameter.is_bias
        ]
        if settings.pop("globally", False):
            settings["threshold"] = _smallest(weights, settings.get("amount", 0.5))
        for parameter in weights:
            _require_own_weight(parameter, kind, pattern, path)
            _parametrise_weight(parameter, kind, settings, path)


def _smallest(weights: Iterable[Named], amount: float) -> float:
    """Return the largest of the smallest magnitudes: this share of all weights, or as many."""
    magnitudes = torch.cat([x.tensor.detach().abs().flatten() for x in weights])
    count = amount if isinstance(amount, int) else round(amount * len(magnitudes))
    return float(magnitudes.kthvalue(min(count, len(magnitudes))).values) if count > 0 else -1.0


def _require_own_weight(parameter: Named, kind: str, pattern: Any, path: str) -> None:
    """Raise a ConfigError for a tied weight: parametrised, it would become another weight."""
    # A module with several names is one place, whose weight stays shared
    places = {
        (id(module), name.rpartition(".")[2])
        for name, module in zip(parameter.names, parameter.modules, strict=True)
    }
    ConfigError.raise_if(
        len(places) > 1,
        f"{path}.match",
        f"cannot make {kind} of {parameter.name}: it is also "
        f"{', '.join(parameter.names[1:])}, which would then be another weight",
        pattern,
        hint="leave shared weights out of the pattern",
    )


def _parametrise_weight(
    parameter: Named, kind: str, settings: Mapping[str, Any], path: str
) -> None:
    try:
        KINDS[kind](parameter.module, name=parameter.name.rpartition(".")[2], **settings)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(
            Problem(
                path,
                f"cannot make {kind} of {parameter.name} {list(parameter.tensor.shape)}: {error}",
            )
        ) from None


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
