"""Activations by name, for samewise's models and, in place of their own, for any others."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, nearest

_CLASSES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "celu": nn.CELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
"""Activations by the names of their functions in torch.nn.functional."""
_HIDDEN = tuple(cls for cls in _CLASSES.values() if cls not in (nn.Softplus, nn.Tanh))
"""Activations of hidden layers; others may be gates or outputs."""


def activation_module(name: str) -> nn.Module:
    """Return a new activation with torch's defaults, by the name of its function."""
    ConfigError.raise_if(
        name not in _CLASSES,
        "model.activation",
        "is not an activation of torch.nn.functional",
        name,
        ", ".join(_CLASSES),
        nearest(name, _CLASSES),
    )
    return _CLASSES[name]()


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation's function, for models that call it in `forward`."""
    activation_module(name)
    return getattr(F, name)


def with_activation(model: nn.Module, *, activation: str) -> nn.Module:
    """Replace the activations of a model's hidden layers, such as ReLU, SiLU and GELU.

    For models whose constructors do not allow it, such as torchvision's. Only modules can be
    replaced: functions in a `forward`, as in torchvision's DenseNet, GoogLeNet and Inception, stay.

    Args:
        model: The model, changed in place.
        activation: The name of a function in torch.nn.functional, such as silu.

    Returns:
        The changed model.

    Raises:
        ConfigError: There is no such activation, or the model has none to replace.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, _HIDDEN)
    ]
    ConfigError.raise_if(
        not places,
        "model.activation",
        f"{type(model).__name__} has no activation that is a module",
        activation,
    )
    for parent, name in places:
        setattr(parent, name, activation_module(activation))
    return model
