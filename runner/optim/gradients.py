"""Norm of a model's gradients, and memory of their own for gradients that share it."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from samewise.runner.errors import Problem
from samewise.runner.torch_private import foreach_norm


def separate_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Copy gradients that share memory, before they are changed in place."""
    # Autograd keeps what a backward pass returns as a parameter's gradient without a copy (torch
    # 2.14.1). Parameters that are added to each other may get views of one tensor, for example a
    # class token and a position embedding in a compiled backward pass, or two offsets in any.
    # FSDP's shards are no Tensor; FSDP has copied their gradients.
    trained = [x for x in parameters if type(x.grad) is Tensor]
    # Torch refuses the data_ptr of a sparse gradient; `sparse_gradient` explains it.
    spans = sorted(
        (parameter.grad.data_ptr(), parameter.grad.nbytes, number)  # pyright: ignore[reportOptionalMemberAccess]
        for number, parameter in enumerate(trained)
    )
    if any(start + size > next_start for (start, size, _), (next_start, _, _) in pairwise(spans)):
        end = 0
        for start, size, number in spans:
            # The first of those that overlap keeps its memory
            if start < end:
                trained[number].grad = trained[number].grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
            end = max(end, start + size)


def leave_buffers(parameters: Sequence[nn.Parameter]) -> None:
    """Copy gradients out of the buffers that add up replicas, which the next step overwrites."""
    for parameter in parameters:
        if parameter.grad is not None and type(parameter.grad) is Tensor:
            parameter.grad = parameter.grad.clone()


def sparse_gradient(model: nn.Module) -> Problem | None:
    """Explain a step that failed because a parameter has a sparse gradient, or return None."""
    sparse_name = next(
        (
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and parameter.grad.is_sparse
        ),
        None,
    )
    if sparse_name is None:
        return None
    return Problem(
        "model",
        f"its parameter {sparse_name} has sparse gradients, which are not supported",
        hint="compute with sparse=False, for example in torch.nn.functional.embedding",
    )


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return float32[], the 2-norm of all tensors together, with the bits of `get_total_norm`.

    It takes a third of the time of torch's function where tensors are few and small.
    """
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) != 1:
        return nn.utils.get_total_norm(tensors)
    # On the CPU _foreach_norm runs this loop, and takes longer.
    norms = (
        [torch.linalg.vector_norm(tensor) for tensor in tensors]
        if tensors[0].is_cpu
        else foreach_norm(list(tensors))
    )
    return torch.linalg.vector_norm(torch.stack(norms))
