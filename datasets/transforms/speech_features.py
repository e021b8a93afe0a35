"""From waveforms to a speech model's input, for a padded batch on its device: MFCC, log mel
energies, or the waveform.

Every front end gives what it would give for each utterance by itself: windows at an utterance's end
see its own reflection, not the batch's padding; statistics are taken over its own frames; and what
lies beyond them is zero.
"""

from __future__ import annotations

import abc
import math
from typing import Literal, final

import torch
from torch import Tensor
from torchaudio.functional import melscale_fbanks

from samewise.runner.errors import ConfigError, Problem, require_at_least
from samewise.runner.interfaces import Batch, BatchTransform
from samewise.runner.torch_private import check

MelScale = Literal["htk", "slaney"]

_SMALLEST_STD = 1e-5
_TOP_DB = 80.0
_SILENCE = 1e-6


class FrontEnd(BatchTransform):
    """Adds `features` float32[B, F, N] and `feature_length` int64[B] to a batch with `waveform`
    float32[B, T] and `length` int64[B].

    Args:
        normalise: Give each feature mean 0 and standard deviation 1 over the utterance's own
            frames, as the reference of Wav2Letter does (pytorch/audio,
            examples/pipeline_wav2letter). A feature that never changes becomes 0, where the
            reference has a division by zero.
    """

    def __init__(self, *, normalise: bool) -> None:
        super().__init__()
        self.normalise = normalise

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        waveform, length = batch["waveform"], batch["length"]
        if not isinstance(waveform, Tensor) or waveform.dim() != 2:
            raise ConfigError(
                Problem(
                    "transforms",
                    f"{type(self).__name__} works on waveforms in a batch [B, T]",
                    type(waveform).__name__,
                )
            )
        check(length.shape[0] == waveform.shape[0])  # an export knows by this that it is one size
        self.to(waveform.device)
        features, frames = self.features(waveform.to(torch.float32), length)
        inside = inside_length(frames, features.shape[-1])[:, None]
        features = torch.where(inside, features, 0.0)
        if self.normalise:
            features = _normalise(features, frames, inside)
        return {**batch, "features": features, "feature_length": frames}

    @abc.abstractmethod
    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """float32[B, F, N], and the number of valid frames int64[B]."""


@final
class Waveform(FrontEnd):
    """The waveform itself, as one feature: float32[B, 1, T]."""

    def __init__(self, *, normalise: bool = True) -> None:
        super().__init__(normalise=normalise)

    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return waveform[:, None], length


