"""State around a forward pass, which another process must reproduce."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Generators:
    """States of Python's, NumPy's and torch's generators."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None = None) -> Generators:
        """Return the states of the CPU's generators, and the device's if it is CUDA."""
        cuda = (
            torch.cuda.get_rng_state(device)
            if device is not None and device.type == "cuda"
            else None
        )
        return cls(
            random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda
        )

    def set(self, device: torch.device) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def differ(self, device: torch.device | None = None) -> bool:
        """Return whether a generator has been drawn from since."""
        now = Generators.now(device)
        pairs = [
            (self.torch, now.torch),
            *([(self.cuda, now.cuda)] if self.cuda is not None and now.cuda is not None else []),
        ]
        tensors = all(torch.equal(before, after) for before, after in pairs)
        # Entry 1 is an array, whose `==` is no single truth value
        numpy = self.numpy[2:] == now.numpy[2:] and np.array_equal(self.numpy[1], now.numpy[1])
        return not (tensors and numpy and self.python == now.python)


@dataclass(frozen=True)
class Surroundings:
    """State around a forward pass: autocast and the generators."""

    device: str
    autocast: bool
    dtype: torch.dtype
    generators: Generators

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        kind = device.type
        return cls(
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            Generators.now(device),
        )

    @contextmanager
    def enter(self, device: torch.device) -> Generator[None]:
        self.generators.set(device)
        with torch.autocast(self.device, self.dtype, enabled=self.autocast):
            yield
