"""The device's generator: draws on it leave the CPU's where it stands."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class DeviceGenerator:
    """Where the pretended device's random numbers come from."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()
        self._draws = 0

    def seed(self, number: int) -> None:
        self.state = torch.Generator().manual_seed(number).get_state()

    def get_offset(self) -> int:
        """Grows with each draw, as CUDA's does."""
        return self._draws

    def get_state(self) -> Tensor:
        return self.state.clone()

    def set_state(self, state: Tensor) -> None:
        self.state = state.clone()

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Within it torch's default generator is this one."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        try:
            yield
        finally:
            self.state = torch.default_generator.get_state()
            self._draws += 1
            torch.default_generator.set_state(before)


GENERATOR = DeviceGenerator()
