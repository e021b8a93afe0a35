"""CTC's loss and gradient on a CUDA device, with the same bits each time, by Triton kernels.

Torch's own CUDA kernel adds gradients by atomic operations; these kernels add in a fixed order. A
program takes one utterance and goes through its frames forwards, for the probability of the states
so far (alpha), then backwards, for that of the states to come (beta); a state's neighbours are read
from the same vector. A second kernel takes one frame and adds up, class by class, the states of the
class. The recursions are equations 6 to 11 and 14 of Graves et al., "Connectionist temporal
classification", ICML 2006, in logarithms.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samewise.runner.torch_private import ctc_loss, ctc_loss_backward

# Finite, so that a difference of two is a number
_NEVER = -1e30
"""Logarithm of a zero probability."""
_LARGEST = 8192
"""States that one program can hold: two for each label plus one, rounded up to a power of two."""


@triton.jit
def _log_sum(a, b, c, never: tl.constexpr):
    """Return log(exp(a) + exp(b) + exp(c)); NaN stays NaN."""
    largest = tl.maximum(a, tl.maximum(b, c))
    # Sums of `never` and other logarithms stay far below any real one
    shift = tl.where(largest <= never * 0.1, 0.0, largest)
    total = shift + tl.log(tl.exp(a - shift) + tl.exp(b - shift) + tl.exp(c - shift))
    return tl.where(largest <= never * 0.1, never, total)


@triton.jit
def passes(
    log_probs,
    labels,
    skips,
    frames,
    states,
    alphas,
    betas,
    losses,
    most_frames,
    classes,
    SIZE: tl.constexpr,
    NEVER: tl.constexpr,
):
    """Compute an utterance's alphas[t, s], betas[t, s] and negative log-likelihood.

    log_probs [B, T, K]; labels and skips int32[B, SIZE]: each state's class, and whether it may
    follow the state but one before it; frames and states int32[B]; alphas and betas [B, T, SIZE];
    losses [B].
    """
    utterance = tl.program_id(0).to(tl.int64)
    state = tl.arange(0, SIZE)
    length, count = tl.load(frames + utterance), tl.load(states + utterance)
    label, skip = (
        tl.load(labels + utterance * SIZE + state),
        tl.load(skips + utterance * SIZE + state) > 0,
    )
    before, two_before = tl.maximum(state - 1, 0), tl.maximum(state - 2, 0)
    after, two_after = tl.minimum(state + 1, SIZE - 1), tl.minimum(state + 2, SIZE - 1)
    skipped = tl.gather(tl.load(skips + utterance * SIZE + state), two_after, 0) > 0
    rows = log_probs + utterance * most_frames * classes
    alpha_rows, beta_rows = (
        alphas + utterance * most_frames * SIZE,
        betas + utterance * most_frames * SIZE,
    )
    used = state < count

    # A path begins with the blank or the first label
    alpha = tl.where(used & (state < 2), tl.load(rows + label), NEVER)
    tl.store(alpha_rows + state, alpha)
    for frame in range(1, length):
        stepped = tl.where(state >= 1, tl.gather(alpha, before, 0), NEVER)
        leapt = tl.where(skip & (state >= 2), tl.gather(alpha, two_before, 0), NEVER)
        emission = tl.load(rows + frame * classes + label)
        alpha = tl.where(used, _log_sum(alpha, stepped, leapt, NEVER) + emission, NEVER)
        tl.store(alpha_rows + frame * SIZE + state, alpha)
    # A path ends with the last label or the blank after it
    final = used & (state >= count - 2)
    ends = tl.where(final, alpha, NEVER)
    largest = tl.max(ends, 0)
    tl.store(losses + utterance, -(largest + tl.log(tl.sum(tl.exp(ends - largest), 0))))

    beta = tl.where(final, 0.0, NEVER)
    tl.store(beta_rows + (length - 1) * SIZE + state, beta)
    for passed in range(1, length):
        frame = length - 1 - passed
        heard = tl.where(used, beta + tl.load(rows + (frame + 1) * classes + label), NEVER)
        stepped = tl.where(state + 1 < count, tl.gather(heard, after, 0), NEVER)
        leapt = tl.where(skipped & (state + 2 < count), tl.gather(heard, two_after, 0), NEVER)
        beta = tl.where(used, _log_sum(heard, stepped, leapt, NEVER), NEVER)
        tl.store(beta_rows + frame * SIZE + state, beta)


@triton.jit
def by_class(
    alphas, betas, losses, labels, frames, gradients, most_frames, classes, SIZE: tl.constexpr
):
    """Compute gradients[t, k] of a frame: minus the probability that it is class k.

    The probability is conditional on the transcript.
    """
    utterance, frame = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state = tl.arange(0, SIZE)
    row = (utterance * most_frames + frame) * SIZE + state
    inside = frame < tl.load(frames + utterance)
    label = tl.load(labels + utterance * SIZE + state)
    shares = tl.exp(
        tl.load(alphas + row, mask=inside, other=0.0)
        + tl.load(betas + row, mask=inside, other=0.0)
        + tl.load(losses + utterance)
    )
    for number in range(classes):
        share = tl.sum(tl.where(label == number, shares, 0.0), 0)
        tl.store(
            gradients + (utterance * most_frames + frame) * classes + number,
            tl.where(inside, -share, 0.0),
        )


@torch.library.custom_op("samewise::ctc", mutates_args=(), device_types="cuda")
def ctc(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of each utterance, and its gradient.

    Args:
        log_probs: float32[B, T, K], normalised over K; class 0 is the blank.
        lengths: int64[B], valid frames.
        target: int64[B, U].
        target_lengths: int64[B].
        gradient: Whether to compute the gradient.

    Returns:
        float32[B] in nats, infinite if a target does not fit into its frames; and float32[B, T, K],
            empty without `gradient`, zero where the loss is infinite.
    """
    return launch(log_probs, lengths, target, target_lengths, gradient)


