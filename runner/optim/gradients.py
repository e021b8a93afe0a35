"""The 2-norm of a model's gradients, and memory of their own for them: autograd may let several share
it, and those of replicas are in buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from samewise.runner.errors import Problem
from samewise.runner.torch_private import foreach_norm


def separate_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Copy gradients that share memory, before anything is added to them or multiplied in place,
    which would change the others too.

    Autograd keeps what a backward pass returns as a parameter's gradient without a copy (seen in
    torch 2.14.1). Parameters that are added to each other may get views of one tensor, for example
    a class token and a position embedding in a compiled backward pass, or two offsets in any.
    """
    # No shard: FSDP has copied the gradients
    held = [one for one in parameters if type(one.grad) is Tensor]
    # torch refuses the data_ptr of a sparse gradient; `sparse_gradient` explains it
    spans = sorted(
        (one.grad.data_ptr(), one.grad.nbytes, number)  # pyright: ignore[reportOptionalMemberAccess]
        for number, one in enumerate(held)
    )
    if any(start + size > other for (start, size, _), (other, _, _) in pairwise(spans)):
        end = 0
        for start, size, number in spans:
            if start < end:
                held[number].grad = held[number].grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
            end = max(end, start + size)


def leave_buffers(parameters: Sequence[nn.Parameter]) -> None:
    """Copy gradients, which may be in buffers in which replicas are added up: the next step
    overwrites these.
    """
    for one in parameters:
        if one.grad is not None and type(one.grad) is Tensor:
            one.grad = one.grad.clone()


def sparse_gradient(model: nn.Module) -> Problem | None:
    """The problem if a parameter has a sparse gradient, after a step that failed.

    Otherwise None.
    """
    found = next(
        (
            name
            for name, one in model.named_parameters()
            if one.grad is not None and one.grad.is_sparse
        ),
        None,
    )
    if found is None:
        return None
    hint = "compute with sparse=False, for example in torch.nn.functional.embedding"
    return Problem(
        "model", f"its parameter {found} has sparse gradients, which are not supported", hint=hint
    )


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
