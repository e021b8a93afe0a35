"""How weights, gradients and optimizer states lie in a run's processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samewise.runner.optim.norm import total_norm
from samewise.runner.processes.peers import Peers
from samewise.runner.records.digest import begin


class Layout:
    """Each process holds all of them: what most strategies do. One that divides them has a layout of its own."""

    shards = 1
    """Into how many parts the parameters are cut, each process holding one."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step: this new one, or one like it that keeps only this process's share of the state."""
        return optimizer

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What `share_optimizer` gave, as a state that any strategy can load. All ranks must call it; only rank 0's answer is whole."""
        return optimizer.state_dict()

    def whole(self, state: Any) -> Any:
        """A state as one process would hold it, with nothing in shards, on rank 0. All ranks must call it."""
        return state

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """A tensor, or this process's shard of one, to be filled from a checkpoint in shards."""
        return torch.empty(shape, dtype=dtype)

    def digests(self, tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
        """Begin to digest tensors, on rank 0, and give what reads the digests. All ranks must call it."""
        return begin(tensors if self.peers.is_main else [], algorithm)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """float32[]: the 2-norm of all gradients together."""
        return total_norm(gradients)

    def copy_model(self, model: nn.Module) -> nn.Module:
        """A copy of the run's model that lies as it does, for an average of weights."""
        return copy.deepcopy(model)
