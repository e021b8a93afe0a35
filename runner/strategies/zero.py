"""An optimizer whose state is sharded over the processes: torch's ZeroRedundancyOptimizer, with the checkpoints of the optimizer inside."""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.strategies.layout import Layout


@final
class DividedOptimizer(Layout):
    """Each process holds all weights, and the optimizer state for its share of them."""

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer, sharded: each process steps its share of the parameters and sends them to the others. It must not have stepped yet.

        ConfigError if its parameters are not all of one dtype, which torch asks for.
        """
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for group in optimizer.param_groups for parameter in group["params"]})
        if len(dtypes) > 1:
            raise ConfigError(Problem("strategy.zero", "needs parameters of one dtype", ", ".join(dtypes), expected="one", hint="strategy.zero=false"))
        accepted = inspect.signature(type(optimizer)).parameters
        every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
        settings = {key: value for key, value in optimizer.defaults.items() if every or key in accepted}
        return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **settings)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The complete state on rank 0, as the optimizer inside would have it; nothing on the other ranks. All ranks must call it."""
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer.state_dict()
        optimizer.consolidate_state_dict(to=0)
        if not self.peers.is_main:
            return {}
        state = optimizer.state_dict()
        for parameter_state in state["state"].values():  # torch moves all of it to the CPU, but fused kernels need the step count on the parameter's device
            for name, value in parameter_state.items():
                if isinstance(value, torch.Tensor):
                    parameter_state[name] = value.cpu()
        return state
