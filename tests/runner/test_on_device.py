"""Digests that any device can compute, and values that are read later."""

from typing import Any

import numpy as np
import pytest
import torch

from samewise.runner.records import on_device
from samewise.runner.records.on_device import begin

MASK = (1 << 64) - 1


def splitmix64(number: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014: the output after a state of `number`."""
    z = (number + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(data: bytes, row: int) -> int:
    words = [int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in range(0, len(data), 4)]
    total = 0
    for number, start in enumerate(range(0, len(words), row)):
        factor = [(splitmix64_of_index(place) | 1) for place in range(min(row, len(words) - start))]
        products = sum(word * one for word, one in zip(words[start : start + row], factor, strict=False))
        total += splitmix64((products + number * 0x9E3779B97F4A7C15) & MASK)
    return total & MASK


def splitmix64_of_index(place: int) -> int:
    """Output number `place` of the generator, started at 0: its state grows by a constant."""
    return splitmix64(place * 0x9E3779B97F4A7C15 & MASK)


def test_splitmix64_matches_the_published_values():
    assert [splitmix64_of_index(place) for place in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]


def digests_of(*tensors: Any) -> list[int]:
    return begin(tensors)()


@pytest.mark.parametrize("row", [4, 1 << 20])
def test_a_digest_matches_its_definition(row: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_device, "_ROW", row)
    monkeypatch.setattr(on_device, "_GROUP", 3 * row)
    tensors = [torch.randn(7, 3).to(dtype) for dtype in DTYPES] + [torch.tensor(2.5), torch.zeros(0), torch.zeros(5)]
    expected = [by_definition(bytes(one.reshape(-1).view(torch.uint8).numpy()) if one.numel() else b"", row) for one in tensors]
    assert digests_of(*tensors) == expected
    assert [digests_of(one)[0] for one in tensors] == expected
    assert digests_of(None, tensors[0], None) == [0, expected[0], 0]


def test_a_changed_bit_two_swapped_elements_and_an_extra_zero_change_the_digest():
    values = torch.randn(1000)
    flipped = [values.numpy().view(np.uint32).copy() for _ in range(32)]
    for bit, words in enumerate(flipped):
        words[7] ^= np.uint32(1 << bit)
    digests = digests_of(values, *(torch.from_numpy(words.view(np.float32)) for words in flipped))
    changed = values.clone()
    changed[[5, 6]] = changed[[6, 5]]
    last = values.clone()
    last[999] = torch.nextafter(last[999], torch.tensor(9.0))
    digests += digests_of(changed, last, values[:999], torch.zeros(4), None)
    assert len(set(digests)) == len(digests)
    assert len({one & 0xFFFFFFFF for one in digests}) == len(digests)  # the part that a trace keeps for a layer
