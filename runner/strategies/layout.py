"""Layout of weights, gradients and optimizer states in a run's processes."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError
from samewise.runner.optim.gradients import total_norm
from samewise.runner.records.digest import begin
from samewise.runner.strategies.peers import Peers


class Layout:
    """Layout of most strategies: each process holds everything.

    A strategy that shards weights or states has another.
    """

    shards = 1
    """Number of parts into which the parameters are cut, one for each process."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step: the given one, or one with only this process's state."""
        return optimizer

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer from `share_optimizer`, for any strategy to load.

        All ranks must call it; only rank 0's result is complete.
        """
        return optimizer.state_dict()

    def whole(self, state: Any) -> Any:
        """Return a state without shards, as in one process, on rank 0. All ranks must call it."""
        return state

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor, or this process's shard of it, to be filled from a sharded checkpoint."""
        return torch.empty(shape, dtype=dtype)

    def digests(self, tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
        """Start to digest tensors on rank 0, and return a function that reads the digests.

        All ranks must call it.
        """
        return begin(tensors if self.peers.is_main else [], algorithm)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return float32[], the 2-norm of all gradients."""
        return total_norm(gradients)

    def copy_model(self, model: nn.Module) -> nn.Module:
        """Copy the run's model with the same layout, for an average of weights."""
        with torch.no_grad():
            for module in model.modules():
                # With parametrised weights, a recurrent layer holds tensors with a graph, which
                # cannot be copied.
                if isinstance(module, nn.RNNBase):
                    module._init_flat_weights()  # pyright: ignore[reportPrivateUsage]
        return copy.deepcopy(model, without_graphs(model))


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """Return replacements of a model's tensors with a graph, which `deepcopy` cannot copy.

    They are empty, since torch's hooks compute these tensors in each forward pass.

    Raises:
        ConfigError: Other code has computed such a tensor; the copy might need it.
    """
    memo = dict[int, Any]()
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        computed = {hook.name for hook in hooks if isinstance(hook, WeightNorm)}
        computed |= {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}  # pyright: ignore[reportPrivateUsage]
        for name, value in {**vars(module), **module._buffers}.items():  # pyright: ignore[reportPrivateUsage]
            if isinstance(value, Tensor) and not value.is_leaf:
                ConfigError.raise_if(
                    name not in computed,
                    "model",
                    f"{f'{path}.{name}'.lstrip('.')} has a graph, so that the model cannot "
                    "be copied, for example for an average of its weights",
                    hint="compute it in forward; for a weight, "
                    "torch.nn.utils.parametrize and "
                    "parametrizations.weight_norm do so",
                )
                memo[id(value)] = torch.empty(0)
    return memo
