"""The layout of weights, gradients and optimizer states in a run's processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.gradients import total_norm
from samewise.runner.records.digest import begin
from samewise.runner.strategies.peers import Peers


class Layout:
    """Each process holds everything, as in most strategies.

    A strategy that shards them has another layout.
    """

    shards = 1
    """Into how many parts the parameters are cut, each process holding one."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step: this new one, or one like it that holds only this process's share
        of the state.
        """
        return optimizer

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer from `share_optimizer`, loadable by any strategy.

        All ranks must call it; only rank 0's result is complete.
        """
        return optimizer.state_dict()

    def whole(self, state: Any) -> Any:
        """A state without shards, as in one process, on rank 0. All ranks must call it."""
        return state

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """A tensor, or this process's shard of it, to be filled from a checkpoint in shards."""
        return torch.empty(shape, dtype=dtype)

    def digests(self, tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
        """Start to digest tensors, on rank 0.

        Return a function that reads the digests. All ranks must call it.
        """
        return begin(tensors if self.peers.is_main else [], algorithm)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """float32[]: the 2-norm of all gradients."""
        return total_norm(gradients)

    def copy_model(self, model: nn.Module) -> nn.Module:
        """A copy of the run's model with the same layout, for an average of weights."""
        with torch.no_grad():
            for module in model.modules():
                if isinstance(
                    module, nn.RNNBase
                ):  # of parametrised weights, it holds tensors with a graph, which cannot be copied
                    module._init_flat_weights()  # pyright: ignore[reportPrivateUsage]
        return copy.deepcopy(model, without_graphs(model))


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """What stands for a model's tensors with a graph in a `deepcopy`, which cannot copy them: empty
    ones, since torch's hooks make them in each forward pass.

    ConfigError for one that another part of the code has made: the copy might need it.
    """
    memo = dict[int, Any]()
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        made = {hook.name for hook in hooks if isinstance(hook, WeightNorm)}
        made |= {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}  # pyright: ignore[reportPrivateUsage]
        for name, one in {**vars(module), **module._buffers}.items():  # pyright: ignore[reportPrivateUsage]
            if isinstance(one, Tensor) and not one.is_leaf:
                if name not in made:
                    words = (
                        f"{f'{path}.{name}'.lstrip('.')} has a graph, so that the model cannot "
                        "be copied, for example for an average of its weights"
                    )
                    hint = (
                        "compute it in forward; for a weight, torch.nn.utils.parametrize and "
                        "parametrizations.weight_norm do so"
                    )
                    raise ConfigError(Problem("model", words, hint=hint))
                memo[id(one)] = torch.empty(0)
    return memo
