"""Freezes parameters and the running statistics of their layers."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.matching import Named, holder

STATISTICS: Final = ("running_mean", "running_var", "_u", "weight_u")
"""Buffers that batch, instance and spectral norm change as they compute in training mode."""


def freeze(
    model: nn.Module, frozen: Sequence[Named], *, path: str, statistics: object = "freeze"
) -> None:
    """Freeze parameters, and the statistics of layers that are frozen as a whole.

    A layer is frozen as a whole if all of its own parameters are. A layer without any
    (`affine=False`) is frozen if its statistics are among `frozen`, or if all parameters of the
    module around it are frozen. Frozen statistics are used and not updated.

    Args:
        model: The model; changed in place.
        frozen: The parameters and `bare_statistics` that match a pattern.
        path: Path of `statistics` in the config.
        statistics: `freeze`, or `train` if statistics keep following the batches.

    Raises:
        ConfigError: `statistics` is another word.
    """
    ConfigError.raise_if(
        statistics not in ("freeze", "train"), path, "no such choice", statistics, "freeze or train"
    )
    for parameter in frozen:
        if isinstance(parameter.tensor, nn.Parameter):
            parameter.tensor.requires_grad_(False)
    if statistics == "freeze":
        for module in frozen_layers(model, frozen):
            keep_in_eval_mode(module)


def frozen_layers(model: nn.Module, frozen: Sequence[Named]) -> list[nn.Module]:
    """Return the layers with statistics that are frozen as a whole once `frozen` is."""
    frozen_ids = {id(x.tensor) for x in frozen}
    modules = dict(model.named_modules())
    return [
        module
        for name, module in modules.items()
        if _has_statistics(module) and _is_frozen(modules, name, frozen_ids)
    ]


@contextmanager
def temporarily_frozen(
    parameters: Iterable[Tensor], layers: Iterable[nn.Module] = ()
) -> Generator[None]:
    """Keep parameters from collecting gradients and layers from updating their statistics.

    Args:
        parameters: Trained parameters.
        layers: Layers with statistics; those in eval mode are left alone.
    """
    tensors, training_layers = list(parameters), [layer for layer in layers if layer.training]
    for parameter in tensors:
        parameter.requires_grad_(False)
    for layer in training_layers:
        # eval() would reach the modules below it.
        layer.training = False
    try:
        yield
    finally:
        for parameter in tensors:
            parameter.requires_grad_(True)
        for layer in training_layers:
            layer.training = True


def bare_statistics(model: nn.Module) -> list[Named]:
    """Return the statistics of layers without parameters, which no other pattern matches."""
    modules = dict(model.named_modules(remove_duplicate=False))
    buffers = [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in model.named_modules()
        if _is_bare(module)
        for name, buffer in module.named_buffers()
    ]
    return [Named(name, buffer, holder(modules, name)) for name, buffer in buffers]


def keep_in_eval_mode(module: nn.Module) -> None:
    """Keep the module in eval mode from now on."""
    module.training = False
    # A hook sets the mode, since `model.train()` changes the mode of every module.
    if not is_kept_in_eval_mode(module):
        module.register_forward_pre_hook(_return_to_eval_mode)


def is_kept_in_eval_mode(module: nn.Module) -> bool:
    """Return whether `keep_in_eval_mode` was called for the module."""
    # Torch has no public way to list hooks.
    return _return_to_eval_mode in module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]


def _return_to_eval_mode(module: nn.Module, inputs: Any) -> None:
    # eval() would reach the modules below it.
    module.training = False


def _has_statistics(module: nn.Module) -> bool:
    return any(name in STATISTICS for name, _ in module.named_buffers(recurse=False))


def _is_bare(module: nn.Module) -> bool:
    return _has_statistics(module) and next(module.parameters(), None) is None


def _is_frozen(modules: Mapping[str, nn.Module], name: str, frozen_ids: set[int]) -> bool:
    module = modules[name]
    if _is_bare(module) and any(id(buffer) in frozen_ids for buffer in module.buffers()):
        return True
    parameters = list(module.parameters(recurse=False))
    # A layer without parameters of its own goes by the module around it
    while not parameters and name:
        name = name.rpartition(".")[0]
        parameters = list(modules[name].parameters())
    return not any(x.requires_grad for x in parameters) and any(
        id(x) in frozen_ids for x in parameters
    )


def idle_options(rules: Mapping[str, Any]) -> list[Problem]:
    """Warn of optimizer options in rules of `param_groups` that freeze what they match."""
    return [
        Problem(
            f"param_groups.{name}.{key}",
            "has no effect: the rule freezes what it matches",
            value,
            hint=f"~param_groups.{name}.{key} removes it",
        )
        for name, rule in rules.items()
        if isinstance(rule, Mapping) and rule.get("frozen") is True
        for key, value in rule.items()
        if key not in ("match", "frozen", "frozen_statistics", "frozen_until")
    ]
