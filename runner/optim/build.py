"""Builds optimizers from the config, and records which implementation does the arithmetic."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.interfaces import Phase
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.stepping import begin_late_momentum

FUSED_ON: Final = ("cpu", "cuda")
"""Devices whose fused kernels are used.

On the CPU they round square roots correctly. The other implementations call a library that does not
do so on every processor.
"""

Instantiate = Callable[[Any, str], Any]
"""Makes an object from a config node; the second argument is the node's path, for messages."""


def build_optimizers(
    optimizer: Mapping[str, Any],
    rules: Mapping[str, Any] | None,
    model: nn.Module,
    phases: Sequence[Phase],
    *,
    instantiate: Instantiate,
) -> dict[str, Optimizer]:
    """Build one optimizer per phase, in order.

    Args:
        optimizer: The config's `optimizer`: one for all phases, or one for each.
        rules: The config's `param_groups`.
        model: The model, on its device; what the rules freeze is frozen.
        phases: The recipe's phases.
        instantiate: Makes a component; called with `_partial_`.

    Raises:
        ConfigError: Names, options or values are wrong, or the optimizer cannot train this model.
    """
    nodes = _nodes(plain(optimizer), phases)
    options: dict[str, Any] = plain(rules) or {}
    optimizers: dict[str, Optimizer] = {}
    for phase in phases:
        node, path = nodes[phase.name]
        optimizers[phase.name] = _build(
            instantiate({**node, "_partial_": True}, path),
            parameter_groups(model, options, prefixes=phase.modules),
            path,
        )
    return optimizers


