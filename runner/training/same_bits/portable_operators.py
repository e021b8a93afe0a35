"""Operators with the same bits on every x86-64-v3 CPU, replacing torch's that differ, or that are
slow when MKL must be consistent.

Square roots: torch takes them from MKL, which begins with the processor's approximation of
1/sqrt(x) (`rsqrtps`): AMD's is not Intel's, whatever MKL_CBWR says, and one root in six is not the
nearest number. NumPy's instruction (`sqrtps`) rounds correctly everywhere, as IEEE 754 asks.

Sampling of images (`grid_sample`): torch's vectorised kernel gathers pixels by an instruction on
which the emulator crashes by which other CPUs are tested (qemu-user 7.2). Its scalar kernel is
compiled for every x86-64 CPU alike. It takes three times as long, a millisecond for 64 images of 32
by 32 pixels.

Matrix products: with MKL_CBWR=COMPATIBLE, the only mode of MKL in which AMD's processors repeat
Intel's, MKL uses neither AVX2 nor FMA and takes two to three times as long. oneDNN with
ONEDNN_MAX_CPU_ISA=AVX2 uses both. It takes the larger products in float32, of matrices, of batches
of them and in convolutions of 1 by 1; smaller ones stay MKL's, whose calls begin faster.

GRU: thousands of products too small for that. Here the gradient of the recurrent weights is one
product over all steps instead of one at each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, linear

from samewise.runner.torch_private import grid_sampler_2d_cpu_fallback, linear_pointwise

LARGE = 2**20
"""The number of multiplications from which oneDNN computes a product: where it takes about as long
as MKL, 50 microseconds on an AMD EPYC."""

_registered: list[Any] = []
_torch_s: dict[str, Any] = {}


def use_portable_operators(*, wanted: bool) -> None:
    """Make torch use these operators in this process from now on, or its own again.

    `x ** 0.5` goes to MKL all the same, and a sampled image's gradient to torch's own kernel.
    Norms, batch norm and the fused optimizers have correct roots of their own.
    """
    if wanted == bool(_registered):
        return
    if not wanted:
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
    library.impl("gru.input", _gru, "AutogradCPU")
    _registered.append(library)


def _sqrt(value: Tensor) -> Tensor:
    """Any shape and dtype, as torch's; integers give the default dtype."""
    dtype = (
        value.dtype
        if value.is_floating_point() or value.is_complex()
        else torch.get_default_dtype()
    )
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    found = torch.empty_like(value, dtype=computed, requires_grad=False)
    with np.errstate(invalid="ignore"):  # NaN, as in torch
        np.sqrt(value.detach().to(computed).resolve_conj().resolve_neg().numpy(), out=found.numpy())
    return found.to(dtype)


def _sqrt_in_place(value: Tensor) -> Tensor:
    return value.copy_(_sqrt(value))


def _sqrt_out(value: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(value.shape).copy_(_sqrt(value))


def _is_large(left: Tensor, right: Tensor) -> bool:
    """Whether a (batched) matrix product should be computed by oneDNN."""
    return (
        left.dtype == right.dtype == torch.float32
        and left.shape[-1] == right.shape[-2]
        and left.shape[-2] * left.shape[-1] * right.shape[-1] >= LARGE
    )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(m, k), (k, n) and (n) -> (m, n), by oneDNN, in float32."""
    return linear_pointwise(_plain(left), _plain(right).t(), bias, "none", [], "")


def _plain(matrix: Tensor) -> Tensor:
    """A copy with non-overlapping row or column strides, as a BLAS requires.

    Unchanged if it has them.
    """
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (
        matrix
        if (right == 1 and down >= columns) or (down == 1 and right >= rows)
        else matrix.contiguous()
    )


def _mm(keys: Any, left: Tensor, right: Tensor) -> Tensor:
    return (
        _product(left, right)
        if _is_large(left, right)
        else _torch_s["mm"].call_boxed(keys, left, right)
    )


def _bmm(keys: Any, left: Tensor, right: Tensor) -> Tensor:
    if not _is_large(left, right) or len(left) != len(right):
        return _torch_s["bmm"].call_boxed(keys, left, right)
    return torch.stack([_product(one, other) for one, other in zip(left, right, strict=True)])


def _addmm(
    keys: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if (
        _is_large(left, right)
        and beta == alpha == 1
        and bias.dtype == left.dtype
        and bias.shape == right.shape[1:]
    ):
        return _product(left, right, bias.contiguous())
    return _torch_s["addmm"].call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)


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
    found = torch.stack([_product(weight.flatten(1), sample) for sample in values.flatten(2)])
    return (found if bias is None else found.add_(bias[:, None])).view(
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
        for one, other in zip(flat[1:], values[1:], strict=True):
            of_weight += _product(one, other.flatten(1).t())
        of_weight = of_weight.view_as(weight)
    return of_values, of_weight, flat.sum((0, 2)) if output_mask[2] else None


class _Recurrence(torch.autograd.Function):
    """The steps of a GRU, given the input's contributions to its gates: (T, N, 3H), (N, H), (3H,
    H), (3H) -> (T, N, H); gates in torch's order: r, z, n.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, first: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        steps, samples, width = len(given), *first.shape
        gates, recurrent = given.clone(), given.new_empty(steps, samples, 3 * width)
        hidden = given.new_empty(steps + 1, samples, width)
        hidden[0] = first
        transposed = weight.t()
        for now, after, gate, from_hidden in zip(
            hidden[:-1], hidden[1:], gates, recurrent, strict=True
        ):
            torch.addmm(bias, now, transposed, out=from_hidden)
            reset_update, new = gate[:, : 2 * width], gate[:, 2 * width :]
            reset_update.add_(from_hidden[:, : 2 * width]).sigmoid_()
            new.addcmul_(gate[:, :width], from_hidden[:, 2 * width :]).tanh_()
            torch.lerp(new, now, gate[:, width : 2 * width], out=after)
        ctx.save_for_backward(gates, recurrent[:, :, 2 * width :], hidden, weight)
        return hidden[1:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gates, from_hidden, hidden, weight = ctx.saved_tensors
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
    """As torch's.

    A one-way GRU with biases in float32 uses the steps above, and cannot be differentiated twice
    then.
    """
    given = (values, hidden, *params)
    if (
        bidirectional
        or not has_biases
        or len(params) != 4 * num_layers
        or not values.numel()
        or any(one.dtype != torch.float32 for one in given)
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
    found, last = values.transpose(0, 1) if batch_first else values, []
    for layer in range(num_layers):
        of_input, of_hidden, bias_of_input, bias_of_hidden = params[4 * layer : 4 * layer + 4]
        if layer:
            found = dropout(found, dropout_p, train)
        found = _Recurrence.apply(
            linear(found, of_input, bias_of_input), hidden[layer], of_hidden, bias_of_hidden
        )
        last.append(found[-1])
    return found.transpose(0, 1) if batch_first else found, torch.stack(last)
