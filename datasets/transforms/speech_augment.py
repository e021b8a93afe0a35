"""Random changes of utterances, with separate choices for each: masks, speed, noise."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from samewise.datasets.parts.signals import resample
from samewise.datasets.transforms.images import chance, interval, uniform
from samewise.datasets.transforms.speech_features import inside_length
from samewise.runner.errors import ConfigError, require_at_least
from samewise.runner.interfaces import Batch, BatchTransform


@final
class SpecAugment(BatchTransform):
    """Frequency bands and time spans set to 0, the mean of normalised features.

    Source: Park et al. 2019, SpecAugment, arXiv 1904.08779, without time warping. Changes
    `features` float32[B, F, N]. Choices: `frequency` float64[B, frequency_masks, 2] and `time`
    float64[B, time_masks, 2], a width and a place, as shares of the possible ones.

    Args:
        frequency_masks: Number of bands in each utterance.
        max_band: Widest band, in features.
        time_masks: Number of spans in each utterance.
        max_stretch: Longest span, in frames.
        max_share: Longest span, as a share of the utterance.

    Raises:
        ConfigError: A number is negative, or `max_share` is not from 0 to 1.
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
        require_at_least(
            {
                "transforms.frequency_masks": frequency_masks,
                "transforms.max_band": max_band,
                "transforms.time_masks": time_masks,
                "transforms.max_stretch": max_stretch,
            },
            least=0,
        )
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
    """Faster or slower speech, with its pitch, by resampling.

    Source: Ko et al. 2015, Audio Augmentation for Speech Recognition, Interspeech. Changes
    `waveform` float32[B, T] and `length` int64[B]. Choices: `speed` int64[B], the number of each
    utterance's factor.

    Args:
        factors: Speeds, rounded to hundredths: 1.1 is a tenth faster.

    Raises:
        ConfigError: There are no factors, or one is not greater than 0.
    """

    def __init__(self, *, factors: Sequence[float] = (0.9, 1.0, 1.1)) -> None:
        super().__init__()
        self.factors = tuple(round(100 * factor) for factor in factors)
        ConfigError.raise_if(
            not self.factors or min(self.factors) < 1,
            "transforms",
            "factors are not valid speeds",
            list(factors),
            "numbers greater than 0, such as [0.9, 1.0, 1.1]",
        )

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"speed": torch.randint(len(self.factors), (size,))}

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        waveform, length = batch["waveform"], batch["length"]
        chosen = [self.factors[number] for number in choices["speed"].tolist()]
        perturbed = waveform.new_zeros(
            len(chosen), max(_scaled_length(waveform.shape[1], factor) for factor in chosen)
        )
        # All utterances of a factor are resampled together
        for factor in dict.fromkeys(chosen):
            rows = torch.tensor([row for row, x in enumerate(chosen) if x == factor]).to(
                waveform.device, non_blocking=True
            )
            changed = waveform[rows] if factor == 100 else resample(waveform[rows], factor, 100)
            perturbed[rows, : changed.shape[1]] = changed
        length = _scaled_length(length, torch.tensor(chosen).to(length.device, non_blocking=True))
        return {
            **batch,
            "waveform": torch.where(inside_length(length, perturbed.shape[1]), perturbed, 0.0),
            "length": length,
        }


@final
class Noise(BatchTransform):
    """White Gaussian noise with the drawn signal-to-noise ratio.

    Changes `waveform` float32[B, T]. Choices, all [B]: `snr` float64 in dB; `noisy` bool; `seed`
    int64 of the noise. The noise is a function of seed and position: the same on every device up to
    rounding, whatever else is in the batch.

    Args:
        snr: Smallest and largest signal-to-noise ratio in dB.
        p: Share of utterances that get noise.

    Raises:
        ConfigError: The interval or the share is not valid.
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
    """Return float32[B, count] from the standard normal distribution.

    A value depends only on the sample's seed and its position.

    Args:
        seed: int64[B].
        count: Number of values for each sample.
    """
    place = torch.arange(count, device=seed.device)
    # The salts give two independent numbers for one seed and position
    radius_bits, angle_bits = (
        _hash(_hash(seed[:, None] + salt) + place) for salt in (0x9E3779B9, 0x85EBCA6B)
    )
    # Two uniform numbers give a normal one (Box and Muller 1958)
    radius = (-2.0 * ((radius_bits + 0.5) / 2.0**32).log()).sqrt()
    return radius * (2.0 * math.pi * angle_bits / 2.0**32).cos()


def _hash(number: Tensor) -> Tensor:
    """Mix the lower 32 bits of int64 numbers to numbers from 0 to 2^32 - 1.

    It is the finaliser of MurmurHash3, which is in the public domain.
    """
    number = number & 0xFFFFFFFF
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return number ^ (number >> 16)


def _masks(shares: Tensor, length: Tensor, widest: Tensor, count: int) -> Tensor:
    """Return bool[B, count]: the places that the spans cover.

    Args:
        shares: float64[B, M, 2], the width and the place of each span.
        length: int64[B], the number of places that spans may cover.
        widest: int64[B], the greatest width of a span.
        count: Number of places.
    """
    width = (shares[..., 0] * (torch.minimum(widest, length) + 1)[:, None]).long()
    start = (shares[..., 1] * (length[:, None] - width + 1)).long()
    place = torch.arange(count, device=shares.device)
    return ((place >= start[..., None]) & (place < (start + width)[..., None])).any(1)


def _scaled_length(length: Any, factor: Any) -> Any:
    """Return the length at `factor` hundredths of the speed, rounded up as in `resample`."""
    return (length * 100 + factor - 1) // factor
