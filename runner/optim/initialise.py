"""A model's weights before the first step: by rules, from a file, parametrised, frozen.

Computed on the CPU in the `init` stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.optim.frozen import bare_statistics, freeze
from samewise.runner.optim.matching import Named, matching, named_parameters
from samewise.runner.optim.parametrise import parametrise
from samewise.runner.optim.weights import load_weights

Images = Callable[[int], Tensor]
"""Gives so many training images, float[B, C, H, W], as a model is called with them in evaluation.
"""


def whitening_(
    tensor: Tensor, images: Images | None, *, samples: int = 5000, eps: float = 5e-4
) -> Tensor:
    """Fill a convolution's weight with the eigenvectors of its patches' covariance, each divided by
    the root of its eigenvalue, then with their negatives.

    Its outputs on training images are then uncorrelated with variance 1. After D. Page
    (https://myrtle.ai/learn/how-to-train-your-resnet/) and T. Balsam
    (https://github.com/tysam-code/hlb-CIFAR10); K. Jordan 2024 (arXiv 2404.00498), section 3.2. As
    there the covariance is taken around zero, which is the mean of normalised images. Computed in
    float64; the largest eigenvalue comes first, and of an eigenvector, whose sign is free, the
    largest element is positive. ValueError if the weight has another shape, the images have other
    channels, or a number is out of its range.

    Args:
        tensor: float[2 n, C, h, w] with n = C h w, or float[n, C, h, w]: then without the
            negatives. Changed in place.
        images: Where images come from; None: the weight stays as it is.
        samples: How many images are looked at; no more than there are.
        eps: Added to each eigenvalue, so that directions in which patches hardly differ are not
            blown up.
    """
    size = tensor[0].numel()
    if tensor.ndim != 4 or len(tensor) not in (size, 2 * size):
        raise ValueError("whitening needs a convolution [n or 2 n, C, h, w] with n = C h w")
    if samples < 1 or eps < 0:
        raise ValueError("samples must be at least 1, and eps at least 0")
    if images is None:
        return tensor
    seen = images(samples)
    if seen.ndim != 4 or seen.shape[1] != tensor.shape[1]:
        raise ValueError(
            f"whitening needs images [B, {tensor.shape[1]}, H, W], not {list(seen.shape)}"
        )
    patches = F.unfold(seen.double(), tensor.shape[2:]).transpose(1, 2).reshape(-1, size)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))  # ascending, in columns
    rows = vectors.T.flip(0) / (values.flip(0).clamp(min=0.0) + eps).sqrt()[:, None]
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    return tensor.copy_(
        (rows if len(tensor) == size else torch.cat([rows, -rows])).view(tensor.shape)
    )


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

SETTINGS: Final = (
    "rules",
    "weights",
    "sha256",
    "into",
    "strict",
    "exclude",
    "parametrisations",
    "frozen",
    "frozen_statistics",
)


def initialise(
    model: nn.Module,
    settings: Mapping[str, Any],
    *,
    made_by: str = "",
    images: Images | None = None,
) -> None:
    """Initialise `model` in place: rules, then weights from a file, then parametrisations, then
    what is frozen.

    ConfigError if a setting is wrong, a pattern matches nothing, or the file does not fit the
    model.

    Args:
        model: On the CPU. Random methods draw from the default generator, in the model's order of
            parameters.
        settings: The config's `initialise`; every key may be missing. `rules`: by name (or a list),
            in order, each `{match: PATTERN, weight: METHOD, bias: METHOD}`, a METHOD being a name
            of `METHODS` or `{method: NAME, ...its arguments}`; each weight and bias goes by the
            first rule that sets it. `weights`, `sha256`, `into`, `strict`, `exclude`: see
            `weights.load_weights`. `parametrisations`: see `parametrise`. `frozen`: patterns of
            parameters that are not trained; `frozen_statistics`: freeze (if missing) or train, see
            `frozen.freeze`.
        made_by: The model's `_target_`, whose published weights may be given by a short name.
        images: Training images for the methods that look at some; None: these leave weights as they
            are, since others are loaded afterwards.
    """
    given: dict[str, Any] = plain(settings) if isinstance(settings, DictConfig) else dict(settings)
    unknown = [
        Problem(f"initialise.{key}", "no such key", hint=nearest(key, SETTINGS))
        for key in given
        if key not in SETTINGS
    ]
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
    meant = (
        matching(
            given["frozen"],
            [*named_parameters(model), *bare_statistics(model)],
            path="initialise.frozen",
        )
        if given.get("frozen")
        else []
    )
    freeze(
        model,
        meant,
        path="initialise.frozen_statistics",
        statistics=given.get("frozen_statistics", "freeze"),
    )


def _apply_rules(
    model: nn.Module, rules: Mapping[str, Any] | Sequence[Any], images: Images | None
) -> None:
    named = (
        rules
        if isinstance(rules, Mapping)
        else {str(index): rule for index, rule in enumerate(rules)}
    )
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


def _match_rules(
    rule: Any, every: Sequence[Named], path: str
) -> list[tuple[Named, Callable[[Tensor], Any]]]:
    """The parameters that each rule initialises, with the method."""
    expected = "{match: PATTERN, weight: METHOD, bias: METHOD}, with at least one of the methods"
    if not isinstance(rule, Mapping):
        raise ConfigError(Problem(path, "is not a rule", rule, expected))
    keys = cast("Mapping[str, Any]", rule)
    methods = {
        key: _method(keys[key], f"{path}.{key}")
        for key in ("weight", "bias")
        if keys.get(key) is not None
    }
    if "match" not in keys or not methods or set(keys) - {"match", "weight", "bias"}:
        raise ConfigError(Problem(path, "is not a rule", dict(keys), expected))
    found = matching(keys["match"], every, path=f"{path}.match")
    pairs = [
        (one, methods[part])
        for one in found
        if (part := "bias" if one.is_bias else "weight") in methods
    ]
    if not pairs:
        raise ConfigError(
            Problem(
                path,
                f"matches parameters, but no {' or '.join(methods)} among them",
                dict(keys),
                f"such as {found[0].name}",
            )
        )
    return pairs


def _method(given: Any, path: str) -> Callable[[Tensor], Any]:
    settings: dict[str, Any] = (
        dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {"method": given}
    )
    name = settings.pop("method", None)
    if name not in METHODS:
        words = "is not a method of initialisation"
        raise ConfigError(
            Problem(
                f"{path}.method" if isinstance(given, Mapping) else path,
                words,
                name,
                hint=nearest(str(name), METHODS),
            )
        )
    method = METHODS[name]
    accepted = [
        key
        for key in inspect.signature(method).parameters
        if key not in ("tensor", "generator", "images")
    ]
    unknown = [key for key in settings if key not in accepted]
    if unknown:
        raise ConfigError(
            Problem(
                f"{path}.{unknown[0]}",
                f"is not an argument of {name}",
                settings[unknown[0]],
                hint=nearest(unknown[0], accepted),
            )
        )
    if name == "constant" and "val" not in settings:
        raise ConfigError(Problem(f"{path}.val", "is missing (the constant to fill with)"))
    return partial(method, **settings)


def _initialise(one: Named, method: Callable[..., Any], path: str, images: Images | None) -> None:
    try:
        with torch.no_grad():
            method(
                one.parameter,
                **({"images": images} if "images" in inspect.signature(method).parameters else {}),
            )
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            Problem(path, f"cannot initialise {one.name} {list(one.parameter.shape)}: {error}")
        ) from None
