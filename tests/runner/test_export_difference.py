"""What an export is told of: which results are the same, how far others are apart, whether its weights could be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samewise.runner.exports.difference import difference
from samewise.runner.exports.format import Format
from samewise.runner.exports.runtimes import Runtime, Truth, try_runtime


class Echo(Format):
    """Gives its inputs, times a factor; whose weights are asked for raises an error."""

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


def held(tmp_path: Path, form: Format, *, tolerance: float = 1e-4) -> Runtime:
    """Against a model that gives what it is given."""
    (tmp_path / "model.txt").touch()
    values = {"x": torch.arange(3.0)}
    return try_runtime(form, tmp_path / "model.txt", Truth(values, values, {}, {}), tolerance)


def test_weights_that_cannot_be_looked_at_are_told_where_a_format_has_some_by_name(tmp_path: Path) -> None:
    """Equal results for these inputs do not say that the weights are the model's."""
    words = [held(tmp_path, Echo(error=error)).words for error in (OSError("cut off"), NotImplementedError("none"))]
    assert words == ["the same bits; its weights cannot be read: cut off", "the same bits"]


def test_results_are_sound_as_far_as_the_tolerance_goes_and_how_far_they_are_off_is_told(tmp_path: Path) -> None:
    near, far = (held(tmp_path, Echo(factor=1.01), tolerance=tolerance) for tolerance in (0.02, 0.005))
    assert (near.same, near.sound, far.same, far.sound) == (False, True, False, False)
    assert far.apart is not None
    assert far.apart.relative == pytest.approx(0.01, rel=1e-4)
    assert far.words.startswith("x differs by")


def test_ulps_are_the_numbers_of_the_format_in_between() -> None:
    one = torch.tensor([1.0, -0.0, -1.0])
    other = torch.nextafter(torch.nextafter(one, torch.full_like(one, 9.0)), torch.full_like(one, 9.0))
    apart = difference({"x": one}, {"x": other})
    assert apart is not None
    assert apart.ulps == 2
    assert difference({"x": one}, {"x": one.clone()}) is None
    zeros = difference({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert zeros is not None  # other bits, if no other number
    assert (zeros.ulps, zeros.relative) == (0, 0.0)
