"""Random changes of utterances, with separate choices for each: masks in the features, speed,
noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from samewise.datasets.parts.signals import resample
from samewise.datasets.transforms.images import chance, interval, uniform
from samewise.datasets.transforms.speech_features import inside_length
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, BatchTransform


@final
class SpecAugment(BatchTransform):
    """Frequency bands and time spans set to 0, the mean of normalised features (Park et al. 2019,
    arXiv 1904.08779, without time warping).

    Choices: `frequency` float64[B, frequency_masks, 2] and `time` float64[B, time_masks, 2], a
    width and a place, as shares of what is possible.

    Args:
        frequency_masks: Bands for each utterance.
        max_band: The widest band, in features.
        time_masks: Stretches for each utterance.
        max_stretch: The longest stretch, in frames.
        max_share: The longest stretch, as a share of the utterance.
    """

    def __init__(
        self,
        *,
        frequency_masks: int = 2,
        max_band: int = 27,
        time_masks: int = 2,
        max_stretch: int = 100,
        max_share: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("frequency_masks", frequency_masks),
            ("max_band", max_band),
            ("time_masks", time_masks),
            ("max_stretch", max_stretch),
        ):
            if value < 0:
                raise ConfigError(Problem("transforms", f"{name} must be at least 0", value))
        self.frequency_masks = frequency_masks
        self.max_band = max_band
        self.time_masks = time_masks
        self.max_stretch = max_stretch
        self.max_share = chance("max_share", max_share)

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        drawn = torch.rand(size, self.frequency_masks + self.time_masks, 2, dtype=torch.float64)
        return {
            "frequency": drawn[:, : self.frequency_masks],
            "time": drawn[:, self.frequency_masks :],
        }

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        features, frames = batch["features"], batch["feature_length"]
        bands = torch.full_like(frames, features.shape[1])
        hidden = _masks(
            choices["frequency"].to(frames.device, non_blocking=True),
            bands,
            bands.clamp(max=self.max_band),
            features.shape[1],
        )[:, :, None]
        longest = (frames * self.max_share).long().clamp(max=self.max_stretch)
        hidden = (
            hidden
            | _masks(
                choices["time"].to(frames.device, non_blocking=True),
                frames,
                longest,
                features.shape[2],
            )[:, None]
        )
        return {**batch, "features": features.masked_fill(hidden, 0.0)}


@final
class SpeedPerturbation(BatchTransform):
    """Faster or slower, including pitch, by resampling (Ko et al., Interspeech 2015).

    Choices: `speed` int64[B], which of the factors.

    Args:
        factors: 1.1 is a tenth faster. They are rounded to hundredths.
    """

    def __init__(self, *, factors: Sequence[float] = (0.9, 1.0, 1.1)) -> None:
        super().__init__()
        self.factors = tuple(round(100 * factor) for factor in factors)
        if not self.factors or min(self.factors) < 1:
            raise ConfigError(
                Problem(
                    "transforms",
                    "factors are not valid speeds",
                    list(factors),
                    "numbers greater than 0, such as [0.9, 1.0, 1.1]",
                )
            )

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"speed": torch.randint(len(self.factors), (size,))}

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        waveform, length = batch["waveform"], batch["length"]
        chosen = [self.factors[number] for number in choices["speed"].tolist()]
        made = waveform.new_zeros(
            len(chosen), max(_scaled_length(waveform.shape[1], factor) for factor in chosen)
        )
        for factor in dict.fromkeys(chosen):
            rows = torch.tensor([row for row, other in enumerate(chosen) if other == factor]).to(
                waveform.device, non_blocking=True
            )
            changed = waveform[rows] if factor == 100 else resample(waveform[rows], factor, 100)
            made[rows, : changed.shape[1]] = changed
        length = _scaled_length(length, torch.tensor(chosen).to(length.device, non_blocking=True))
        return {
            **batch,
            "waveform": torch.where(inside_length(length, made.shape[1]), made, 0.0),
            "length": length,
        }


@final
class Noise(BatchTransform):
    """White Gaussian noise with the drawn signal-to-noise ratio.

    Choices, all [B]: `snr` float64, in dB; `noisy` bool; `seed` int64, of the noise, which is a
    function of (seed, place): the same on every device up to rounding, and whatever else is in the
    batch.

    Args:
        snr: The smallest and the largest signal-to-noise ratio, in dB.
        p: The share of utterances that get noise.
    """

    def __init__(self, *, snr: Sequence[float] = (10.0, 40.0), p: float = 1.0) -> None:
        super().__init__()
        self.snr = interval("snr", snr)
        self.p = chance("p", p)

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {
            "snr": uniform(size, *self.snr),
            "noisy": uniform(size, 0.0, 1.0) < self.p,
            "seed": torch.randint(1 << 32, (size,)),
        }

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        waveform, length = batch["waveform"], batch["length"]
        inside = inside_length(length, waveform.shape[1])
        power = torch.where(inside, waveform, 0.0).square().sum(1) / length.clamp(min=1)
        ratio = torch.where(choices["noisy"], 10.0 ** (-choices["snr"] / 10.0), 0.0).to(
            device=waveform.device, dtype=waveform.dtype, non_blocking=True
        )
        noise = gaussian(
            choices["seed"].to(waveform.device, non_blocking=True), waveform.shape[1]
        ).to(waveform.dtype)
        return {
            **batch,
            "waveform": torch.where(
                inside, waveform + noise * (power * ratio).sqrt()[:, None], waveform
            ),
        }


def gaussian(seed: Tensor, count: int) -> Tensor:
    """float32[B, count] from the standard normal distribution.

    A value depends only on the sample's seed and its position.

    Two hashes of the place give two uniform numbers, these a normal one (Box and Muller 1958).
    """
    place = torch.arange(count, device=seed.device)
    first, second = (
        _hash(_hash(seed[:, None] + salt) + place) for salt in (0x9E3779B9, 0x85EBCA6B)
    )
    radius = (-2.0 * ((first + 0.5) / 2.0**32).log()).sqrt()
    return radius * (2.0 * math.pi * second / 2.0**32).cos()


def _hash(number: Tensor) -> Tensor:
    """int64 numbers from 0 to 2^32 - 1, each a mix of the lower 32 bits of the given one (the
    finaliser of MurmurHash3, which is in the public domain).
    """
    number = number & 0xFFFFFFFF
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return number ^ (number >> 16)


def _masks(drawn: Tensor, length: Tensor, widest: Tensor, places: int) -> Tensor:
    """bool[B, places]: true where one of the [B, M, 2] stretches lies, each 0 to `widest` [B] wide
    and within the first `length` [B] places.
    """
    width = (drawn[..., 0] * (torch.minimum(widest, length) + 1)[:, None]).long()
    start = (drawn[..., 1] * (length[:, None] - width + 1)).long()
    place = torch.arange(places, device=drawn.device)
    return ((place >= start[..., None]) & (place < (start + width)[..., None])).any(1)


def _scaled_length(length: Any, factor: Any) -> Any:
    """The length of `length` frames at `factor` hundredths of their speed, rounded up as in
    `resample`.
    """
    return (length * 100 + factor - 1) // factor