def launch(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute `ctc` wherever Triton runs, including its interpreter on the CPU."""
    batch, most_frames, classes = log_probs.shape
    # Triton's ranges have powers of two as their length
    size = triton.next_power_of_2(2 * max(1, target.shape[1]) + 1)
    labels = torch.zeros(batch, size, dtype=torch.int32, device=log_probs.device)
    skips = torch.zeros_like(labels)
    inside = torch.arange(target.shape[1], device=target.device) < target_lengths[:, None]
    labels[:, 1 : 2 * target.shape[1] : 2] = torch.where(inside, target, 0)
    skips[:, 3 : 2 * target.shape[1] : 2] = target[:, 1:] != target[:, :-1]
    alphas, betas = (
        torch.empty(batch, most_frames, size, device=log_probs.device) for _ in range(2)
    )
    losses = torch.empty(batch, device=log_probs.device)
    frames, states = lengths.int(), (2 * target_lengths + 1).int()
    # An utterance without frames is processed as if it had one, and corrected below
    heard = frames.clamp(min=1)
    log_probs = log_probs.contiguous()
    warps = max(1, min(16, size // 64))
    passes[(batch,)](
        log_probs,
        labels,
        skips,
        heard,
        states,
        alphas,
        betas,
        losses,
        most_frames,
        classes,
        SIZE=size,
        NEVER=_NEVER,
        num_warps=warps,
    )
    losses = torch.where(frames > 0, losses, torch.where(target_lengths > 0, -_NEVER, 0.0))
    # NaN stays: the check for finite losses reports it
    possible = ~(losses > -0.1 * _NEVER)
    gradients = torch.empty(log_probs.shape if gradient else 0, device=log_probs.device)
    if gradient:
        by_class[(batch, most_frames)](
            alphas,
            betas,
            losses,
            labels,
            frames,
            gradients,
            most_frames,
            classes,
            SIZE=size,
            num_warps=min(4, warps),
        )
        gradients = torch.where(possible[:, None, None], gradients, 0.0)
    return torch.where(possible, losses, torch.inf), gradients


@ctc.register_kernel("cpu")
def _on_cpu(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss and gradient by torch's own operators."""
    frames_first = log_probs.transpose(0, 1)
    arguments: Any = (frames_first, target, lengths, target_lengths)
    losses, alphas = ctc_loss(*arguments, 0, False)
    if not gradient:
        return losses, torch.empty(0)
    gradients = ctc_loss_backward(torch.ones_like(losses), *arguments, losses, alphas, 0, True)
    return losses, gradients.transpose(0, 1).contiguous()


@ctc.register_fake
def _(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(len(log_probs)), log_probs.new_empty(
        log_probs.shape if gradient else 0
    )


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor
    ) -> Tensor:
        losses, gradients = ctc(
            log_probs, lengths, target, target_lengths, context.needs_input_grad[0]
        )
        context.save_for_backward(gradients)
        return losses

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = context.saved_tensors
        return gradients * grads[0][:, None, None], None, None, None


def takes(target: Tensor) -> bool:
    """Whether a kernel can hold the states of targets as long as int64[B, U]."""
    return 2 * target.shape[1] + 1 <= _LARGEST


def negative_log_likelihood(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor
) -> Tensor:
    """Return `ctc.negative_log_likelihood` in nats, for float32[B, T, K] on the device."""
    return _Loss.apply(log_probs, lengths, target, target_lengths)
