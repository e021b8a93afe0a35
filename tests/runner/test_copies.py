"""A copy of a batch shares nothing with it; where one is impossible, the error names the entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from samewise.runner.data.copies import deep_copy
from samewise.runner.errors import ConfigError


class Sub(torch.Tensor):
    """A tensor whose `new_empty` gives a plain one."""


@dataclass
class Pair:
    x: Any
    y: Any


def test_a_copy_shares_no_memory():
    batch = {"x": [torch.zeros(2)]}
    deep_copy(batch)["x"][0].add_(1)
    assert torch.equal(batch["x"][0], torch.zeros(2))


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": 1, "csr": torch.eye(2).to_sparse_csr()}, r"'csr' in a batch is a sparse_csr tensor, which cannot be copied: NotImplementedError: "),
        ([{"ragged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}], r"'ragged' in a batch is a nested tensor, which cannot be copied"),
        ({"a": {"b": [torch.ones(2).as_subclass(Sub)]}}, r"'b' in a batch is of type Sub, which cannot be copied"),
        ((Pair(1, {}.keys()),), r"'y' in a batch is of type dict_keys, which cannot be copied: TypeError: cannot pickle 'dict_keys' object"),
        ([{}.keys()], r"an entry of a batch is of type dict_keys, which cannot be copied"),
    ],
)
def test_the_entry_that_cannot_be_copied_is_named(batch, told):
    with pytest.raises(ConfigError) as caught:
        deep_copy(batch)
    assert re.match(told, caught.value.problems[0].message)
