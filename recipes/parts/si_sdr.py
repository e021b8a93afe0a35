"""The quality of separated signals: scale-invariant signal-to-distortion ratio, and the assignment of estimates to speakers.

Le Roux et al., "SDR - half-baked or well done?", arXiv 1811.02508; permutation invariance: Yu et al., arXiv 1607.00325.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_EPS = 1e-8
"""Keeps silence finite: a squared sum this small counts as zero."""


def si_sdr(estimate: Tensor, reference: Tensor, inside: Tensor) -> Tensor:
    """float[...] in dB: the energy of an estimate that is its scaled reference, over the rest.

    Args:
        estimate: float[..., T].
        reference: float[..., T]; dimensions before the last broadcast.
        inside: bool[..., T], true where there is signal and no padding; means are taken, and sums made, over these places only.
    """
    estimate, reference = _centre(estimate, inside), _centre(reference, inside)
    scale = (estimate * reference).sum(-1, keepdim=True) / (reference.square().sum(-1, keepdim=True) + _EPS)
    target = scale * reference
    distortion = estimate - target
    return 10.0 * ((target.square().sum(-1) + _EPS) / (distortion.square().sum(-1) + _EPS)).log10()


def pairwise_si_sdr(estimates: Tensor, sources: Tensor, inside: Tensor) -> Tensor:
    """float[B, S, S] in dB, of each estimate (rows) against each source (columns).

    Args:
        estimates: float[B, S, T].
        sources: float[B, S, T].
        inside: bool[B, T].
    """
    return si_sdr(estimates[:, :, None], sources[:, None], inside[:, None, None])


def best_assignment(pairwise: Tensor) -> Tensor:
    """[B, S, S], ones and zeros: the assignment of estimates (rows) to sources (columns) with the largest mean of `pairwise`.

    All S! assignments are compared; of equals the first wins. The result is a constant: multiplying by it and adding up has a gradient that is
    deterministic on every device, which that of gathering by index is not.
    """
    with torch.no_grad():
        candidates = _assignments(pairwise.shape[-1]).to(pairwise, non_blocking=True)
        means = (pairwise[:, None] * candidates).sum((2, 3))
        return candidates[means.argmax(1)]


def select_assigned(values: Tensor, assignment: Tensor) -> Tensor:
    """float[B, S]: the elements of `values` [B, S, S] (estimates, sources) that the assignment selects, by source."""
    return (values * assignment).sum(1)


def order_by_assignment(estimates: Tensor, assignment: Tensor) -> Tensor:
    """float[B, S, T]: the estimates in the order of their assigned sources."""
    order = assignment.argmax(1)
    return estimates.gather(1, order[:, :, None].expand_as(estimates))


def _centre(signal: Tensor, inside: Tensor) -> Tensor:
    """Subtract the mean over the valid positions, and set the others to zero."""
    signal = torch.where(inside, signal, 0.0)
    mean = signal.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(inside, signal - mean, 0.0)


def _assignments(sources: int) -> Tensor:
    """[S!, S, S]: all permutation matrices."""
    return torch.stack([torch.eye(sources)[list(order)].T for order in itertools.permutations(range(sources))])
