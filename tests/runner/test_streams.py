"""Randomness is a function of its key."""

import contextlib
import random

import numpy as np
import pytest
import torch

from samewise.runner.data import streams


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_stream_gives_the_same_numbers_whenever_it_is_entered():
    streams.enter(7, "sample", 3, 14)
    first = draw()
    draw()
    streams.enter(7, "sample", 3, 14)
    assert draw() == first


@pytest.mark.parametrize("other", [(8, "sample", 3, 14), (7, "step", 3, 14), (7, "sample", 14, 3), (7, "sample", 3), (7, "sample", 3, 14, 0)])
def test_another_key_gives_another_stream_for_each_generator(other):
    streams.enter(7, "sample", 3, 14)
    first = draw()
    streams.enter(*other)
    assert all(one != two for one, two in zip(first, draw(), strict=True))


def test_a_scope_leaves_the_generators_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with contextlib.suppress(ZeroDivisionError), streams.scope(5, "init"):
        draw()
        raise ZeroDivisionError
    assert draw() == expected


def test_keys_are_the_same_on_every_machine():
    assert streams.key(0, "init") == 2879138877524531326
    assert streams.key(-3, "sample", 1, 2**40) == 7601186314624158506


def test_a_separate_generator_does_not_touch_the_global_one():
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    torch.randperm(10, generator=streams.generator(0, "order", 0))
    assert torch.rand(()) == expected


@pytest.mark.parametrize("number", range(8))
def test_each_generator_is_seeded_with_as_much_of_the_key_as_it_takes(number):
    key = streams.key(7, "sample", number)
    streams.enter(7, "sample", number)
    expected = random.Random(key).random(), np.random.RandomState(key % 2**32).rand(), torch.rand((), generator=torch.Generator().manual_seed(key)).item()
    assert draw() == expected
    assert torch.equal(torch.rand(3, generator=streams.generator(7, "sample", number)), torch.rand(3, generator=torch.Generator().manual_seed(key)))
