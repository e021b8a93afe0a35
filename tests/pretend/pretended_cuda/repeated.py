"""Whether a model gives the same gradients twice on a CUDA device, whether a real or a pretended one."""

import torch
from torch import Tensor, nn

from samewise.runner.data import streams


def require_repeatable(model: nn.Module, *inputs: Tensor) -> None:
    """Compute a model's gradients twice in strict mode, with the same random numbers.

    Raises:
        AssertionError: the gradients differ.
        RuntimeError: an operator is not deterministic.
    """
    model.cuda().train()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (_gradients(model, [one.cuda() for one in inputs], buffers) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    differing = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert first
    assert not differing


def _gradients(model: nn.Module, inputs: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, by the parameters' names."""
    model.zero_grad()
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    with streams.scope(0, "step", 7):
        model(*inputs).square().sum().backward()
    return {name: value.grad.cpu() for name, value in model.named_parameters() if value.grad is not None}
