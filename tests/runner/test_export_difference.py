"""What is reported about an export: which results are the same, how far apart others are, whether its weights could be read."""

import torch

from samewise.runner.exports.difference import difference


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
