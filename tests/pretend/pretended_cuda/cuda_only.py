"""Operators that torch has on CUDA alone, computed on the CPU, and the functions that choose them in C++, by a test that a pretended tensor does not pass."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pretended_cuda.tensor import PretendedTensor

LSTM, GRU = 2, 3
"""cuDNN's numbers."""


def fused_gru_cell(gates_x: Tensor, gates_h: Tensor, hidden: Tensor, bias_x: Tensor | None = None, bias_h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The new state [B, H], and room for a backward pass, which is not there.

    Args:
        gates_x: [B, 3H], the input's part of the reset, update and new gates, before its bias.
        gates_h: [B, 3H], the state's.
        hidden: [B, H].
        bias_x: [3H].
        bias_h: [3H].
    """
    from_x = (gates_x if bias_x is None else gates_x + bias_x).chunk(3, 1)
    from_h = (gates_h if bias_h is None else gates_h + bias_h).chunk(3, 1)
    reset, update = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
    new = (from_x[2] + reset * from_h[2]).tanh()
    return new + update * (hidden - new), hidden.new_zeros(hidden.shape[0], 5 * hidden.shape[1])


def _recurrence(x: Tensor, weights: Sequence[Tensor], per_layer: int, hx: Tensor, cx: Tensor | None, mode: int, shape: Sequence[Any]) -> tuple[Tensor, ...]:
    layers, batch_first, dropout, train, bidirectional = shape
    if mode not in (LSTM, GRU) or (dropout and train):
        raise NotImplementedError("the pretended device has GRU and LSTM without dropout only")
    settings = (list(weights), per_layer == 4, layers, 0.0, train, bidirectional, batch_first)
    return torch.gru(x, hx, *settings) if cx is None else torch.lstm(x, [hx, cx], *settings)


def cudnn_rnn(
    x: Tensor, weights: Any, per_layer: int, buffer: Any, hx: Tensor, cx: Tensor | None, mode: int, hidden: int, projected: int, *shape: Any
) -> tuple[Tensor, ...]:
    """Outputs, last hidden and cell state, and what the backward pass would find kept; `shape`: layers, batch_first, dropout, train, bidirectional, ..."""
    out, last, *cell = _recurrence(x, weights, per_layer, hx, cx, mode, shape[:5])
    return out, last, cell[0] if cell else x.new_zeros(0), x.new_zeros(0, dtype=torch.uint8), x.new_zeros(0)


def cudnn_rnn_backward(
    x: Tensor,
    weights: Any,
    per_layer: int,
    buffer: Any,
    hx: Tensor,
    cx: Tensor | None,
    out: Tensor,
    by_out: Tensor | None,
    by_last: Tensor | None,
    by_cell: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    *shape: Any,
) -> tuple[Any, ...]:
    """Gradients of the inputs, the states and the weights, by torch's own backward pass on the CPU, in a thread that is in no backward pass."""

    def gradients() -> tuple[Any, ...]:
        leaves = [one.detach().requires_grad_() for one in (x, hx, *([] if cx is None else [cx]), *weights)]
        first = 2 if cx is None else 3
        made = _recurrence(leaves[0], leaves[first:], per_layer, leaves[1], None if cx is None else leaves[2], mode, shape[:5])
        wanted = [(one, by) for one, by in zip(made, (by_out, by_last, by_cell), strict=False) if by is not None]
        found = torch.autograd.grad([one for one, _ in wanted], leaves, [by for _, by in wanted], allow_unused=True, materialize_grads=True)
        return found[0], found[1], None if cx is None else found[2], list(found[first:])

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(gradients).result()


def decode_jpegs(encoded: Sequence[Tensor], mode: int, device: torch.device) -> list[Tensor]:
    """uint8[C, H, W] of each JPEG, of uint8[bytes] on the CPU, by its decoder in the place of nvJPEG."""
    if not encoded or any(one.dim() != 1 or not one.numel() or one.dtype != torch.uint8 for one in encoded):
        raise RuntimeError("Expected a non empty 1-dimensional tensor")
    return [torch.ops.image.decode_jpeg(one, mode) for one in encoded]


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "decode_jpegs_cuda": decode_jpegs,
    "_thnn_fused_gru_cell": fused_gru_cell,
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
}


def chosen_decode_jpegs(real: Any, execute: Callable[..., Any]) -> Callable[..., Any]:
    """`decode_jpegs_cuda`, which takes CPU tensors, and which no TorchDispatchMode sees with torchvision 0.26: there it has one kernel, for every device."""
    return lambda *args: execute(real.default, args, {})


def chosen_gru(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.gru` that takes cuDNN's operator for tensors of the device."""

    def gru(x: Any, hx: Any, weights: Any, biases: bool, *shape: Any) -> Any:
        if not isinstance(x, PretendedTensor):
            return real(x, hx, weights, biases, *shape)
        layers, dropout, train, bidirectional, batch_first = shape
        settings = (layers, batch_first, dropout, train, bidirectional, [], None)
        return torch.ops.aten._cudnn_rnn(x, weights, 4 if biases else 2, None, hx, None, GRU, hx.shape[-1], 0, *settings)[:2]

    return gru


def chosen_lstm(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.lstm` that takes cuDNN's operator for tensors of the device."""

    def lstm(x: Any, states: Any, weights: Any, biases: bool, *shape: Any) -> Any:
        if not isinstance(x, PretendedTensor):
            return real(x, states, weights, biases, *shape)
        layers, dropout, train, bidirectional, batch_first = shape
        settings = (layers, batch_first, dropout, train, bidirectional, [], None)
        return torch.ops.aten._cudnn_rnn(x, weights, 4 if biases else 2, None, *states, LSTM, states[0].shape[-1], 0, *settings)[:3]

    return lstm


def chosen_gru_cell(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.gru_cell` that takes the fused operator for tensors of the device."""

    def gru_cell(x: Any, hx: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None) -> Any:
        if not isinstance(x, PretendedTensor):
            return real(x, hx, w_x, w_h, b_x, b_h)
        return torch.ops.aten._thnn_fused_gru_cell(x @ w_x.t(), hx @ w_h.t(), hx, b_x, b_h)[0]

    return gru_cell


def chosen_dropout(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.dropout` that takes the fused operator for tensors of the device."""

    def dropout(x: Any, p: float, train: bool) -> Any:
        if not isinstance(x, PretendedTensor) or not train or not 0 < p < 1 or not x.numel():
            return real(x, p, train)
        return torch.ops.aten.native_dropout(x, p, train)[0]

    return dropout
