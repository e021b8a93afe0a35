"""A vocoder: speech from its mel spectrogram, sample by sample, with a recurrent network (WaveRNN,
Kalchbrenner et al., arXiv 1802.08435).
"""

from __future__ import annotations

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
"""Clips that are resynthesised at a time: twice as many take longer."""


@dataclass(frozen=True)
class Resynthesis:
    """A clip and the model's resynthesis from its spectrogram.

    Args:
        name: Of the recording.
        true: float32[S], the clip.
        spoken: float32[S].
        distance: In dB, between their log-mel spectrograms.
    """

    name: str
    true: Tensor
    spoken: Tensor
    distance: float


@dataclass(frozen=True)
class MeasuredVocoder:
    """The measurements of one evaluation batch of B clips of S samples, on the CPU.

    Args:
        surprise: float64[B], in nats, summed over a clip's samples.
        samples: S.
        labels: int64[n_classes], how often each mu-law step was to be predicted; empty for a
            mixture of logistics.
        spoken: The clips that were resynthesised.
    """

    surprise: Tensor
    samples: int
    labels: Tensor
    spoken: tuple[Resynthesis, ...]


@final
class Vocoder(Recipe):
    """Batches are `{"waveform": float32[B, S + 1] in [-1, 1], "mel": float32[B, n_mels, N], ...}`,
    as made by `VocoderMel`.

    At time t the model reads sample t and the spectrogram, and predicts sample t + 1; its state
    begins at zero with each clip. Speaking, its output at time t is what it reads at time t + 1, so
    what it speaks is the clip from its second sample on, as the targets are.

    All samples of a clip count. The silence after a recording shorter than `dataset.samples`, or in
    evaluation `dataset.valid_samples`, is part of `loss`, `bits_per_sample` and `label_entropy`, so
    compare these only for clips of one length.

    Args:
        front_end: The transform that makes spectrograms; config: `${transforms.front_end}`.
        output: "mu_law": cross-entropy over `n_classes` steps; "logistics": a mixture of n_classes
            / 3 logistic distributions over 65,536 levels.
        n_classes: The model's outputs.
        resynthesise: How many clips of the split, its first ones, each evaluation has the model
            speak: at 22,050 Hz, seconds of computation for a second of speech at best.
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
            DataError: a sample has another form, or clips differ in length.
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
        """Minus the log-probability of the next sample in nats, summed over the B * S samples."""
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

    def scores(self, dataset: Any) -> VocoderScores:
        return VocoderScores(sample_rate=self.front_end.sample_rate)

    def read(self, file: Path) -> dict[str, Any]:
        """A recording to resynthesise."""
        waveform, _ = read_audio(file, sample_rate=self.front_end.sample_rate)
        context, beyond = self.front_end.context, -len(waveform) % self.front_end.hop_length
        return {
            "waveform": F.pad(waveform, (context, context + beyond)),
            "length": len(waveform),
            "name": file.name,
        }

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        # So that other files do not matter
        spoken = self._speak(model, batch["mel"], [0] * len(batch["mel"]))
        made = list[Prediction]()
        for place, length in enumerate(batch["length"].tolist()):
            true, again = batch["waveform"][place, 1 : length + 1], spoken[place, :length]
            distance = self.log_mel_distance(true[None], again[None])[0]
            made.append(
                Spoken(
                    Resynthesis(batch["name"][place], true.cpu(), again.cpu(), float(distance)),
                    self.front_end.sample_rate,
                )
            )
        return made

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """What a program needs to speak: `conditioning`, once per spectrogram, and `step`, once per
        sample, which uses `uniform` float32[B, 2].

        Their checks are what is spoken for a short spectrogram, and the numbers by which it was
        drawn.
        """
        if not isinstance(model, WaveRNN):
            return {}
        mel = batch["mel"][:, :, : model.kernel_size + 7].contiguous()
        known = list(conditioning(model, mel).values())
        uniform = torch.rand(len(known[0]), len(mel), 2, generator=torch.Generator().manual_seed(0))
        sample, states, spoken = (
            torch.zeros(len(mel)),
            (torch.zeros(len(mel), model.n_rnn),) * 2,
            list[Tensor](),
        )
        example = dict[str, Tensor]()
        for time, numbers in enumerate(uniform):
            names = ("sample", "state1", "state2", "entry", "second", "third", "fourth", "uniform")
            given = dict(
                zip(names, (sample, *states, *(one[time] for one in known), numbers), strict=True)
            )
            example = given if time < 4 else example  # with states that are not zero
            sample, *states = self._next(model, *given.values()).values()
            spoken.append(sample)
        checks = {"uniform": uniform, "spoken": torch.stack(spoken, 1)}
        return {
            "conditioning": Form(conditioning, {"mel": mel}),
            "step": Form(self._next, example, checks),
        }

    def log_mel_distance(self, true: Tensor, spoken: Tensor) -> Tensor:
        """float32[B] in dB: the root mean square over bands of the difference of two log-mel
        spectrograms, averaged over frames.

        In float32, whatever the precision of the run. Phases have no part in it, and levels below
        -100 dB count as that.

        Args:
            true: float32[B, S].
            spoken: float32[B, S].
        """
        margin = self.front_end.n_fft // 2
        with torch.autocast(true.device.type, enabled=False):
            one, other = (
                self.front_end.mel(F.pad(signal, (margin, margin))) for signal in (true, spoken)
            )
        return 100.0 * (one - other).square().mean(1).sqrt().mean(1)

    def _surprise(self, model: nn.Module, batch: Batch) -> Tensor:
        """float32[B, S] in nats."""
        waveform = batch["waveform"]
        read, target = self.amplitudes.written(waveform[:, :-1]), waveform[:, 1:]
        outputs = model(read[:, None], batch["mel"][:, None])
        wanted = [*target.shape, self.amplitudes.n_classes]
        if not isinstance(outputs, Tensor) or list(outputs.squeeze(1).shape) != wanted:
            hint = none_hint(outputs) or "set recipe.n_classes"
            raise ConfigError(
                Problem(
                    "model",
                    "does not return the outputs that the recipe reads",
                    form_of(outputs),
                    f"a tensor {wanted}",
                    hint,
                )
            )
        # One row for each sample: over (N, C, T) the gradient of cross-entropy is not deterministic
        # on CUDA.
        flat = outputs.reshape(-1, self.amplitudes.n_classes)
        return self.amplitudes.surprise(
            flat.to(torch.promote_types(flat.dtype, torch.float32)), target.reshape(-1)
        ).view(target.shape)

    def _next(self, model: WaveRNN, *given: Tensor) -> dict[str, Tensor]:
        *known, uniform = given
        outputs, state1, state2 = step(model, *known)
        return {
            "next": self.amplitudes.drawn_by(outputs, uniform),
            "after1": state1,
            "after2": state2,
        }

    def _speak(self, model: nn.Module, mel: Tensor, numbers: Sequence[int]) -> Tensor:
        """float32[B, S]; what is drawn for a clip depends on its number alone."""
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
        """Each clip's are the same bits in any batch: it has a row of its own in a group, the
        others of which may be silent.
        """
        places = (
            {
                index: place
                for place, index in enumerate(batch["index"].tolist())
                if index < self.resynthesise
            }
            if self.resynthesise
            else {}
        )
        size, made = min(self.resynthesise, _TOGETHER), list[Resynthesis]()
        for group in dict.fromkeys(index // size for index in places):
            numbers = range(group * size, (group + 1) * size)
            mels = [
                batch["mel"][places[number]]
                if number in places
                else torch.zeros_like(batch["mel"][0])
                for number in numbers
            ]
            spoken = self._speak(model, torch.stack(mels), numbers)
            for number, one in zip(numbers, spoken, strict=True):
                if (place := places.get(number)) is not None:
                    true = batch["waveform"][place, 1:]
                    distance = self.log_mel_distance(true[None], one[None]).item()
                    made.append(Resynthesis(batch["name"][place], true.cpu(), one.cpu(), distance))
        return tuple(made)


@final
class VocoderScores(Scores):
    """float64 sums in clip order, and integer counts: the same bits for any split into batches."""

    def __init__(self, *, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._surprise = 0.0
        self._samples = 0
        self._labels = torch.zeros(0, dtype=torch.int64)
        self._spoken: list[Resynthesis] = []

    def add(self, measured: MeasuredVocoder) -> None:
        for surprise in measured.surprise.tolist():
            self._surprise += surprise
        self._samples += len(measured.surprise) * measured.samples
        self._labels = measured.labels + self._labels if len(self._labels) else measured.labels
        self._spoken += measured.spoken

    def compute(self) -> dict[str, float]:
        """`loss` in nats per sample, `bits_per_sample`, and `log_mel_distance` in dB if clips were
        resynthesised.

        For mu-law also `label_entropy`, the loss of a model that knows no more than how often each
        step occurs, and `below_entropy`, how much less the loss is.
        """
        if not self._samples:
            raise DataError("the evaluated split is empty")
        loss = self._surprise / self._samples
        found = {"loss": loss, "bits_per_sample": loss / math.log(2.0)}
        if len(self._labels):
            found["label_entropy"] = entropy(self._labels)
            found["below_entropy"] = found["label_entropy"] - loss
        if self._spoken:
            found["log_mel_distance"] = sum(one.distance for one in self._spoken) / len(
                self._spoken
            )
        return found

    def save_pictures(self, folder: Path) -> None:
        """Write the resynthesised and the true clips, as WAV files and spectrograms."""
        rows = list[list[tuple[str, Tensor]]]()
        for number, one in enumerate(self._spoken):
            save_wav(folder / f"clip_{number}_true.wav", one.true, sample_rate=self.sample_rate)
            save_wav(
                folder / f"clip_{number}_resynthesised.wav",
                one.spoken,
                sample_rate=self.sample_rate,
            )
            rows.append(
                [(one.name, one.true), (f"resynthesised, {one.distance:.1f} dB off", one.spoken)]
            )
        if rows:
            save_spectrograms(folder / "spectrograms.png", rows, sample_rate=self.sample_rate)


@final
class Spoken(Prediction):
    """A resynthesised recording."""

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