def describe(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Describe the optimizers for the record: classes, implementations, and groups with options."""
    return {
        name: {
            "class": type(optimizer).__qualname__,
            "implementation": implementation(optimizer),
            "groups": [_describe_group(group) for group in optimizer.param_groups],
        }
        for name, optimizer in optimizers.items()
    }


def implementation(optimizer: Optimizer) -> str:
    """Return which kernels do the arithmetic: `fused`, `foreach` or `loop`.

    Fused kernels round differently from the other two.
    """
    if optimizer.defaults.get("fused"):
        return "fused"
    return "foreach" if optimizer.defaults.get("foreach") else "loop"


def _nodes(
    optimizer: Mapping[str, Any], phases: Sequence[Phase]
) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Return each phase's config node and its path."""
    names = [phase.name for phase in phases]
    if "_target_" in optimizer:
        return dict.fromkeys(names, (optimizer, "optimizer"))
    configured = [str(name) for name in optimizer]
    unknown = [
        Problem(f"optimizer.{name}", "is not a phase of the recipe", hint=nearest(name, names))
        for name in configured
        if name not in names
    ]
    missing = [
        Problem(
            "optimizer",
            f"has no optimizer for the recipe's phase '{name}'",
            configured,
            f"one for each of: {', '.join(names)}",
        )
        for name in names
        if name not in configured
    ]
    ConfigError.raise_all([*unknown, *missing])
    return {name: (optimizer[name], f"optimizer.{name}") for name in names}


def _build(partial: functools.partial[Any], groups: list[dict[str, Any]], path: str) -> Optimizer:
    make = partial.func
    settings = {key: _plain(value) for key, value in partial.keywords.items()}
    _require_no_closure(make, path)
    parameters = inspect.signature(make).parameters
    accepted = set(parameters) - {"params"}
    _resolve(
        groups,
        settings.get("lr", parameters["lr"].default if "lr" in accepted else None),
        accepted,
        path,
    )
    _try_options(make, settings, groups)
    settings |= _choice(make, settings, groups, accepted)
    try:
        optimizer = make(groups, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(_explain(error, settings, path)) from None
    # It would fail for a parameter whose first gradient comes later than the others'
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults.get("fused"):
        optimizer.register_step_pre_hook(begin_late_momentum)
    return optimizer


def _resolve(groups: list[dict[str, Any]], lr: Any, accepted: set[str], path: str) -> None:
    """Convert factors to learning rates, and refuse options that the optimizer does not have."""
    problems: dict[str, Problem] = {}
    for group in groups:
        factor = group.pop("lr_factor", None)
        ConfigError.raise_if(
            factor is not None and not isinstance(lr, int | float),
            f"{path}.lr",
            "is needed by lr_factor or layer_decay of param_groups",
            lr,
            "a number",
        )
        if factor is not None:
            group["lr"] = factor * lr
        for key in group.keys() - {"name", "params"}:
            group[key] = _plain(group[key])
            if key not in accepted:
                option_path = f"{_where(group)}.{key}"
                problems[option_path] = Problem(
                    option_path,
                    f"is not an option of {path}",
                    group[key],
                    hint=nearest(key, {*accepted, "lr_factor", "frozen"}),
                )
    ConfigError.raise_all(problems.values())


def _try_options(
    make: Callable[..., Any], settings: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """Check each group's options with torch's constructors, which do not check groups."""
    if not make.__module__.startswith("torch.optim"):
        return
    problems: dict[str, Problem] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("name", "params")}
        try:
            # A matrix, as torch.optim.Muon takes nothing else
            make([nn.Parameter(torch.eye(1))], **{**settings, **options}) if options else None
        except (ValueError, TypeError, RuntimeError) as error:
            problem = _explain(error, options, _where(group))
            problems[problem.path] = problem
    ConfigError.raise_all(problems.values())


def _where(group: Mapping[str, Any]) -> str:
    # Groups with a layer-wise factor are named `RULE x FACTOR`
    return f"param_groups.{str(group['name']).partition(' x ')[0]}"


def _choice(
    make: Callable[..., Any],
    settings: Mapping[str, Any],
    groups: list[dict[str, Any]],
    accepted: set[str],
) -> dict[str, bool]:
    """Choose fused kernels where they exist, else foreach on CUDA and the loop elsewhere.

    Empty if the config decides.
    """
    if settings.get("fused") is not None or settings.get("foreach") is not None:
        return {}
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    # DTensors have this attribute; their module is slow to import.
    in_shards = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    # Only Adam's fused kernels take shards.
    if in_shards and not (isinstance(make, type) and issubclass(make, torch.optim.Adam)):
        return {"foreach": devices == {"cuda"}} if "foreach" in accepted else {}
    # Adagrad has fused kernels for the CPU only.
    only_cpu = isinstance(make, type) and issubclass(make, torch.optim.Adagrad)
    if (
        "fused" in accepted
        and devices <= set(FUSED_ON[:1] if only_cpu else FUSED_ON)
        # As torch requires where it chooses itself (`_default_to_fused_or_foreach`)
        and all(parameter.is_floating_point() for parameter in parameters)
    ):
        return {"fused": True}
    return {"foreach": devices == {"cuda"}} if "foreach" in accepted else {}


def _require_no_closure(make: Callable[..., Any], path: str) -> None:
    """Raise a ConfigError for an optimizer such as LBFGS, which evaluates the loss itself."""
    if not isinstance(make, type):
        return
    arguments = [
        x.name
        for x in list(inspect.signature(make.step).parameters.values())[1:]
        if x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    ConfigError.raise_if(
        arguments,
        path,
        f"{make.__name__}.step needs {', '.join(arguments)}: samewise calls it with no argument, "
        "and supports no closure that evaluates the loss again",
        hint="choose another optimizer; `samewise list optimizer` shows them",
    )


def _explain(error: Exception, settings: Mapping[str, Any], path: str) -> Problem:
    """Place a constructor's error at the setting that it names, if it names one."""
    message = str(error)
    setting_names = (
        # Torch's messages are of the kind `Invalid learning rate: -1.0`
        message.replace("learning rate", "lr")
        .replace("beta parameter", "betas")
        .split(":")[0]
        .split()
    )
    key = next((key for key in settings if key in setting_names), None)
    return (
        Problem(f"{path}.{key}", message, settings[key])
        if key
        else Problem(path, message, dict(settings))
    )


def _describe_group(group: Mapping[str, Any]) -> dict[str, Any]:
    tensors: list[torch.Tensor] = group["params"]
    # `implementation` records the choice of kernels
    excluded = ("params", "param_names", "name", "fused", "foreach")
    return {
        "name": group.get("name", ""),
        "tensors": len(tensors),
        "elements": sum(x.numel() for x in tensors),
        **{
            key: value
            for key, value in group.items()
            if key not in excluded and not key.startswith("initial_")
        },
    }


def _plain(value: Any) -> Any:
    return (
        # YAML has lists where optimizers take tuples, such as `betas`
        tuple(cast("Sequence[Any]", value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )
