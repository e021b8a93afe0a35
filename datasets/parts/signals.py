"""Resampling by torchaudio."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def resample(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """Resample by a sinc filter with a Hann window.

    Source: J. O. Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/.

    Args:
        waveform: float32[..., T].
        old_rate: The waveform's rate; only the ratio of the two rates matters.
        new_rate: The result's rate.

    Returns:
        float32[..., T'], where T' is T * new_rate / old_rate, rounded up.
    """
    common = math.gcd(old_rate, new_rate)
    if old_rate == new_rate:
        return waveform
    return _resampler(old_rate // common, new_rate // common, waveform.device)(waveform)


def resampled_length(length: int, old_rate: int, new_rate: int) -> int:
    """Return T' of `resample`."""
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    # torchaudio rounds in float32, which may be a few samples off in a long recording
    rounded = int(torch.ceil(torch.as_tensor(new * length / old)))
    # The filter returns at most this many samples
    return min(rounded, new * (length // old + 1))


@lru_cache(maxsize=32)
def _resampler(old: int, new: int, device: torch.device) -> Any:
    """Return a resampler from the cache: computing a filter takes longer than a short recording."""
    from torchaudio.transforms import Resample

    return Resample(old, new).to(device)
