"""Resampling by torchaudio."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def resample(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """Resample by a sinc filter in a Hann window (Smith, Digital Audio Resampling).

    Args:
        waveform: float32[..., T].
        old_rate: Its rate; only the ratio of the two matters.
        new_rate: The rate of the result.

    Returns:
        float32[..., T'], where T' is T * new_rate / old_rate, rounded up.
    """
    common = math.gcd(old_rate, new_rate)
    if old_rate == new_rate:
        return waveform
    return _resampler(old_rate // common, new_rate // common, waveform.device)(waveform)


def resampled_length(length: int, old_rate: int, new_rate: int) -> int:
    """T' of `resample`: computed in float32, it may be a few samples off in a long recording."""
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    exact = int(torch.ceil(torch.as_tensor(new * length / old)))
    return min(exact, new * (length // old + 1))  # the filter gives no more


@lru_cache(maxsize=32)
def _resampler(old: int, new: int, device: torch.device) -> Any:
    """Kept, since computing a filter takes longer than resampling a short recording."""
    from torchaudio.transforms import Resample

    return Resample(old, new).to(device)
