"""Operators with the same bits on every x86-64-v3 CPU.

They replace operators of torch's that differ, or that are slow with MKL's consistent mode.

Square roots: torch takes them from MKL, which starts with the processor's approximation of
1/sqrt(x) (`rsqrtps`). AMD's is not Intel's, with any MKL_CBWR, and one root in six is not the
nearest number. NumPy's instruction (`sqrtps`) rounds correctly everywhere, as IEEE 754 requires.

Sampling of images (`grid_sample`): torch's vectorised kernel has an instruction on which the
emulator of other CPUs crashes (qemu-user 7.2). Its scalar kernel is the same for every x86-64 CPU.
It takes three times as long, a millisecond for 64 images of 32 by 32 pixels.

Matrix products: with MKL_CBWR=COMPATIBLE, the only mode of MKL in which AMD's processors repeat
Intel's, MKL uses neither AVX2 nor FMA and takes two to three times as long. oneDNN with
ONEDNN_MAX_CPU_ISA=AVX2 uses both. It computes the larger products in float32: of matrices, of
batches of them, and in convolutions of 1 by 1. MKL computes smaller ones, since it starts faster.

GRU: its thousands of products are too small for oneDNN. Here the gradient of the recurrent weights
is one product over all steps instead of one for each.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, linear

from samewise.runner.torch_private import grid_sampler_2d_cpu_fallback, linear_pointwise

LARGE = 2**20
"""Products of at least so many multiplications are oneDNN's: for this many it takes as long as MKL,
50 microseconds on an AMD EPYC."""

_registered: list[Any] = []
_torch_s: dict[str, Any] = {}


def use_portable_operators(*, enabled: bool) -> None:
    """Make torch use these operators in this process, or its own again.

    `x ** 0.5` remains MKL's, and the gradient of a sampled image torch's. Norms, batch norm and the
    fused optimizers have correct roots of their own.
    """
    if enabled == bool(_registered):
        return
    if not enabled:
        # torch.library has no public way to take a registration back
        _registered.pop()._destroy()
        return
    library = torch.library.Library("aten", "IMPL")
    always = {
        "sqrt": _sqrt,
        "sqrt_": _sqrt_in_place,
        "sqrt.out": _sqrt_out,
        "grid_sampler_2d": grid_sampler_2d_cpu_fallback,
    }
    for name, function in always.items():
        library.impl(name, function, "CPU", allow_override=True)
    some = {
        "mm": _mm,
        "bmm": _bmm,
        "addmm": _addmm,
        "_slow_conv2d_forward": _convolve,
        "_slow_conv2d_backward.output_mask": _convolution_gradients,
    }
    for name, function in some.items():
        _torch_s[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, function, "CPU", with_keyset=True, allow_override=True)
    # Above autograd, since `_Recurrence` has a gradient of its own
    library.impl("gru.input", _gru, "AutogradCPU")
    _registered.append(library)


def _sqrt(value: Tensor) -> Tensor:
    """Return the square root of a tensor of any shape and dtype, as torch.sqrt does."""
    dtype = (
        value.dtype
        if value.is_floating_point() or value.is_complex()
        else torch.get_default_dtype()
    )
    # NumPy has no bfloat16
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    root = torch.empty_like(value, dtype=computed, requires_grad=False)
    with np.errstate(invalid="ignore"):  # NaN, as in torch
        np.sqrt(value.detach().to(computed).resolve_conj().resolve_neg().numpy(), out=root.numpy())
    return root.to(dtype)


def _sqrt_in_place(value: Tensor) -> Tensor:
    return value.copy_(_sqrt(value))


def _sqrt_out(value: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(value.shape).copy_(_sqrt(value))


def _is_large(a: Tensor, b: Tensor) -> bool:
    """Whether a (batched) matrix product should be computed by oneDNN."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.shape[-1] == b.shape[-2]
        and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE
    )


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (m, k) by (k, n) and add (n), by oneDNN, in float32."""
    return linear_pointwise(_plain(a), _plain(b).t(), bias, "none", [], "")


def _plain(matrix: Tensor) -> Tensor:
    """Return a matrix whose row or column stride is 1, as a BLAS requires; a copy if need be."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (
        matrix
        if (right == 1 and down >= columns) or (down == 1 and right >= rows)
        else matrix.contiguous()
    )


def _mm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b) if _is_large(a, b) else _torch_s["mm"].call_boxed(keys, a, b)


def _bmm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
    if not _is_large(a, b) or len(a) != len(b):
        return _torch_s["bmm"].call_boxed(keys, a, b)
    return torch.stack([_product(x, y) for x, y in zip(a, b, strict=True)])


def _addmm(
    keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if (
        _is_large(a, b)
        and beta == alpha == 1
        and bias.dtype == a.dtype
        and bias.shape == b.shape[1:]
    ):
        return _product(a, b, bias.contiguous())
    return _torch_s["addmm"].call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)


