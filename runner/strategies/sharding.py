"""Shards of a model and its optimizer (torch's DTensor), and how to reassemble them.

Checkpoints, digests and averages of weights need whole tensors.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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
    offload: OffloadPolicy,
) -> None:
    """Shard a model's parameters over the processes, in place.

    Args:
        model: The model, on its device.
        units: Names of the modules whose weights are gathered together, each for its own forward
            and backward pass; the model itself has the rest.
        mesh: The processes.
        policy: Dtypes in which weights and gradients are exchanged and computed.
        output_dtype: Dtype to which the model's outputs are converted; None: unchanged.
        reshard: Whether to free a unit's weights between its forward and backward pass.
        offload: Where the shards are between their uses.
    """
    if policy.param_dtype is not None:
        _normalise_in_float32(model)
    # Torch shards contiguous tensors only; parameters in channels_last are not.
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    # Submodules come before the module that contains them.
    for name in reversed(units):
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            offload_policy=offload,
        )
    root_policy = MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, output_dtype, policy.cast_forward_inputs
    )
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=root_policy,
        reshard_after_forward=False,
        offload_policy=offload,
    )
    for part in parts(model):
        # Gloo cannot average, and the gradient of a step is a sum.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    model.register_load_state_dict_pre_hook(_keep_shards)
    if all(parameter.device.type != "meta" for parameter in model.parameters()):
        _set_root(model)


def require_no_parameter_hooks(model: nn.Module) -> None:
    """Raise a ConfigError if a parameter has hooks, which torch does not call on shards."""
    for name, parameter in model.named_parameters():
        ConfigError.raise_if(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks,  # pyright: ignore[reportPrivateUsage]
            "model",
            "has a parameter with hooks (register_hook, or "
            "register_post_accumulate_grad_hook), which torch's FSDP does not call",
            name,
            hint="strategy=elastic, or strategy=ddp",
        )


def _set_root(model: nn.Module) -> None:
    """Tell torch which module is the root."""
    # By default it is the first module called, and a recipe may call a part of the model.
    fully_shard.state(model)._lazy_init()  # pyright: ignore[reportFunctionMemberAccess, reportPrivateUsage]


def _normalise_in_float32(model: nn.Module) -> None:
    """Make batch norms with float32 statistics convert their weights first, as torch requires."""
    for norm in model.modules():
        statistics: Any = norm
        if (
            isinstance(norm, BatchNorm)
            and statistics.affine
            and statistics.running_mean is not None
        ):
            originals = dict[str, Any]()
            norm.register_forward_pre_hook(partial(_lend_float32, originals))
            norm.register_forward_hook(partial(_take_back, originals), always_call=True)


def _lend_float32(originals: dict[str, Any], norm: nn.Module, inputs: Any) -> None:
    parameters = cast("dict[str, Any]", norm._parameters)  # pyright: ignore[reportPrivateUsage]
    originals.update(parameters)
    parameters.update({name: parameter.float() for name, parameter in originals.items()})


def _take_back(originals: dict[str, Any], norm: nn.Module, inputs: Any, output: Any) -> None:
    cast("dict[str, Any]", norm._parameters).update(originals)  # pyright: ignore[reportPrivateUsage]
    originals.clear()


def parts(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose weights are gathered separately, the model first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def template(model: nn.Module) -> nn.Module:
    """Copy an unsharded model without values; its tensors are on the `meta` device."""
    empty: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for tensor in model.parameters()
    }
    empty |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in model.buffers()}
    return copy.deepcopy(model, empty | without_graphs(model))


@torch.no_grad()
def fill(copied: nn.Module, model: nn.Module) -> None:
    """Allocate a sharded `template`, and copy the sharded model's values."""
    copied.to_empty(device=next(model.parameters()).device)
    for target, source in zip(copied.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    for target, source in zip(copied.modules(), model.modules(), strict=True):
        for name, buffer in source.named_buffers(recurse=False):
            # On the device, where the weights may not be
            setattr(target, name, buffer.clone())
    _set_root(copied)


def whole(value: Any, *, is_main: bool) -> Any:
    """Reassemble a state's sharded tensors on rank 0's CPU.

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

    Raises:
        ConfigError: Torch cannot step the optimizer on shards.
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
    """Mode in which a number read from a sharded tensor, as by `float`, is the whole tensor's.

    Torch returns the number of each process's shard.
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


def like(value: Any, other: Any) -> Any:
    """Return this process's shard of an unsharded tensor, like `other`; other values unchanged."""
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
    for name, tensor in model.state_dict().items():
        if prefix + name in state:
            state[prefix + name] = like(state[prefix + name], tensor)


def _shard_states(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Torch itself reports groups that do not fit.
    by_number = dict(zip(numbers, parameters, strict=False))
    return {
        **state,
        "state": {
            number: _sharded_state(values, by_number.get(number))
            for number, values in state["state"].items()
        },
    }


def _sharded_state(values: Any, parameter: Any) -> Any:
    make = partial(like, other=parameter)
    return (
        {name: make(value) for name, value in values.items()}
        if isinstance(values, Mapping)
        else make(values)
    )
