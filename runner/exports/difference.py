"""Measure how much two runtimes' results differ."""

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


def difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Difference | None:
    """Return the largest difference from the expected results; None if the bits are the same.

    Raises:
        ValueError: The tensors differ in name, shape or dtype.
    """
    if list(expected) != list(actual):
        raise ValueError(f"gives {', '.join(actual) or 'nothing'}, not {', '.join(expected)}")
    differences = list[Difference]()
    for name, tensor in expected.items():
        result = actual[name]
        if (tensor.shape, tensor.dtype) != (result.shape, result.dtype):
            raise ValueError(f"gives {name} as {_form(result)}, not as {_form(tensor)}")
        if not torch.equal(_bits(tensor), _bits(result)):
            differences.append(Difference(name, _relative(tensor, result), _ulps(tensor, result)))
    return max(differences, key=lambda x: x.relative, default=None)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bits(tensor: Tensor) -> Tensor:
    integer = _WHOLE.get(tensor.dtype)
    return tensor.contiguous() if integer is None else tensor.contiguous().view(integer)


def _relative(expected: Tensor, actual: Tensor) -> float:
    """Return the largest error, relative to the largest expected number."""
    a, b = expected.double(), actual.double()
    if not bool((a.isfinite() == b.isfinite()).all()):
        return float("inf")
    error = (a - b).nan_to_num().abs().max().item()
    return error / (a.nan_to_num(posinf=0, neginf=0).abs().max().item() or 1.0)


def _ulps(expected: Tensor, actual: Tensor) -> int:
    """Return the largest distance in units in the last place; 0 for integers."""
    if expected.dtype not in _WHOLE:
        return 0
    # Bits of floating-point numbers, mirrored for negative ones, are integers in the same order
    a, b = (_bits(x).to(torch.int64) for x in (expected, actual))
    lowest = torch.iinfo(_WHOLE[expected.dtype]).min
    return int(
        # In float64, since the distance of two int64 may exceed int64
        (torch.where(a < 0, lowest - a, a).double() - torch.where(b < 0, lowest - b, b).double())
        .abs()
        .max()
        .item()
    )
