"""Gradients of a phase: averaged, clipped, gathered only by its own parameters, and checked for nonfinite numbers."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Phase
from samewise.runner.precision import Precision
from samewise.runner.strategies.base import Tally
from samewise.runner.training.guards.finite import nonfinite_names
from samewise.runner.training.phase import TrainingPhase


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e3])
@pytest.mark.parametrize(("count", "nominal", "size"), [(8.0, 8.0, 1.0), (6.0, 8.0, 1.0), (16.0, 8.0, 1e-4), (3.0, 1.0, 1e-5)])
def test_gradients_are_averaged_and_clipped_as_in_torch(count: float, nominal: float, size: float, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    sums = [size * torch.randn(5, 3), size * torch.randn(4), None]
    expected = [None if one is None else one.double() * nominal / count for one in sums]
    norm = math.sqrt(sum(one.square().sum().item() for one in expected if one is not None))
    for parameter, one in zip(parameters, sums, strict=True):
        parameter.grad = one
    phase = TrainingPhase(0, Phase(), SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1), clip_norm=clip_norm)
    assert phase.condition_gradients(Tally(count, nominal), Precision()).item() == pytest.approx(norm, rel=1e-6)
    shrunk = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
    for parameter, one in zip(parameters, expected, strict=True):
        if one is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.double(), one * shrunk, rtol=1e-6, atol=0)


def test_clipping_leaves_what_is_not_finite_where_it_is() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    one.grad, other.grad = torch.ones(2), torch.tensor([1.0, torch.nan, 2.0])
    assert TrainingPhase(0, Phase(), SGD([one, other], lr=0.1), clip_norm=1.0).condition_gradients(Tally(1.0), Precision()).isnan()
    assert nonfinite_names([("one", one.grad), ("other", other.grad)]) == ["other"]


def test_a_step_that_counts_nothing_is_an_error_with_its_phase() -> None:
    for phase, said in {Phase(): "the loss counts nothing", Phase("critic"): "the loss of phase 'critic' counts nothing"}.items():
        with pytest.raises(ConfigError, match=said):
            TrainingPhase(0, phase, SGD([nn.Parameter(torch.zeros(1))], lr=0.1)).condition_gradients(Tally(0.0, 8.0), Precision())


def test_only_the_parameters_of_a_phase_need_gradients_within_it() -> None:
    mine, others = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    phase = TrainingPhase(0, Phase(), SGD([mine], lr=0.1), untrained=[others])
    with contextlib.suppress(ZeroDivisionError), phase.training(0):
        assert (mine.requires_grad, others.requires_grad) == (True, False)
        raise ZeroDivisionError
    assert (mine.requires_grad, others.requires_grad) == (True, True)


NOT_FINITE: dict[str, Any] = {
    "double": torch.tensor([1.0, math.nan], dtype=torch.float64),
    "half": torch.tensor([math.inf], dtype=torch.float16),
    "brain": torch.tensor([-math.inf], dtype=torch.bfloat16),
    "eight": torch.tensor([math.inf]).to(torch.float8_e5m2),
    "other eight": torch.tensor([math.nan]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([complex(0, math.inf)]),
}

FINITE: dict[str, Any] = {
    "number": 3,
    "nothing": None,
    "text": "inf",
    "whole": torch.tensor([2**40]),
    "truth": torch.tensor([True]),
    "empty": torch.zeros(0),
    "large": torch.tensor([3e38, 3e38]),
    "small eight": torch.tensor([0.5]).to(torch.float8_e4m3fn),
    "complex one": torch.tensor([1j]),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_nonfinite_tensors_of_every_dtype_are_named(name: str) -> None:
    assert nonfinite_names([*FINITE.items(), (name, NOT_FINITE[name])]) == [name]


def test_all_nonfinite_tensors_are_named_in_order_and_finite_ones_are_not() -> None:
    assert nonfinite_names([*NOT_FINITE.items(), *FINITE.items()]) == list(NOT_FINITE)
    assert nonfinite_names(FINITE.items()) == []
