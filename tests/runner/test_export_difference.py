"""What is reported about an export: which results are the same, how far apart others are, whether its weights could be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samewise.runner.exports.difference import difference
from samewise.runner.exports.format import Format
from samewise.runner.exports.runtimes import Runtime, Truth, try_runtime


class Echo(Format):
    """Returns its inputs times a factor; asking for its weights raises an error."""

    name, file = "echo", "model.txt"

    def __init__(self, *, factor: float = 1.0, error: Exception | None = None) -> None:
        self.factor, self.error = factor, error or NotImplementedError("none")

    def load(self, path: Path) -> Any:
        return lambda inputs: [self.factor * one for one in inputs.values()]

    def write(self, call: Any, path: Path) -> None:
        raise AssertionError

    def kinds(self, path: Path) -> list[str]:
        return []

    def weights(self, path: Path) -> dict[str, torch.Tensor]:
        raise self.error


def compare_with_model(tmp_path: Path, form: Format, *, tolerance: float = 1e-4) -> Runtime:
    """Compare with a model that returns its inputs."""
    (tmp_path / "model.txt").touch()
    values = {"x": torch.arange(3.0)}
    return try_runtime(form, tmp_path / "model.txt", Truth(values, values, {}), tolerance)


def test_results_within_the_tolerance_are_sound_and_their_distance_is_reported(tmp_path: Path) -> None:
    near, far = (compare_with_model(tmp_path, Echo(factor=1.01), tolerance=tolerance) for tolerance in (0.02, 0.005))
    assert (near.same, near.sound, far.same, far.sound) == (False, True, False, False)
    assert far.difference is not None
    assert far.difference.relative == pytest.approx(0.01, rel=1e-4)
    assert far.description.startswith("x differs by")


def test_ulps_count_the_steps_between_numbers() -> None:
    one = torch.tensor([1.0, -0.0, -1.0])
    other = torch.nextafter(torch.nextafter(one, torch.full_like(one, 9.0)), torch.full_like(one, 9.0))
    apart = difference({"x": one}, {"x": other})
    assert apart is not None
    assert apart.ulps == 2
    assert difference({"x": one}, {"x": one.clone()}) is None
    zeros = difference({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert zeros is not None  # other bits, but the same number
    assert (zeros.ulps, zeros.relative) == (0, 0.0)
