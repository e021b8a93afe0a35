"""The quality of separated signals: scale-invariant signal-to-distortion ratio, and the assignment
of estimates to speakers.

Le Roux et al., "SDR - half-baked or well done?", arXiv 1811.02508; permutation invariance: Yu et
al., arXiv 1607.00325.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_EPS = 1e-8
"""Keeps silence finite: a squared sum this small counts as zero."""
_SILENT = 1e-14
"""A squared sum of silence: a second with the smallest step of 24 bits has a thousand times as
much."""


def si_sdr(
    estimate: Tensor, reference: Tensor, inside: Tensor, *, any_loudness: bool = False
) -> Tensor:
    """float[...] in dB: the energy of an estimate that is its scaled reference, over the rest.

    As published, 1e-8 is added to each squared sum, so that a very quiet signal (a squared sum near
    that, such as a second of -90 dB) is not told from silence.

    Args:
        estimate: float[..., T].
        reference: float[..., T]; dimensions before the last broadcast.
        inside: bool[..., T], true where there is signal and no padding; means are taken, and sums
            made, over these places only.
        any_loudness: For signals with a squared sum below 1, add that much less, so that the result
            does not depend on loudness.
    """
    estimate, reference = _centre(estimate, inside), _centre(reference, inside)
    small, small_reference = (
        _small(signal) if any_loudness else _EPS for signal in (estimate, reference)
    )
    scale = (estimate * reference).sum(-1, keepdim=True) / (
        reference.square().sum(-1, keepdim=True) + small_reference
    )
    target = scale * reference
    distortion = estimate - target
    found = (target.square().sum(-1, keepdim=True) + small) / (
        distortion.square().sum(-1, keepdim=True) + small
    )
    return 10.0 * found.squeeze(-1).log10()


def pairwise_si_sdr(
    estimates: Tensor, sources: Tensor, inside: Tensor, *, any_loudness: bool = False
) -> Tensor:
    """float[B, S, S] in dB, of each estimate (rows) against each source (columns).

    Args:
        estimates: float[B, S, T].
        sources: float[B, S, T].
        inside: bool[B, T].
        any_loudness: As in `si_sdr`.
    """
    return si_sdr(
        estimates[:, :, None], sources[:, None], inside[:, None, None], any_loudness=any_loudness
    )


def best_assignment(pairwise: Tensor) -> Tensor:
    """[B, S, S], ones and zeros: the assignment of estimates (rows) to sources (columns) with the
    largest mean of `pairwise`.

    All S! assignments are compared; of equals the first wins. The result is a constant: multiplying
    by it and adding up has a gradient that is deterministic on every device, which that of
    gathering by index is not.
    """
    with torch.no_grad():
        candidates = _assignments(pairwise.shape[-1]).to(pairwise, non_blocking=True)
        means = (pairwise[:, None] * candidates).sum((2, 3))
        return candidates[means.argmax(1)]


def select_assigned(values: Tensor, assignment: Tensor) -> Tensor:
    """float[B, S]: the elements of `values` [B, S, S] (estimates, sources) that the assignment
    selects, by source.
    """
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


def _small(signal: Tensor) -> Tensor:
    """float[..., 1]: `_EPS` of a signal's squared sum where that is below 1; of silence, `_EPS`."""
    energy = signal.square().sum(-1, keepdim=True)
    return _EPS * torch.where(energy > _SILENT, energy.clamp(max=1.0), 1.0)


def _assignments(sources: int) -> Tensor:
    """[S!, S, S]: all permutation matrices."""
    return torch.stack(
        [torch.eye(sources)[list(order)].T for order in itertools.permutations(range(sources))]
    )
