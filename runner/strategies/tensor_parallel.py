"""Strategy on torch's tensor parallelism: the processes divide the computation of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError
from samewise.runner.strategies.base import Forward, Tally, add_tallies
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import OneReplica
from samewise.runner.strategies.sharding import like


@final
@dataclass(kw_only=True, eq=False)
class TensorParallel(OneReplica):
    """Layers divided among the processes by the model's own plan (`parallelize_module`).

    All processes compute with the same samples. Each has all weights and the optimizer's state, of
    which its layers compute with a part, and gets all gradients; activations and computation are
    divided. `RankStrategy` has the other settings; `nproc=null` means `parts`.

    Args:
        rank_invariant: False: all settings belong to the fingerprint, except those of waiting and
            restarting.
        parts: Number of processes among which each layer of the plan is divided.
    """

    rank_invariant: bool = False
    parts: int = 2  # pyright: ignore[reportIncompatibleMethodOverride]

    def require_fit(self, model: nn.Module) -> None:
        ConfigError.raise_if(
            not callable(getattr(model, "tensor_parallel_plan", None)),
            "model",
            "declares no plan by which to divide its layers",
            type(model).__name__,
            "a method tensor_parallel_plan() with parallelize_module's plan",
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        self.require_fit(model)
        self._model = self._network = model
        if isinstance(self.peers, Processes):
            mesh = init_device_mesh(self._device.type, (self.parts,))
            plan: Any = model.tensor_parallel_plan
            self._network = parallelize_module(self.layout.copy_model(model), mesh, plan())
        return self._network

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self._accumulate)

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        self.peers.doing = "computing with divided layers"
        pairs = list(zip(self._model.parameters(), self._network.parameters(), strict=True))
        with torch.no_grad():
            for whole, part in pairs:
                part.requires_grad_(whole.requires_grad).copy_(like(whole, part))
            for module, divided in zip(self._model.modules(), self._network.modules(), strict=True):
                divided.training = module.training
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(divided, name, buffer)
        tallies = super().carry(micro_batches, forward)
        for whole, part in pairs:
            gradient, part.grad = part.grad, None
            whole.grad = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return tallies

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        # Every process has the tallies of all micro-batches
        return add_tallies(self.gather(tallies)[0][: len(tallies)])
