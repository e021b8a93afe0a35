"""Quality of separated signals: scale-invariant SDR, and assignment of estimates to speakers.

Sources: Le Roux et al. 2018, SDR - half-baked or well done?, arXiv 1811.02508; permutation
invariance: Yu et al. 2016, arXiv 1607.00325.
"""

import itertools

import torch
from torch import Tensor

_EPS = 1e-8
"""Squared sum that counts as zero, so that silence has a finite ratio."""
_SILENT = 1e-14
"""Squared sum of silence: a second with the smallest step of 24 bits has a thousand times as much.
"""


def si_sdr(
    estimate: Tensor, reference: Tensor, inside: Tensor, *, any_loudness: bool = False
) -> Tensor:
    """Return float[...] in dB: the energy of an estimate's scaled reference, over the rest.

    As published, 1e-8 is added to each squared sum, so that a very quiet signal (a squared sum near
    that, such as a second of -90 dB) is not distinguished from silence.

    Args:
        estimate: float[..., T].
        reference: float[..., T]; dimensions before the last broadcast.
        inside: bool[..., T], true for signal, false for padding, which means and sums leave out.
        any_loudness: Add less to squared sums below 1, in proportion, so that the result does not
            depend on loudness.
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
    ratio = (target.square().sum(-1, keepdim=True) + small) / (
        distortion.square().sum(-1, keepdim=True) + small
    )
    return 10.0 * ratio.squeeze(-1).log10()


def pairwise_si_sdr(
    estimates: Tensor, sources: Tensor, inside: Tensor, *, any_loudness: bool = False
) -> Tensor:
    """Return float[B, S, S] in dB: each estimate (rows) against each source (columns).

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
    """Return the assignment of estimates (rows) to sources (columns) with the largest mean.

    All S! assignments are compared; of equals the first wins.

    Args:
        pairwise: float[B, S, S].

    Returns:
        [B, S, S] of ones and zeros, a constant.
    """
    # Multiplying by a constant and adding up has a gradient that is deterministic on every device;
    # gathering by index does not
    with torch.no_grad():
        orders = itertools.permutations(range(pairwise.shape[-1]))
        candidates = torch.stack(
            [torch.eye(pairwise.shape[-1])[list(order)].T for order in orders]
        ).to(pairwise, non_blocking=True)
        return candidates[(pairwise[:, None] * candidates).sum((2, 3)).argmax(1)]


def select_assigned(values: Tensor, assignment: Tensor) -> Tensor:
    """Return float[B, S]: the elements of `values` that the assignment selects, by source.

    Args:
        values: float[B, S, S] (estimates, sources).
        assignment: [B, S, S].
    """
    return (values * assignment).sum(1)


def order_by_assignment(estimates: Tensor, assignment: Tensor) -> Tensor:
    """Return float[B, S, T]: the estimates in the order of their assigned sources."""
    order = assignment.argmax(1)
    return estimates.gather(1, order[:, :, None].expand_as(estimates))


def _centre(signal: Tensor, inside: Tensor) -> Tensor:
    """Subtract the mean over the valid positions, and set other positions to zero."""
    signal = torch.where(inside, signal, 0.0)
    mean = signal.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(inside, signal - mean, 0.0)


def _small(signal: Tensor) -> Tensor:
    """Return float[..., 1]: `_EPS` of a squared sum below 1; for silence, `_EPS` itself."""
    energy = signal.square().sum(-1, keepdim=True)
    return _EPS * torch.where(energy > _SILENT, energy.clamp(max=1.0), 1.0)
