"""The 2-norm of a model's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samewise.runner.torch_private import foreach_norm


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """float32[]: the 2-norm of all tensors together, to the bits of torch's `get_total_norm`, in a
    third of its time where they are few and small.
    """
    if len({(one.device, one.dtype) for one in tensors}) != 1:
        return nn.utils.get_total_norm(tensors)
    if tensors[0].is_cpu:  # where _foreach_norm is this loop, and takes longer
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(one) for one in tensors])
        )
    return torch.linalg.vector_norm(torch.stack(foreach_norm(list(tensors))))  # as torch does it
