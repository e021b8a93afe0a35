"""Square roots on the CPU that are the same on every CPU.

torch takes them from MKL, which begins with the processor's approximation of 1/sqrt(x) (`rsqrtps`): AMD's is not Intel's, whatever MKL_CBWR says, and
one root in six is not the nearest number. NumPy's instruction (`sqrtps`) rounds correctly everywhere, as IEEE 754 asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_registered: list[Any] = []


def use_exact_roots(*, wanted: bool) -> None:
    """Have `torch.sqrt` on the CPU round correctly from now on, in this process, or leave it to MKL again.

    `x ** 0.5` goes to MKL all the same. Norms, batch norm and the fused optimizers have correct roots of their own.
    """
    if wanted == bool(_registered):
        return
    if not wanted:
        _registered.pop()._destroy()
        return
    library = torch.library.Library("aten", "IMPL")
    for name, function in (("sqrt", _sqrt), ("sqrt_", _sqrt_in_place), ("sqrt.out", _sqrt_out)):
        library.impl(name, function, "CPU", allow_override=True)
    _registered.append(library)


def _sqrt(value: Tensor) -> Tensor:
    """Of any shape and dtype, as torch's: integers give the default dtype."""
    dtype = value.dtype if value.is_floating_point() or value.is_complex() else torch.get_default_dtype()
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    found = torch.empty_like(value, dtype=computed, requires_grad=False)
    with np.errstate(invalid="ignore"):  # NaN, as torch gives
        np.sqrt(value.detach().to(computed).resolve_conj().resolve_neg().numpy(), out=found.numpy())
    return found.to(dtype)


def _sqrt_in_place(value: Tensor) -> Tensor:
    return value.copy_(_sqrt(value))


def _sqrt_out(value: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(value.shape).copy_(_sqrt(value))
