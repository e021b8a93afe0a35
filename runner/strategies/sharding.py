"""A model and its optimizer in shards (torch's DTensor), and how to reassemble them for
checkpoints, digests and averages of weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.states import is_known
from samewise.runner.strategies.layout import without_graphs
from samewise.runner.torch_private import BatchNorm, TorchDispatchMode, local_scalar_dense

REFUSED = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers whose arithmetic torch cannot do on shards."""


def shard(
    model: nn.Module,
    units: Sequence[str],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    output_dtype: torch.dtype | None,
    reshard: bool,
) -> None:
    """Shard a model's parameters over the processes, in place.

    Args:
        model: On its device.
        units: The names of the modules whose weights are gathered together, each for its own
            forward and backward pass; the model has the rest.
        mesh: The processes.
        policy: What weights and gradients are exchanged and computed in.
        output_dtype: What the model's own outputs are turned into; None: they stay.
        reshard: Free a unit's weights between its forward and backward pass.
    """
    if policy.param_dtype is not None:
        _normalise_in_float32(model)
    for parameter in (
        model.parameters()
    ):  # channels_last ones are not contiguous: torch shards only contiguous tensors
        parameter.data = parameter.data.contiguous()
    for name in reversed(units):  # submodules before their module
        fully_shard(
            model.get_submodule(name), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard
        )
    whole = MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, output_dtype, policy.cast_forward_inputs
    )
    fully_shard(model, mesh=mesh, mp_policy=whole, reshard_after_forward=False)
    for part in parts(model):
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
        part.set_gradient_divide_factor(1.0)  # the gradient of a step is a sum
    model.register_load_state_dict_pre_hook(_keep_shards)
    if all(parameter.device.type != "meta" for parameter in model.parameters()):
        _set_root(model)


def require_no_parameter_hooks(model: nn.Module) -> None:
    """Raise a ConfigError if a parameter has hooks: `shard` replaces it, and torch does not call
    them.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore[reportPrivateUsage]
            message = (
                "has a parameter with hooks (register_hook, or "
                "register_post_accumulate_grad_hook), which torch's FSDP does not call"
            )
            raise ConfigError(
                Problem("model", message, name, hint="strategy=elastic, or strategy=ddp")
            )


def _set_root(model: nn.Module) -> None:
    """Tell torch which module is the root: by default it is the first one called, and a recipe may
    call a part.
    """
    fully_shard.state(model)._lazy_init()  # pyright: ignore[reportFunctionMemberAccess, reportPrivateUsage]


def _normalise_in_float32(model: nn.Module) -> None:
    """Make batch norms that keep (float32) statistics convert their weights to float32 first, as
    torch requires.
    """
    for norm in model.modules():
        statistics: Any = norm
        if (
            isinstance(norm, BatchNorm)
            and statistics.affine
            and statistics.running_mean is not None
        ):
            given = dict[str, Any]()
            norm.register_forward_pre_hook(partial(_lend_float32, given))
            norm.register_forward_hook(partial(_take_back, given), always_call=True)


def _lend_float32(given: dict[str, Any], norm: nn.Module, inputs: Any) -> None:
    parameters = cast("dict[str, Any]", norm._parameters)  # pyright: ignore[reportPrivateUsage]
    given.update(parameters)
    parameters.update({name: parameter.float() for name, parameter in given.items()})


def _take_back(given: dict[str, Any], norm: nn.Module, inputs: Any, output: Any) -> None:
    cast("dict[str, Any]", norm._parameters).update(given)  # pyright: ignore[reportPrivateUsage]
    given.clear()


def parts(model: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered separately, the model first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def template(model: nn.Module) -> nn.Module:
    """A copy of an unsharded model without values: its parameters and buffers are on the `meta`
    device.
    """
    empty: dict[int, Any] = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
        for one in model.parameters()
    }
    empty |= {id(one): torch.empty_like(one, device="meta") for one in model.buffers()}
    return copy.deepcopy(model, empty | without_graphs(model))


@torch.no_grad()
def fill(copied: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Allocate a sharded `template`, and copy the sharded model's values."""
    copied.to_empty(device=device)
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        mine.copy_(theirs)
    for mine, theirs in zip(copied.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)
    _set_root(copied)


def whole(value: Any, *, is_main: bool) -> Any:
    """A state with its sharded tensors reassembled on rank 0's CPU.

    The other ranks, which must also call it, get empty tensors.
    """
    if isinstance(value, DTensor):
        gathered = cast(DTensor, value.detach()).full_tensor()
        return gathered.cpu() if is_main else torch.empty(0, dtype=value.dtype)
    if isinstance(value, Mapping):
        return {
            name: whole(item, is_main=is_main)
            for name, item in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return type(value)(whole(item, is_main=is_main) for item in cast("Sequence[Any]", value))  # pyright: ignore[reportUnknownVariableType, reportCallIssue]
    return value


def take_whole_states(optimizer: Optimizer) -> Optimizer:
    """Make the optimizer of a sharded model load unsharded states and read whole numbers.

    ConfigError if torch cannot step it on shards.
    """
    if isinstance(optimizer, REFUSED):
        name = type(optimizer).__name__
        raise ConfigError(
            Problem(
                "optimizer",
                f"torch cannot step {name} on sharded parameters",
                name,
                hint="another optimizer, or strategy=elastic",
            )
        )
    optimizer.register_load_state_dict_pre_hook(_shard_states)
    if not is_known(optimizer):
        optimizer.step = MethodType(_step_with_whole_numbers, optimizer)
    return optimizer


class _WholeNumbers(TorchDispatchMode):
    """Within it, a number that is read from a sharded tensor, as by `float`, is the whole tensor's.

    Torch gives each process its shard's.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is local_scalar_dense and isinstance(args[0], DTensor):
            return func(args[0].full_tensor())
        return func(*args, **(kwargs or {}))


def _step_with_whole_numbers(optimizer: Optimizer, *arguments: Any) -> Any:
    with _WholeNumbers():
        return type(optimizer).step(optimizer, *arguments)


def _like(value: Any, other: Any) -> Any:
    """This process's shard of an unsharded tensor, sharded like `other`; other values unchanged."""
    if (
        not isinstance(other, DTensor)
        or not isinstance(value, Tensor)
        or isinstance(value, DTensor)
        or value.shape != other.shape
    ):
        return value
    return distribute_tensor(
        value.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )


def _keep_shards(model: nn.Module, state: dict[str, Any], prefix: str, *further: Any) -> None:
    for name, held in model.state_dict().items():
        if prefix + name in state:
            state[prefix + name] = _like(state[prefix + name], held)


def _shard_states(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Torch itself reports groups that do not fit
    by_number = dict(zip(numbers, parameters, strict=False))
    shards = {
        number: _sharded_state(values, by_number.get(number))
        for number, values in state["state"].items()
    }
    return {**state, "state": shards}


def _sharded_state(values: Any, parameter: Any) -> Any:
    make = partial(_like, other=parameter)
    return (
        {name: make(value) for name, value in values.items()}
        if isinstance(values, Mapping)
        else make(values)
    )