class _Mel(FrontEnd):
    """Mel energies, the basis of the front ends below.

    Frames are centred at multiples of `hop_length` and windowed by a Hann window. There are `length
    // hop_length + 1` of them, with an odd `n_fft` `(length - 1) // hop_length + 1`, as torch.stft
    gives for a recording by itself.
    """

    window: Tensor
    banks: Tensor

    def __init__(
        self,
        *,
        sample_rate: int,
        n_mels: int,
        n_fft: int,
        hop_length: int,
        f_min: float,
        f_max: float | None,
        mel_scale: MelScale,
        normalise: bool,
    ) -> None:
        super().__init__(normalise=normalise)
        highest = sample_rate / 2 if f_max is None else f_max
        sizes = {
            "sample_rate": sample_rate,
            "n_mels": n_mels,
            "n_fft": n_fft,
            "hop_length": hop_length,
        }
        require_at_least({f"transforms.{name}": value for name, value in sizes.items()})
        if not 0 <= f_min < highest <= sample_rate / 2:
            words = "f_min and f_max are not a valid range"
            raise ConfigError(
                Problem(
                    "transforms",
                    words,
                    [f_min, highest],
                    f"ascending, between 0 and {sample_rate / 2:g} Hz",
                )
            )
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        bands = (n_fft // 2 + 1, f_min, highest, n_mels, sample_rate)
        banks = melscale_fbanks(*bands, mel_scale=mel_scale).t().contiguous()
        empty = int((banks.sum(1) == 0).sum())
        if empty:
            hint = "lower n_mels or raise n_fft"
            raise ConfigError(
                Problem(
                    "transforms.n_mels",
                    f"{empty} of the mel bands are narrower than the spectrum's resolution",
                    n_mels,
                    hint=hint,
                )
            )
        self.register_buffer("banks", banks, persistent=False)

    def energies(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """float32[B, n_mels, N], not negative, and the valid frames."""
        extended = _pad_reflected(waveform, length, self.n_fft // 2)
        spectrum = torch.stft(
            extended,
            self.n_fft,
            self.hop_length,
            window=self.window,
            center=False,
            return_complex=True,
        )
        frames = (length - 1 if self.n_fft % 2 else length) // self.hop_length + 1
        return self.banks @ (spectrum.real.square() + spectrum.imag.square()), frames


@final
class MFCC(_Mel):
    """Mel-frequency cepstral coefficients, float32[B, n_mfcc, N]: the DCT of mel energies in dB (as
    torchaudio.transforms.MFCC, utterance by utterance).

    torchaudio's cuts energies 80 dB below the loudest of the whole *batch*; here it is the loudest
    of the utterance.

    Args:
        sample_rate: Of the waveforms, in Hz.
        n_mfcc: Coefficients.
        n_mels: Mel bands.
        n_fft: Samples of a window, and of the Fourier transform.
        hop_length: Samples from one frame to the next.
        f_min, f_max: The range of the bands, in Hz; None: up to half the rate.
        mel_scale: "htk" or "slaney".
        normalise: As in `FrontEnd`.
    """

    dct: Tensor

    def __init__(
        self,
        *,
        sample_rate: int = 16000,
        n_mfcc: int = 13,
        n_mels: int = 13,
        n_fft: int = 400,
        hop_length: int = 160,
        f_min: float = 0.0,
        f_max: float | None = None,
        mel_scale: MelScale = "htk",
        normalise: bool = True,
    ) -> None:
        super().__init__(
            sample_rate=sample_rate,
            n_mels=n_mels,
            n_fft=n_fft,
            hop_length=hop_length,
            f_min=f_min,
            f_max=f_max,
            mel_scale=mel_scale,
            normalise=normalise,
        )
        if not 1 <= n_mfcc <= n_mels:
            raise ConfigError(
                Problem("transforms.n_mfcc", "must be from 1 to n_mels", n_mfcc, f"1 to {n_mels}")
            )
        # The rows of the orthonormal DCT-II.
        dct = torch.cos(
            math.pi
            / n_mels
            * (torch.arange(float(n_mels)) + 0.5)
            * torch.arange(float(n_mfcc))[:, None]
        )
        dct[0] *= 1.0 / math.sqrt(2.0)
        self.register_buffer("dct", dct * math.sqrt(2.0 / n_mels), persistent=False)

    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        energies, frames = self.energies(waveform, length)
        decibels = 10.0 * energies.clamp(min=1e-10).log10()
        inside = inside_length(frames, decibels.shape[-1])[:, None]
        loudest = torch.where(inside, decibels, -math.inf).amax(dim=(1, 2), keepdim=True)
        return self.dct @ torch.maximum(decibels, loudest - _TOP_DB), frames


@final
class LogMel(_Mel):
    """Natural logarithms of mel energies, float32[B, n_mels, N], clamped to at least 1e-6.

    Args:
        sample_rate: Of the waveforms, in Hz.
        n_mels: Mel bands.
        n_fft: Samples of a window, and of the Fourier transform.
        hop_length: Samples from one frame to the next.
        f_min, f_max: The range of the bands, in Hz; None: up to half the rate.
        mel_scale: "htk" or "slaney".
        normalise: As in `FrontEnd`. It takes out what stays the same throughout, such as the pitch
            of a steady tone.
        above_silence: Count from the lowest energy, so that silence is 0, as what follows a
            recording, and nothing is below.
    """

    def __init__(
        self,
        *,
        sample_rate: int = 16000,
        n_mels: int = 80,
        n_fft: int = 512,
        hop_length: int = 160,
        f_min: float = 20.0,
        f_max: float | None = None,
        mel_scale: MelScale = "htk",
        normalise: bool = True,
        above_silence: bool = False,
    ) -> None:
        super().__init__(
            sample_rate=sample_rate,
            n_mels=n_mels,
            n_fft=n_fft,
            hop_length=hop_length,
            f_min=f_min,
            f_max=f_max,
            mel_scale=mel_scale,
            normalise=normalise,
        )
        self.above_silence = above_silence

    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        energies, frames = self.energies(waveform, length)
        if self.above_silence:
            return (energies / _SILENCE).clamp(min=1.0).log(), frames
        return energies.clamp(min=_SILENCE).log(), frames


def inside_length(length: Tensor, longest: int) -> Tensor:
    """bool[B, longest]: true for each sample's first `length` places."""
    return torch.arange(longest, device=length.device) < length[:, None]


def _pad_reflected(waveform: Tensor, length: Tensor, margin: int) -> Tensor:
    """float32[B, T + 2 margin]: each waveform extended by `margin` samples mirrored at its own
    ends.

    Where a waveform is shorter than the margin the mirror image is mirrored again, which torch's
    reflection padding refuses to do.
    """
    place = torch.arange(-margin, waveform.shape[1] + margin, device=waveform.device)
    last = (length - 1).clamp(min=0)[:, None]
    folded = place % (2 * last).clamp(min=1)  # a period goes to the last sample and back
    return waveform.gather(1, torch.minimum(folded, 2 * last - folded).clamp(min=0))


def _normalise(features: Tensor, frames: Tensor, inside: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (unbiased, as torch's) of float32[B, F, N] over each sample's
    valid frames; zero after them.
    """
    count = frames.clamp(min=1)[:, None, None].to(features.dtype)
    # The mean of equal numbers is rounded, and may not be that number
    changing = (inside & (features != features[..., :1])).any(-1, keepdim=True)
    centred = torch.where(inside & changing, features - features.sum(-1, keepdim=True) / count, 0.0)
    std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / std.clamp(min=_SMALLEST_STD)
