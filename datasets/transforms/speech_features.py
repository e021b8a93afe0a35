"""Front ends of speech models, on padded batches: MFCC, log mel energies, or the waveform.

Every front end returns for each utterance what it would return for the utterance alone: windows at
its end see its own reflection, not the batch's padding; statistics cover its own frames; and frames
beyond it are zero.
"""

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
    """Adds `features` float32[B, F, N] and `feature_length` int64[B] to a batch.

    The batch has `waveform` float32[B, T] and `length` int64[B].

    Args:
        normalise: Give each feature mean 0 and standard deviation 1 over the utterance's own
            frames, as the reference of Wav2Letter does (pytorch/audio,
            examples/pipeline_wav2letter). A constant feature becomes 0, where the reference divides
            by zero.

    Raises:
        ConfigError: The batch has no waveforms [B, T].
    """

    def __init__(self, *, normalise: bool = True) -> None:
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
        # Tells an export that both batch sizes are the same
        check(length.shape[0] == waveform.shape[0])
        self.to(waveform.device)
        features, frames = self.features(waveform.to(torch.float32), length)
        inside = inside_length(frames, features.shape[-1])[:, None]
        features = torch.where(inside, features, 0.0)
        if self.normalise:
            features = _normalise(features, frames, inside)
        return {**batch, "features": features, "feature_length": frames}

    @abc.abstractmethod
    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32[B, F, N], and the number of valid frames, int64[B].

        Args:
            waveform: float32[B, T].
            length: int64[B] in samples.
        """


@final
class Waveform(FrontEnd):
    """The waveform itself, as one feature: float32[B, 1, T].

    Args:
        normalise: As in `FrontEnd`.
    """

    def features(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return waveform[:, None], length


class _Mel(FrontEnd):
    """Mel energies, the basis of further front ends.

    Frames are centred at multiples of `hop_length`, with a Hann window. There are `length //
    hop_length + 1` of them, or `(length - 1) // hop_length + 1` with an odd `n_fft`, as torch.stft
    returns for a single recording.
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
        ConfigError.raise_if(
            not 0 <= f_min < highest <= sample_rate / 2,
            "transforms",
            "f_min and f_max are not a valid range",
            [f_min, highest],
            f"ascending, between 0 and {sample_rate / 2:g} Hz",
        )
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        banks = melscale_fbanks(
            n_fft // 2 + 1, f_min, highest, n_mels, sample_rate, mel_scale=mel_scale
        )
        empty = int((banks.sum(0) == 0).sum())
        ConfigError.raise_if(
            empty,
            "transforms.n_mels",
            f"{empty} of the mel bands are narrower than the spectrum's resolution",
            n_mels,
            hint="lower n_mels or raise n_fft",
        )
        self.register_buffer("banks", banks.t().contiguous(), persistent=False)

    def energies(self, waveform: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32[B, n_mels, N], not negative, and the valid frames."""
        # torch.stft's own centring would mirror the padding of the batch
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
    """Mel-frequency cepstral coefficients, float32[B, n_mfcc, N].

    They are the DCT of mel energies in dB, as torchaudio.transforms.MFCC computes them for a single
    utterance. torchaudio cuts energies 80 dB below the loudest of the whole *batch*; here it is the
    loudest of the utterance.

    Args:
        sample_rate: The waveforms' rate in Hz.
        n_mfcc: Number of coefficients.
        n_mels: Number of mel bands.
        n_fft: Samples in a window and its Fourier transform.
        hop_length: Samples from one frame to the next.
        f_min: Lower end of the bands in Hz.
        f_max: Upper end of the bands in Hz; None: half the rate.
        mel_scale: "htk" or "slaney".
        normalise: As in `FrontEnd`.

    Raises:
        ConfigError: A number is not valid, or a mel band is narrower than the spectrum's
            resolution.
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
        ConfigError.raise_if(
            not 1 <= n_mfcc <= n_mels,
            "transforms.n_mfcc",
            "must be from 1 to n_mels",
            n_mfcc,
            f"1 to {n_mels}",
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
    """Natural logarithms of mel energies, float32[B, n_mels, N], of at least 1e-6.

    Args:
        sample_rate: The waveforms' rate in Hz.
        n_mels: Number of mel bands.
        n_fft: Samples in a window and its Fourier transform.
        hop_length: Samples from one frame to the next.
        f_min: Lower end of the bands in Hz.
        f_max: Upper end of the bands in Hz; None: half the rate.
        mel_scale: "htk" or "slaney".
        normalise: As in `FrontEnd`. It removes what is constant, such as the pitch of a steady
            tone.
        above_silence: Count from the lowest energy: silence is 0, like the padding, and no value is
            lower.

    Raises:
        ConfigError: A number is not valid, or a mel band is narrower than the spectrum's
            resolution.
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
    """Return bool[B, longest]: true for each sample's first `length` places."""
    return torch.arange(longest, device=length.device) < length[:, None]


def _pad_reflected(waveform: Tensor, length: Tensor, margin: int) -> Tensor:
    """Return float32[B, T + 2 margin]: each waveform mirrored at its own ends."""
    place = torch.arange(-margin, waveform.shape[1] + margin, device=waveform.device)
    last = (length - 1).clamp(min=0)[:, None]
    # A period goes to the last sample and back, so a waveform shorter than the margin is mirrored
    # again, which torch's reflection padding refuses
    folded = place % (2 * last).clamp(min=1)
    return waveform.gather(1, torch.minimum(folded, 2 * last - folded).clamp(min=0))


def _normalise(features: Tensor, frames: Tensor, inside: Tensor) -> Tensor:
    """Give float32[B, F, N] mean 0 and standard deviation 1 over each sample's valid frames.

    The deviation is unbiased, as torch's; frames after the valid ones are zero.
    """
    count = frames.clamp(min=1)[:, None, None].to(features.dtype)
    # The rounded mean of equal numbers may differ from them
    changing = (inside & (features != features[..., :1])).any(-1, keepdim=True)
    centred = torch.where(inside & changing, features - features.sum(-1, keepdim=True) / count, 0.0)
    std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / std.clamp(min=_SMALLEST_STD)
