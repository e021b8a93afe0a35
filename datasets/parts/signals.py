"""Resampling and mel bands, the same bits as torchaudio's `resample` and `melscale_fbanks` with
their defaults.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99


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
    old, new = old_rate // common, new_rate // common
    if old == new:
        return waveform
    kernel, margin = _sinc_filter(old, new, waveform.device)
    rows = F.pad(waveform.reshape(-1, 1, waveform.shape[-1]), (margin, margin + old))
    filtered = F.conv1d(rows, kernel, stride=old).transpose(1, 2).reshape(*waveform.shape[:-1], -1)
    return filtered[..., : resampled_length(waveform.shape[-1], old, new)]


def resampled_length(length: int, old_rate: int, new_rate: int) -> int:
    """T' of `resample`: computed in float32, it may be a few samples off in a long recording."""
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    exact = int(torch.ceil(torch.as_tensor(new * length / old)))
    return min(exact, new * (length // old + 1))  # the filter gives no more


@lru_cache(maxsize=32)
def _sinc_filter(old: int, new: int, device: torch.device) -> tuple[Tensor, int]:
    """float32[new, 1, taps], a filter for each phase, and the samples that it sees before one.

    Cached, since computing it takes longer than resampling a short recording.
    """
    cutoff = min(old, new) * _ROLLOFF
    margin = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    place = torch.arange(-margin, margin + old, dtype=torch.float64) / old
    phase = torch.arange(0, -new, -1)[:, None, None] / new  # float32, as torchaudio's
    time = ((phase + place) * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(time * math.pi / _ZERO_CROSSINGS / 2) ** 2
    time *= math.pi
    sinc = torch.where(time == 0, 1.0, time.sin() / time)
    return (sinc * (window * (cutoff / old))).to(device, torch.float32), margin


def mel_bands(
    bins: int,
    f_min: float,
    f_max: float,
    n_mels: int,
    sample_rate: int,
    *,
    scale: str,
    area: bool = False,
) -> Tensor:
    """Triangular bands at equal distances on a mel scale.

    Args:
        bins: Of the spectrum, from 0 to half the sample rate.
        f_min: Where the first band begins, in Hz.
        f_max: Where the last band ends, in Hz.
        n_mels: Bands.
        sample_rate: In Hz.
        scale: "htk" or "slaney".
        area: Give each band the area 1 instead of the height 1.

    Returns:
        float32[n_mels, bins].
    """
    edges = _to_hz(torch.linspace(_to_mel(f_min, scale), _to_mel(f_max, scale), n_mels + 2), scale)
    offsets = edges - torch.linspace(0, sample_rate // 2, bins)[:, None]
    widths = edges[1:] - edges[:-1]
    falling, rising = offsets[:, 2:] / widths[1:], -offsets[:, :-2] / widths[:-1]
    bands = torch.minimum(rising, falling).clamp(min=0.0)
    if area:
        bands *= 2.0 / (edges[2:] - edges[:-2])
    return bands.t().contiguous()


# Slaney's scale is linear below 1000 Hz, which is 15 mel, and logarithmic above.
_HZ_PER_MEL = 200.0 / 3
_LINEAR_HZ, _LINEAR_MEL = 1000.0, 1000.0 / _HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def _to_mel(hz: float, scale: str) -> float:
    if scale == "htk":
        return 2595.0 * math.log10(1.0 + hz / 700.0)
    if hz < _LINEAR_HZ:
        return hz / _HZ_PER_MEL
    return _LINEAR_MEL + math.log(hz / _LINEAR_HZ) / _LOG_STEP


def _to_hz(mel: Tensor, scale: str) -> Tensor:
    if scale == "htk":
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    above = _LINEAR_HZ * torch.exp(_LOG_STEP * (mel - _LINEAR_MEL))
    return torch.where(mel < _LINEAR_MEL, _HZ_PER_MEL * mel, above)
