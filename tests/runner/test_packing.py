"""Tensors packed into one come out as they went in: values, dtypes, and memory layout."""

import torch

from samewise.runner.strategies.packing import pack, unpack


def test_packed_tensors_come_out_unchanged() -> None:
    tensors = [
        torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.randn(5, dtype=torch.float64),
        torch.randn(6, 2).T,
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, 1),
    ]
    flat, offsets = pack(tensors)
    assert flat.dtype is torch.uint8
    assert offsets == [0, 432, 448, 496, 544, 560]
    assert len(flat) == 576
    for before, after in zip(tensors, unpack(flat, tensors, offsets), strict=True):
        assert torch.equal(before, after)
        assert (before.dtype, before.stride()) == (after.dtype, after.stride())
        assert after.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr(), "it has memory of its own"


def test_a_gap_between_tensors_is_zero() -> None:
    flat, offsets = pack([torch.full((3,), 255, dtype=torch.uint8), torch.full((2,), 255, dtype=torch.uint8)])
    assert offsets == [0, 16]
    assert flat.tolist() == [255] * 3 + [0] * 13 + [255] * 2 + [0] * 14
