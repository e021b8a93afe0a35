"""The mel spectrogram that a vocoder turns into sound, computed for a batch on its device."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torchaudio.functional import melscale_fbanks

from samewise.runner.errors import ConfigError, Problem, require_at_least
from samewise.runner.interfaces import Batch, BatchTransform


@final
class VocoderMel(BatchTransform):
    """Adds `mel` float32[B, n_mels, N] in [0, 1] to a batch with `waveform` float32[B, S + 2 *
    context], and cuts the waveform to float32[B, S + 1].

    These are the S samples that WaveRNN reads for that spectrogram and the one after them: its
    first convolution takes `kernel_size` frames, so N = S / hop_length + kernel_size - 1 frames,
    centred at multiples of `hop_length` around the first sample kept, give S samples.

    The magnitudes (not energies) of a Hann window's spectrum, summed in mel bands of unit area, are
    taken to decibels, and the 100 dB below full scale to the interval from 0 to 1 (pytorch/audio,
    examples/pipeline_wavernn).

    Args:
        sample_rate: In Hz.
        n_fft: Samples of the Fourier transform.
        win_length: Samples of the window in it.
        hop_length: Samples from frame to frame; the product of the model's `upsample_scales`.
        n_mels: Mel bands, on Slaney's scale.
        f_min, f_max: Their range in Hz; None: up to half the rate.
        kernel_size: That of the model's first convolution, in frames.
        context: The samples before and after the S ones, at least n_fft / 2 + (kernel_size // 2) *
            hop_length.
    """

    window: Tensor
    banks: Tensor

    def __init__(
        self,
        *,
        sample_rate: int = 22050,
        n_fft: int = 2048,
        win_length: int = 1100,
        hop_length: int = 275,
        n_mels: int = 80,
        f_min: float = 40.0,
        f_max: float | None = None,
        kernel_size: int = 5,
        context: int = 1574,
    ) -> None:
        super().__init__()
        highest = sample_rate / 2 if f_max is None else f_max
        sizes = {
            "sample_rate": sample_rate,
            "n_fft": n_fft,
            "win_length": win_length,
            "hop_length": hop_length,
            "n_mels": n_mels,
            "kernel_size": kernel_size,
        }
        require_at_least(sizes)
        if win_length > n_fft:
            raise ConfigError(
                Problem(
                    "win_length",
                    "is longer than the Fourier transform",
                    win_length,
                    f"at most n_fft, {n_fft}",
                )
            )
        if kernel_size % 2 == 0:
            raise ConfigError(
                Problem(
                    "kernel_size",
                    "must be odd, so that a sample has as many frames before as after it",
                    kernel_size,
                )
            )
        if not 0 <= f_min < highest <= sample_rate / 2:
            raise ConfigError(
                Problem(
                    "f_min",
                    "f_min and f_max are not a valid range",
                    [f_min, highest],
                    f"ascending, between 0 and {sample_rate / 2:g} Hz",
                )
            )
        needed = n_fft // 2 + kernel_size // 2 * hop_length
        if context < needed:
            raise ConfigError(
                Problem(
                    "context",
                    "is too small for the windows",
                    context,
                    f"at least n_fft / 2 + (kernel_size // 2) * hop_length, {needed}",
                )
            )
        self.sample_rate, self.n_fft, self.win_length, self.hop_length = (
            sample_rate,
            n_fft,
            win_length,
            hop_length,
        )
        self.kernel_size, self.context = kernel_size, context
        self._before = context - needed
        self.register_buffer("window", torch.hann_window(win_length), persistent=False)
        banks = melscale_fbanks(
            n_fft // 2 + 1, f_min, highest, n_mels, sample_rate, norm="slaney", mel_scale="slaney"
        )
        self.register_buffer("banks", banks.t().contiguous(), persistent=False)

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        waveform = batch["waveform"].to(torch.float32)
        samples = waveform.shape[1] - 2 * self.context
        if samples < 1 or samples % self.hop_length:
            expected = (
                f"a multiple of the hop, {self.hop_length}, such as "
                f"{max(1, samples // self.hop_length) * self.hop_length}"
            )
            raise ConfigError(
                Problem(
                    "dataset.samples",
                    "the clips do not contain a whole number of frames",
                    samples,
                    expected,
                )
            )
        frames = samples // self.hop_length + self.kernel_size - 1
        seen = waveform[
            :, self._before : self._before + (frames - 1) * self.hop_length + self.n_fft
        ]
        return {
            **batch,
            "mel": self.mel(seen),
            "waveform": waveform[:, self.context : self.context + samples + 1],
        }

    def mel(self, waveform: Tensor) -> Tensor:
        """float32[B, n_mels, N] of float32[B, (N - 1) * hop_length + n_fft], on its device.

        The first frame is centred at n_fft / 2.
        """
        if self.window.device != waveform.device:
            self.to(waveform.device)
        spectrum = torch.stft(
            waveform,
            self.n_fft,
            self.hop_length,
            self.win_length,
            self.window,
            center=False,
            return_complex=True,
        ).abs()
        decibels = 20.0 * (self.banks @ spectrum).clamp(min=1e-5).log10()
        return ((decibels + 100.0) / 100.0).clamp(0.0, 1.0)