def _is_product(values: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether a convolution of (N, C, H, W) with (O, C, h, w) is a large matrix product."""
    return (
        weight.shape[2:] == (1, 1)
        and [*stride, *padding] == [1, 1, 0, 0]
        and values.is_contiguous()
        and len(values) > 0
        and _is_large(weight.flatten(1), values.flatten(2))
    )


def _convolve(
    keys: Any,
    values: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
) -> Tensor:
    if not _is_product(values, weight, stride, padding):
        return _torch_s["_slow_conv2d_forward"].call_boxed(
            keys, values, weight, kernel_size, bias, stride, padding
        )
    # One product for each sample: a kernel of 1 by 1 is a matrix
    product = torch.stack([_product(weight.flatten(1), sample) for sample in values.flatten(2)])
    return (product if bias is None else product.add_(bias[:, None])).view(
        len(values), -1, *values.shape[2:]
    )


def _convolution_gradients(
    keys: Any,
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    if not (_is_product(values, weight, stride, padding) and gradient.dtype == values.dtype):
        return _torch_s["_slow_conv2d_backward.output_mask"].call_boxed(
            keys, gradient, values, weight, kernel_size, stride, padding, output_mask
        )
    flat = gradient.contiguous().flatten(2)
    of_values = (
        torch.stack([_product(weight.flatten(1).t(), sample) for sample in flat]).view_as(values)
        if output_mask[0]
        else None
    )
    of_weight = None
    if output_mask[1]:
        of_weight = _product(flat[0], values[0].flatten(1).t())
        for x, y in zip(flat[1:], values[1:], strict=True):
            of_weight += _product(x, y.flatten(1).t())
        of_weight = of_weight.view_as(weight)
    return of_values, of_weight, flat.sum((0, 2)) if output_mask[2] else None


class _Recurrence(torch.autograd.Function):
    """The steps of a GRU, from the input's contributions to its gates.

    Shapes are (T, N, 3H), (N, H), (3H, H), (3H) -> (T, N, H), with gates in torch's order: r, z, n.
    """

    @staticmethod
    def forward(
        ctx: Any, gates_of_input: Tensor, first: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        steps, samples, width = len(gates_of_input), *first.shape
        gates, recurrent = (
            gates_of_input.clone(),
            gates_of_input.new_empty(steps, samples, 3 * width),
        )
        hidden = gates_of_input.new_empty(steps + 1, samples, width)
        hidden[0] = first
        transposed = weight.t()
        for now, after, gate, from_hidden in zip(
            hidden[:-1], hidden[1:], gates, recurrent, strict=True
        ):
            torch.addmm(bias, now, transposed, out=from_hidden)
            reset_update, new = gate[:, : 2 * width], gate[:, 2 * width :]
            reset_update.add_(from_hidden[:, : 2 * width]).sigmoid_()
            new.addcmul_(gate[:, :width], from_hidden[:, 2 * width :]).tanh_()
            # As torch: h' = n + z (h - n)
            torch.lerp(new, now, gate[:, width : 2 * width], out=after)
        ctx.save_for_backward(gates, recurrent[:, :, 2 * width :], hidden, weight)
        return hidden[1:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gates, from_hidden, hidden, weight = ctx.saved_tensors
        # Slopes of sigmoid and tanh are s (1 - s) and 1 - t^2
        reset, update, new = gates.chunk(3, dim=2)
        by_new = (1 - update) * (1 - new * new)
        by_reset = by_new * from_hidden * reset * (1 - reset)
        by_update = (hidden[:-1] - new) * update * (1 - update)
        # The hidden state's contributions to the gates: (T, N, 3, H)
        slopes = torch.stack([by_reset, by_update, by_new * reset], dim=2)
        of_hidden = torch.empty_like(new)
        of_gates = torch.empty_like(slopes)
        carried = torch.zeros_like(hidden[0])
        for step in reversed(range(len(gates))):
            now = torch.add(gradient[step], carried, out=of_hidden[step])
            torch.mul(slopes[step], now[:, None], out=of_gates[step])
            carried = torch.addmm(now * update[step], of_gates[step].flatten(1), weight)
        of_given = torch.cat([of_gates[:, :, :2].flatten(2), of_hidden * by_new], dim=2)
        flat = of_gates.flatten(2).flatten(0, 1)
        return of_given, carried, flat.t() @ hidden[:-1].flatten(0, 1), flat.sum(0)


def _gru(
    values: Tensor,
    hidden: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Compute a GRU as torch does; a one-way GRU with biases in float32 by `_Recurrence`.

    The latter cannot be differentiated twice.
    """
    tensors = (values, hidden, *params)
    if (
        bidirectional
        or not has_biases
        or len(params) != 4 * num_layers
        or not values.numel()
        or any(x.dtype != torch.float32 for x in tensors)
    ):
        return torch.ops.aten.gru.input.decompose(
            values,
            hidden,
            params,
            has_biases,
            num_layers,
            dropout_p,
            train,
            bidirectional,
            batch_first,
        )
    outputs, last = values.transpose(0, 1) if batch_first else values, []
    for layer in range(num_layers):
        of_input, of_hidden, bias_of_input, bias_of_hidden = params[4 * layer : 4 * layer + 4]
        if layer:
            outputs = dropout(outputs, dropout_p, train)
        outputs = _Recurrence.apply(
            linear(outputs, of_input, bias_of_input), hidden[layer], of_hidden, bias_of_hidden
        )
        last.append(outputs[-1])
    return outputs.transpose(0, 1) if batch_first else outputs, torch.stack(last)
