"""What a step may not do to the tensors that a model saves, beside what test_assigned_buffers.py trains."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError
from samewise.runner.strategies.single import Single
from samewise.runner.training.guards.held_tensors import HeldTensors


class WithQueue(nn.Module):
    """Its queue grows, and so does a tensor that it saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))
        self.extra = torch.zeros(0)

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state


class Resizing(WithQueue):
    """Takes a queue of any length from a checkpoint."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state_dict[f"{prefix}queue"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_buffer_that_is_saved_keeps_its_shape_unless_its_module_loads_any() -> None:
    for part, fits in ((WithQueue(), False), (Resizing(), True)):
        model = nn.Sequential(part, nn.BatchNorm1d(2))
        run: Any = SimpleNamespace(model=model, strategy=Single())
        held = HeldTensors(run)
        part.extra = torch.zeros(3)
        held.before_checkpoint(run)
        part.queue = torch.zeros(3)
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"turns 0.queue in the model's state_dict from float32 \[0\] into float32 \[3\]"):
            held.before_checkpoint(run)
