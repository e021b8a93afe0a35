"""A model's weights before the first step: by rules, from a file, parametrised, frozen.

Computed on the CPU in the `init` stream.
"""

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
"""Returns a number of training images, float[B, C, H, W], as evaluation passes them to a model."""


def whitening_(
    tensor: Tensor, images: Images | None, *, samples: int = 5000, eps: float = 5e-4
) -> Tensor:
    """Fill a convolution's weight with a whitening filter of training images' patches.

    The filters are the eigenvectors of the patches' covariance, each divided by the root of its
    eigenvalue, followed by their negatives. Outputs on training images are then uncorrelated with
    variance 1. After D. Page (https://myrtle.ai/learn/how-to-train-your-resnet/), T. Balsam
    (https://github.com/tysam-code/hlb-CIFAR10) and K. Jordan 2024 (arXiv 2404.00498, section 3.2).
    As there, the covariance is taken around zero, the mean of normalised images. Computed in
    float64.

    Args:
        tensor: float[2 n, C, h, w] with n = C h w, or float[n, C, h, w] for filters without their
            negatives. Changed in place.
        images: Source of images; None leaves the weight as it is.
        samples: Most images to use.
        eps: Added to each eigenvalue, so that directions in which patches hardly differ are not
            amplified.

    Raises:
        ValueError: The weight has another shape, the images have other channels, or a number is out
            of its range.
    """
    patch_size = tensor[0].numel()
    if tensor.ndim != 4 or len(tensor) not in (patch_size, 2 * patch_size):
        raise ValueError("whitening needs a convolution [n or 2 n, C, h, w] with n = C h w")
    if samples < 1 or eps < 0:
        raise ValueError("samples must be at least 1, and eps at least 0")
    if images is None:
        return tensor
    pixels = images(samples)
    if pixels.ndim != 4 or pixels.shape[1] != tensor.shape[1]:
        raise ValueError(
            f"whitening needs images [B, {tensor.shape[1]}, H, W], not {list(pixels.shape)}"
        )
    patches = F.unfold(pixels.double(), tensor.shape[2:]).transpose(1, 2).reshape(-1, patch_size)
    # `eigh` returns eigenvectors in columns, by ascending eigenvalue; filters are rows, the largest
    # eigenvalue first.
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    # Rounding may make the smallest eigenvalues negative
    rows = vectors.T.flip(0) / (values.flip(0).clamp(min=0.0) + eps).sqrt()[:, None]
    # An eigenvector's sign is arbitrary: its largest element is made positive.
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    return tensor.copy_(
        (rows if len(tensor) == patch_size else torch.cat([rows, -rows])).view(tensor.shape)
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
"""Functions of torch.nn.init, with their arguments, and `whitening`."""

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
    """Initialise `model` in place: rules, weights from a file, parametrisations, and freezing.

    Args:
        model: The model, on the CPU. Random methods draw from the default generator, in the model's
            order of parameters.
        settings: The config's `initialise`; every key may be missing. `rules`: rules by name (or a
            list), in order, each `{match: PATTERN, weight: METHOD, bias: METHOD}`. A METHOD is a
            name in `METHODS` or `{method: NAME, ...its arguments}`. The first rule that sets a
            weight or a bias applies. `weights`, `sha256`, `into`, `strict`, `exclude`: see
            `weights.load_weights`. `parametrisations`: see `parametrise`. `frozen`: patterns of
            parameters that are not trained. `frozen_statistics`: `freeze` (the default) or `train`,
            see `frozen.freeze`.
        made_by: The model's `_target_`, whose published weights may have a short name.
        images: Training images for methods that use them. None if weights are loaded afterwards;
            these methods then change nothing.

    Raises:
        ConfigError: A setting is wrong, a pattern matches nothing, or the file does not fit the
            model.
    """
    options: dict[str, Any] = (
        plain(settings) if isinstance(settings, DictConfig) else dict(settings)
    )
    ConfigError.raise_all(
        Problem(f"initialise.{key}", "no such key", hint=nearest(key, SETTINGS))
        for key in options
        if key not in SETTINGS
    )
    _apply_rules(model, options.get("rules") or {}, images)
    load_weights(
        model,
        options.get("weights"),
        sha256=options.get("sha256"),
        into=options.get("into"),
        strict=options.get("strict", True),
        exclude=options.get("exclude") or (),
        parametrise=partial(parametrise, model, options.get("parametrisations") or {}),
        made_by=made_by,
    )
    # Last, since parametrising renames parameters and makes new ones
    freeze(
        model,
        matching(
            options["frozen"],
            [*named_parameters(model), *bare_statistics(model)],
            path="initialise.frozen",
        )
        if options.get("frozen")
        else [],
        path="initialise.frozen_statistics",
        statistics=options.get("frozen_statistics", "freeze"),
    )


def _apply_rules(
    model: nn.Module, rules: Mapping[str, Any] | Sequence[Any], images: Images | None
) -> None:
    rule_by_name = (
        rules
        if isinstance(rules, Mapping)
        else {str(index): rule for index, rule in enumerate(rules)}
    )
    parameters = named_parameters(model)
    chosen: dict[str, tuple[str, Callable[[Tensor], Any]]] = {}
    problems: list[Problem] = []
    for name, rule in rule_by_name.items():
        if rule is None:
            continue
        try:
            for parameter, method in _match_rules(rule, parameters, f"initialise.rules.{name}"):
                chosen.setdefault(parameter.name, (str(name), method))
        except ConfigError as error:
            problems.extend(error.problems)
    ConfigError.raise_all(problems)
    for parameter in parameters:
        # In the model's order, so that draws do not depend on the order of rules
        if parameter.name in chosen:
            name, method = chosen[parameter.name]
            _initialise(parameter, method, f"initialise.rules.{name}", images)


def _match_rules(
    rule: Any, parameters: Sequence[Named], path: str
) -> list[tuple[Named, Callable[[Tensor], Any]]]:
    """Return the parameters that a rule initialises, each with the method."""
    expected = "{match: PATTERN, weight: METHOD, bias: METHOD}, with at least one of the methods"
    ConfigError.raise_if(not isinstance(rule, Mapping), path, "is not a rule", rule, expected)
    keys = cast("Mapping[str, Any]", rule)
    methods = {
        key: _method(keys[key], f"{path}.{key}")
        for key in ("weight", "bias")
        if keys.get(key) is not None
    }
    ConfigError.raise_if(
        "match" not in keys or not methods or set(keys) - {"match", "weight", "bias"},
        path,
        "is not a rule",
        dict(keys),
        expected,
    )
    matches = matching(keys["match"], parameters, path=f"{path}.match")
    pairs = [
        (x, methods[part])
        for x in matches
        if (part := "bias" if x.is_bias else "weight") in methods
    ]
    ConfigError.raise_if(
        not pairs,
        path,
        f"matches parameters, but no {' or '.join(methods)} among them",
        dict(keys),
        f"such as {matches[0].name}",
    )
    return pairs


def _method(method_setting: Any, path: str) -> Callable[[Tensor], Any]:
    settings: dict[str, Any] = (
        dict(cast("Mapping[str, Any]", method_setting))
        if isinstance(method_setting, Mapping)
        else {"method": method_setting}
    )
    name = settings.pop("method", None)
    ConfigError.raise_if(
        name not in METHODS,
        f"{path}.method" if isinstance(method_setting, Mapping) else path,
        "is not a method of initialisation",
        name,
        hint=nearest(str(name), METHODS),
    )
    method = METHODS[name]
    accepted = [
        key
        for key in inspect.signature(method).parameters
        # A config cannot hold a generator or images
        if key not in ("tensor", "generator", "images")
    ]
    ConfigError.raise_all(
        Problem(
            f"{path}.{key}", f"is not an argument of {name}", value, hint=nearest(key, accepted)
        )
        for key, value in settings.items()
        if key not in accepted
    )
    # The only method with an argument that has no default
    ConfigError.raise_if(
        name == "constant" and "val" not in settings,
        f"{path}.val",
        "is missing (the constant to fill with)",
    )
    return partial(method, **settings)


def _initialise(
    parameter: Named, method: Callable[..., Any], path: str, images: Images | None
) -> None:
    try:
        with torch.no_grad():
            method(
                parameter.tensor,
                **({"images": images} if "images" in inspect.signature(method).parameters else {}),
            )
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            Problem(
                path, f"cannot initialise {parameter.name} {list(parameter.tensor.shape)}: {error}"
            )
        ) from None
