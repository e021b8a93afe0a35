"""A vocoder: speech from its mel spectrogram, sample by sample, with WaveRNN.

Source: Kalchbrenner et al. 2018, Efficient Neural Audio Synthesis, arXiv 1802.08435.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.folders import SOUNDS
from samewise.datasets.transforms.vocoder_mel import VocoderMel
from samewise.recipes.models.wavernn import WaveRNN, conditioning, speak, step
from samewise.recipes.parts.amplitudes import Amplitudes, LogisticMixture, MuLaw, entropy
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.sounds import save_spectrograms, save_wav
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint, require_at_least
from samewise.runner.interfaces import Batch, Form, Loss, Phase, Prediction, Recipe, Scores

_TOGETHER = 16
"""Number of clips that are resynthesised at a time: twice as many take longer."""


@dataclass(frozen=True)
class Resynthesis:
    """A clip and the model's resynthesis from its spectrogram.

    Args:
        name: The recording's name.
        true: float32[S], the clip.
        spoken: float32[S], the resynthesis.
        distance: Distance of their log-mel spectrograms in dB.
    """

    name: str
    true: Tensor
    spoken: Tensor
    distance: float


@dataclass(frozen=True)
class MeasuredVocoder:
    """Measurements of one evaluation batch of B clips of S samples, on the CPU.

    Args:
        surprise: float64[B], in nats, summed over a clip's samples.
        samples: S.
        labels: int64[n_classes], how often each mu-law step was the target; empty for a mixture of
            logistics.
        spoken: The resynthesised clips.
    """

    surprise: Tensor
    samples: int
    labels: Tensor
    spoken: tuple[Resynthesis, ...]


@final
class Vocoder(Recipe):
    """A vocoder; batches have `waveform` and `mel`, as `VocoderMel` makes them.

    A batch is `{"waveform": float32[B, S + 1] in [-1, 1], "mel": float32[B, n_mels, N], ...}`. At
    time t the model reads sample t and the spectrogram, and predicts sample t + 1; its state begins
    at zero with each clip. When it speaks, it reads its output of time t at time t + 1, so the
    spoken signal corresponds to the clip from its second sample on, like the targets.

    All samples of a clip count. The silence after a recording shorter than `dataset.samples`, or in
    evaluation `dataset.valid_samples`, is part of `loss`, `bits_per_sample` and `label_entropy`:
    compare these only for clips of one length.

    Args:
        front_end: The transform that computes spectrograms; in a config `${transforms.front_end}`.
        output: "mu_law": cross-entropy over `n_classes` steps; "logistics": a mixture of n_classes
            / 3 logistic distributions over 65,536 levels.
        n_classes: Number of the model's outputs.
        resynthesise: Number of the split's clips, the first ones, that the model speaks in each
            evaluation. At 22,050 Hz this takes at least seconds for a second of speech.

    Raises:
        ConfigError: `resynthesise` is negative, or `n_classes` does not fit the output.
    """

    gives = (
        "at each time the scores of the next sample: of n_classes steps of mu-law, or a "
        "mixture of logistic distributions, as recipe.output says"
    )
    takes = "recordings"
    extensions = SOUNDS

    def __init__(
        self,
        *,
        front_end: VocoderMel,
        output: Literal["mu_law", "logistics"] = "mu_law",
        n_classes: int = 256,
        resynthesise: int = 0,
    ) -> None:
        require_at_least({"recipe.resynthesise": resynthesise}, least=0)
        self.front_end = front_end
        self.amplitudes: Amplitudes = (
            MuLaw(n_classes=n_classes)
            if output == "mu_law"
            else LogisticMixture(n_classes=n_classes)
        )
        self.resynthesise = resynthesise

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate clips of equal length.

        Raises:
            DataError: A sample has another form, or clips differ in length.
        """
        for sample in samples:
            if not isinstance(sample, Mapping) or "waveform" not in sample:
                raise DataError(
                    Problem(
                        "dataset",
                        "a sample is not a clip",
                        type(sample).__name__,
                        "a dict with `waveform` float32[T]",
                    )
                )
        lengths = sorted({len(sample["waveform"]) for sample in samples})
        if len(lengths) > 1:
            raise DataError(
                Problem(
                    "dataset",
                    "the clips of a batch differ in length",
                    lengths,
                    "clips of one length",
                )
            )
        return default_collate(list(samples))

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the negative log-probability of the next samples in nats, summed over B * S."""
        surprise = self._surprise(model, batch)
        return Loss(surprise.sum(), count=surprise.numel())

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredVocoder:
        surprise = self._surprise(model, batch).double().sum(1).cpu()
        labels = torch.zeros(0, dtype=torch.int64)
        if isinstance(self.amplitudes, MuLaw):
            labels = torch.bincount(
                self.amplitudes.labels(batch["waveform"][:, 1:]).flatten().cpu(),
                minlength=self.amplitudes.n_classes,
            )
        return MeasuredVocoder(
            surprise, batch["waveform"].shape[1] - 1, labels, self._resynthesise(model, batch)
        )

    def scores(self, dataset: Any) -> Scores:
        return VocoderScores(sample_rate=self.front_end.sample_rate)

    def read(self, file: Path) -> dict[str, Any]:
        """Read a recording to resynthesise."""
        waveform, _ = read_audio(file, sample_rate=self.front_end.sample_rate)
        # Silence completes the last frame
        context, beyond = self.front_end.context, -len(waveform) % self.front_end.hop_length
        return {
            "waveform": F.pad(waveform, (context, context + beyond)),
            "length": len(waveform),
            "name": file.name,
        }

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        # Each file has the same random numbers, so the batch's other files do not matter
        spoken = self._speak(model, batch["mel"], [0] * len(batch["mel"]))
        predictions = list[Prediction]()
        for place, length in enumerate(batch["length"].tolist()):
            true, resynthesis = batch["waveform"][place, 1 : length + 1], spoken[place, :length]
            distance = self.log_mel_distance(true[None], resynthesis[None])[0]
            predictions.append(
                Spoken(
                    Resynthesis(
                        batch["name"][place], true.cpu(), resynthesis.cpu(), float(distance)
                    ),
                    self.front_end.sample_rate,
                )
            )
        return predictions

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """Return the functions by which a program speaks.

        They are `conditioning`, called once for a spectrogram, and `step`, called once for each
        sample, which uses `uniform` float32[B, 2]. Their checks are the samples of a short
        spectrogram, and the random numbers that drew them.
        """
        if not isinstance(model, WaveRNN):
            return {}
        # Eight frames of speech
        mel = batch["mel"][:, :, : model.kernel_size + 7].contiguous()
        conditions = list(conditioning(model, mel).values())
        uniform = torch.rand(
            len(conditions[0]), len(mel), 2, generator=torch.Generator().manual_seed(0)
        )
        sample, states, spoken = (
            torch.zeros(len(mel)),
            (torch.zeros(len(mel), model.n_rnn),) * 2,
            list[Tensor](),
        )
        example = dict[str, Tensor]()
        for time, numbers in enumerate(uniform):
            names = ("sample", "state1", "state2", "entry", "second", "third", "fourth", "uniform")
            inputs = dict(
                zip(names, (sample, *states, *(x[time] for x in conditions), numbers), strict=True)
            )
            # The example's states are not zero
            example = inputs if time < 4 else example
            sample, *states = self._next(model, *inputs.values()).values()
            spoken.append(sample)
        checks = {"uniform": uniform, "spoken": torch.stack(spoken, 1)}
        return {
            "conditioning": Form(conditioning, {"mel": mel}),
            "step": Form(self._next, example, checks),
        }

    def log_mel_distance(self, true: Tensor, spoken: Tensor) -> Tensor:
        """Return the distance of two log-mel spectrograms in dB, float32[B].

        It is the root mean square over bands of the difference, averaged over frames, in float32
        for any precision of the run. Phases do not count, and levels below -100 dB count as -100
        dB.

        Args:
            true: float32[B, S].
            spoken: float32[B, S].
        """
        margin = self.front_end.n_fft // 2
        with torch.autocast(true.device.type, enabled=False):
            true_mel, spoken_mel = (
                self.front_end.mel(F.pad(signal, (margin, margin))) for signal in (true, spoken)
            )
        return 100.0 * (true_mel - spoken_mel).square().mean(1).sqrt().mean(1)

    def _surprise(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the negative log-probability of each next sample in nats, float32[B, S]."""
        waveform = batch["waveform"]
        read, target = self.amplitudes.written(waveform[:, :-1]), waveform[:, 1:]
        outputs = model(read[:, None], batch["mel"][:, None])
        expected = [*target.shape, self.amplitudes.n_classes]
        if not isinstance(outputs, Tensor) or list(outputs.squeeze(1).shape) != expected:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return the outputs that the recipe reads",
                    form_of(outputs),
                    f"a tensor {expected}",
                    none_hint(outputs) or "set recipe.n_classes",
                )
            )
        # One row for each sample: over (N, C, T), the gradient of cross-entropy is not
        # deterministic on CUDA.
        flat = outputs.reshape(-1, self.amplitudes.n_classes)
        return self.amplitudes.surprise(
            flat.to(torch.promote_types(flat.dtype, torch.float32)), target.reshape(-1)
        ).view(target.shape)

    def _next(self, model: WaveRNN, *inputs: Tensor) -> dict[str, Tensor]:
        *states, uniform = inputs
        outputs, state1, state2 = step(model, *states)
        return {
            "next": self.amplitudes.drawn_by(outputs, uniform),
            "after1": state1,
            "after2": state2,
        }

    def _speak(self, model: nn.Module, mel: Tensor, numbers: Sequence[int]) -> Tensor:
        """Speak float32[B, S]; the random numbers of a clip depend on its number alone."""
        times = (mel.shape[2] - self.front_end.kernel_size + 1) * self.front_end.hop_length
        drawn = [
            torch.rand(times, 2, generator=torch.Generator().manual_seed(number))
            for number in numbers
        ]
        uniform = iter(torch.stack(drawn, 1).to(mel.device))
        return self.amplitudes.heard(
            speak(model, mel, lambda outputs: self.amplitudes.drawn_by(outputs, next(uniform)))
        )

    def _resynthesise(self, model: nn.Module, batch: Batch) -> tuple[Resynthesis, ...]:
        """Resynthesise the clips of a batch that are among the split's first ones."""
        # A clip has a fixed row in a group of fixed size, whose other rows may be silent: it gets
        # the same bits in any batch
        places = (
            {
                index: place
                for place, index in enumerate(batch["index"].tolist())
                if index < self.resynthesise
            }
            if self.resynthesise
            else {}
        )
        size, clips = min(self.resynthesise, _TOGETHER), list[Resynthesis]()
        for group in dict.fromkeys(index // size for index in places):
            numbers = range(group * size, (group + 1) * size)
            mels = [
                batch["mel"][places[number]]
                if number in places
                else torch.zeros_like(batch["mel"][0])
                for number in numbers
            ]
            spoken = self._speak(model, torch.stack(mels), numbers)
            for number, signal in zip(numbers, spoken, strict=True):
                if (place := places.get(number)) is not None:
                    true = batch["waveform"][place, 1:]
                    distance = self.log_mel_distance(true[None], signal[None]).item()
                    clips.append(
                        Resynthesis(batch["name"][place], true.cpu(), signal.cpu(), distance)
                    )
        return tuple(clips)


@final
class VocoderScores(Scores):
    """Scores of a vocoder: the same bits however the split is cut into batches.

    Sums are float64 in the order of clips; counts are integers.

    Args:
        sample_rate: The clips' rate in Hz.
    """

    def __init__(self, *, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._surprise = 0.0
        self._samples = 0
        self._labels = torch.zeros(0, dtype=torch.int64)
        self._spoken: list[Resynthesis] = []

    def add(self, measured: MeasuredVocoder) -> None:
        # One clip after the other, so that the sum does not depend on the batches
        for surprise in measured.surprise.tolist():
            self._surprise += surprise
        self._samples += len(measured.surprise) * measured.samples
        self._labels = measured.labels + self._labels if len(self._labels) else measured.labels
        self._spoken += measured.spoken

    def compute(self) -> dict[str, float]:
        """Return `loss` in nats per sample, `bits_per_sample`, and further metrics.

        `log_mel_distance` in dB if clips were resynthesised. For mu-law also `label_entropy`, the
        loss of a model that knows only how often each step occurs, and `below_entropy`, their
        difference.
        """
        loss = self._surprise / self._samples
        metrics = {"loss": loss, "bits_per_sample": loss / math.log(2.0)}
        if len(self._labels):
            metrics["label_entropy"] = entropy(self._labels)
            metrics["below_entropy"] = metrics["label_entropy"] - loss
        if self._spoken:
            metrics["log_mel_distance"] = sum(x.distance for x in self._spoken) / len(self._spoken)
        return metrics

    def save_pictures(self, folder: Path) -> None:
        """Write the resynthesised and the true clips, as WAV files and spectrograms."""
        rows = list[list[tuple[str, Tensor]]]()
        for number, clip in enumerate(self._spoken):
            save_wav(folder / f"clip_{number}_true.wav", clip.true, sample_rate=self.sample_rate)
            save_wav(
                folder / f"clip_{number}_resynthesised.wav",
                clip.spoken,
                sample_rate=self.sample_rate,
            )
            rows.append(
                [
                    (clip.name, clip.true),
                    (f"resynthesised, {clip.distance:.1f} dB off", clip.spoken),
                ]
            )
        if rows:
            save_spectrograms(folder / "spectrograms.png", rows, sample_rate=self.sample_rate)


@final
class Spoken(Prediction):
    """A resynthesised recording.

    Args:
        resynthesis: The recording and its resynthesis.
        sample_rate: Their rate in Hz.
    """

    def __init__(self, resynthesis: Resynthesis, sample_rate: int) -> None:
        self.resynthesis = resynthesis
        self.sample_rate = sample_rate

    def values(self) -> dict[str, Any]:
        return {
            "seconds": round(len(self.resynthesis.spoken) / self.sample_rate, 3),
            "log_mel_distance": round(self.resynthesis.distance, 3),
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        rows = [
            [
                (name, self.resynthesis.true),
                (f"resynthesised, {self.resynthesis.distance:.1f} dB off", self.resynthesis.spoken),
            ]
        ]
        return [
            save_wav(
                folder / f"{name}_resynthesised.wav",
                self.resynthesis.spoken,
                sample_rate=self.sample_rate,
            ),
            save_spectrograms(
                folder / f"{name}_spectrograms.png", rows, sample_rate=self.sample_rate
            ),
        ]
