"""Measures how much two runtimes' results differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from samewise.runner.results import Difference

_WHOLE = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Difference | None:
    """The largest difference from the expected results, None if the bits are the same.

    ValueError unless the tensors agree in name, shape and dtype.
    """
    if list(expected) != list(found):
        raise ValueError(f"gives {', '.join(found) or 'nothing'}, not {', '.join(expected)}")
    apart = list[Difference]()
    for name, tensor in expected.items():
        other = found[name]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            raise ValueError(f"gives {name} as {_form(other)}, not as {_form(tensor)}")
        if not torch.equal(_bits(tensor), _bits(other)):
            apart.append(Difference(name, _relative(tensor, other), _ulps(tensor, other)))
    return max(apart, key=lambda one: one.relative, default=None)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bits(tensor: Tensor) -> Tensor:
    whole = _WHOLE.get(tensor.dtype)
    return tensor.contiguous() if whole is None else tensor.contiguous().view(whole)


def _relative(one: Tensor, other: Tensor) -> float:
    a, b = one.double(), other.double()
    if not bool((a.isfinite() == b.isfinite()).all()):
        return float("inf")
    error = (a - b).nan_to_num().abs().max().item()
    return error / (a.nan_to_num(posinf=0, neginf=0).abs().max().item() or 1.0)


def _ulps(one: Tensor, other: Tensor) -> int:
    """Map floating-point numbers to integers in the same order: their bits, mirrored for negative
    numbers.
    """
    if one.dtype not in _WHOLE:
        return 0
    a, b = (_bits(side).to(torch.int64) for side in (one, other))
    least = torch.iinfo(_WHOLE[one.dtype]).min
    return int(
        (torch.where(a < 0, least - a, a).double() - torch.where(b < 0, least - b, b).double())
        .abs()
        .max()
        .item()
    )
