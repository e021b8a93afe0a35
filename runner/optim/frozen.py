"""Freezes parameters, which are then not trained, and the running statistics of their layers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.matching import Named, holder

STATISTICS: Final = ("running_mean", "running_var", "_u", "weight_u")
"""Buffers that a layer changes as it computes in training mode: batch and instance norm's, and
spectral norm's."""


def freeze(
    model: nn.Module, frozen: Sequence[Named], *, path: str, statistics: object = "freeze"
) -> None:
    """Freeze parameters, and the statistics of layers of which all parameters are frozen: these are
    used and not updated.

    A layer is frozen as a whole where all of its own parameters are. One without any
    (`affine=False`) is where its statistics are among `frozen`, or where all parameters of the
    module around it are frozen. `frozen` is what a pattern means of the model's parameters and of
    `bare_statistics`. With `statistics="train"`, whose path in the config is `path`, statistics go
    on following the batches; a ConfigError for another word than these two.
    """
    if statistics not in ("freeze", "train"):
        raise ConfigError(Problem(path, "no such choice", statistics, "freeze or train"))
    for one in frozen:
        if isinstance(one.parameter, nn.Parameter):
            one.parameter.requires_grad_(False)
    if statistics == "freeze":
        for module in frozen_layers(model, frozen):
            keep_in_eval_mode(module)


def frozen_layers(model: nn.Module, frozen: Sequence[Named]) -> list[nn.Module]:
    """Layers with statistics, all of whose parameters are frozen if those of `frozen` are."""
    meant = {id(one.parameter) for one in frozen}
    modules = dict(model.named_modules())
    return [
        module
        for name, module in modules.items()
        if _has_statistics(module) and _is_frozen(modules, name, meant)
    ]


@contextmanager
def temporarily_frozen(
    parameters: Iterable[Tensor], layers: Iterable[nn.Module] = ()
) -> Generator[None]:
    """Within it, trained parameters collect no gradients, and layers in training mode do not update
    their statistics.
    """
    given, held = list(parameters), [layer for layer in layers if layer.training]
    for parameter in given:
        parameter.requires_grad_(False)
    for layer in held:
        layer.training = False  # not eval(), which would reach the modules below it
    try:
        yield
    finally:
        for parameter in given:
            parameter.requires_grad_(True)
        for layer in held:
            layer.training = True


def bare_statistics(model: nn.Module) -> list[Named]:
    """The statistics of layers without parameters, which a pattern could not name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    bare = [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in model.named_modules()
        if _is_bare(module)
        for name, buffer in module.named_buffers()
    ]
    return [Named(name, buffer, holder(modules, name)) for name, buffer in bare]


def keep_in_eval_mode(module: nn.Module) -> None:
    """Keep the module in eval mode from now on.

    A hook does it, since `model.train()` changes the mode of every module.
    """
    module.training = False
    if not is_kept_in_eval_mode(module):
        module.register_forward_pre_hook(_return_to_eval_mode)


def is_kept_in_eval_mode(module: nn.Module) -> bool:
    """Whether `keep_in_eval_mode` was called for it."""
    return _return_to_eval_mode in module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage] (torch has no public way to ask)


def _return_to_eval_mode(module: nn.Module, inputs: Any) -> None:
    module.training = False  # not eval(), which would reach the modules below it


def _has_statistics(module: nn.Module) -> bool:
    return any(name in STATISTICS for name, _ in module.named_buffers(recurse=False))


def _is_bare(module: nn.Module) -> bool:
    return _has_statistics(module) and next(module.parameters(), None) is None


def _is_frozen(modules: Mapping[str, nn.Module], name: str, meant: set[int]) -> bool:
    module = modules[name]
    if _is_bare(module) and any(id(buffer) in meant for buffer in module.buffers()):
        return True
    own = list(module.parameters(recurse=False))
    while not own and name:
        name = name.rpartition(".")[0]
        own = list(modules[name].parameters())
    return not any(one.requires_grad for one in own) and any(id(one) in meant for one in own)


def idle_options(rules: Mapping[str, Any]) -> list[Problem]:
    """Warnings about options of the optimizer in rules of `param_groups` that freeze what they
    match, so that it has no optimizer.
    """
    frozen = [
        (name, rule)
        for name, rule in rules.items()
        if isinstance(rule, Mapping) and rule.get("frozen") is True
    ]
    found = [
        (f"param_groups.{name}.{key}", value)
        for name, rule in frozen
        for key, value in rule.items()
        if key not in _OF_FREEZING
    ]
    return [
        Problem(
            path,
            "has no effect: the rule freezes what it matches",
            value,
            hint=f"~{path} removes it",
        )
        for path, value in found
    ]


_OF_FREEZING = ("match", "frozen", "frozen_statistics", "frozen_until")
