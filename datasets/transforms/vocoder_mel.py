"""The mel spectrogram that a vocoder turns into sound, computed for a batch on its device."""

from typing import final

import torch
from torch import Tensor
from torchaudio.functional import melscale_fbanks

from samewise.runner.errors import ConfigError, Problem, require_at_least
from samewise.runner.interfaces import Batch, BatchTransform


@final
class VocoderMel(BatchTransform):
    """Adds `mel` float32[B, n_mels, N] in [0, 1] to a batch, and cuts its `waveform`.

    The waveform float32[B, S + 2 * context] is cut to float32[B, S + 1]: the S samples that WaveRNN
    reads for the spectrogram, and the next one. The model's first convolution takes `kernel_size`
    frames, so N = S / hop_length + kernel_size - 1 frames, centred at multiples of `hop_length`
    around the first sample, give S samples.

    The magnitudes (not energies) of a Hann window's spectrum are summed in mel bands of unit area
    and converted to decibels; the 100 dB below full scale become the interval from 0 to 1, as in
    pytorch/audio, examples/pipeline_wavernn.

    Args:
        sample_rate: The waveforms' rate in Hz.
        n_fft: Samples in a Fourier transform.
        win_length: Samples in a window.
        hop_length: Samples from one frame to the next; the product of the model's
            `upsample_scales`.
        n_mels: Number of mel bands, on Slaney's scale.
        f_min: Lower end of the bands in Hz.
        f_max: Upper end of the bands in Hz; None: half the rate.
        kernel_size: Frames in the model's first convolution; odd.
        context: Samples before and after the S samples, at least n_fft / 2 + (kernel_size // 2) *
            hop_length.

    Raises:
        ConfigError: A number is not valid, or a clip does not contain a whole number of frames.
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
        ConfigError.raise_if(
            win_length > n_fft,
            "win_length",
            "is longer than the Fourier transform",
            win_length,
            f"at most n_fft, {n_fft}",
        )
        ConfigError.raise_if(
            kernel_size % 2 == 0,
            "kernel_size",
            "must be odd, so that a sample has as many frames before as after it",
            kernel_size,
        )
        ConfigError.raise_if(
            not 0 <= f_min < highest <= sample_rate / 2,
            "f_min",
            "f_min and f_max are not a valid range",
            [f_min, highest],
            f"ascending, between 0 and {sample_rate / 2:g} Hz",
        )
        needed = n_fft // 2 + kernel_size // 2 * hop_length
        ConfigError.raise_if(
            context < needed,
            "context",
            "is too small for the windows",
            context,
            f"at least n_fft / 2 + (kernel_size // 2) * hop_length, {needed}",
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
            raise ConfigError(
                Problem(
                    "dataset.samples",
                    "the clips do not contain a whole number of frames",
                    samples,
                    f"a multiple of the hop, {self.hop_length}, such as "
                    f"{max(1, samples // self.hop_length) * self.hop_length}",
                )
            )
        frames = samples // self.hop_length + self.kernel_size - 1
        section = waveform[
            :, self._before : self._before + (frames - 1) * self.hop_length + self.n_fft
        ]
        return {
            **batch,
            "mel": self.mel(section),
            "waveform": waveform[:, self.context : self.context + samples + 1],
        }

    def mel(self, waveform: Tensor) -> Tensor:
        """Return float32[B, n_mels, N] on the waveform's device.

        Args:
            waveform: float32[B, (N - 1) * hop_length + n_fft]; the first frame is centred at n_fft
                / 2.
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
        # 1e-5 is 100 dB below full scale
        decibels = 20.0 * (self.banks @ spectrum).clamp(min=1e-5).log10()
        return ((decibels + 100.0) / 100.0).clamp(0.0, 1.0)
