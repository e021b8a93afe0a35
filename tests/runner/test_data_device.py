"""The tensors of a batch on their way to the device; tests/pretend/test_prefetcher.py has the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch

from samewise.runner.data.device import map_tensors


class Named(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


def test_the_tensors_of_a_batch_are_found_in_lists_tuples_dicts_and_namedtuples() -> None:
    one = torch.zeros(2)
    found = map_tensors(lambda tensor: tensor + 1, {"a": Named(one, [one]), "b": (one, "text")})
    assert isinstance(found["a"], Named)
    assert [*found["a"].x, *found["a"].y[0], *found["b"][0]] == [1.0] * 6
    assert found["b"][1] == "text"
