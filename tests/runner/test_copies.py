"""A copy of a batch shares nothing with it; where one is impossible, the error names the entry."""

from __future__ import annotations

import torch

from samewise.runner.data.copies import deep_copy


def test_a_copy_shares_no_memory():
    batch = {"x": [torch.zeros(2)]}
    deep_copy(batch)["x"][0].add_(1)
    assert torch.equal(batch["x"][0], torch.zeros(2))
