"""Speech recognition by letters, with connectionist temporal classification (CTC).

Decoding is greedy or by beam search; evaluation reports character and word error rates.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.folders import SOUNDS
from samewise.recipes.models.wav2letter import length_after_all
from samewise.recipes.parts import ctc, transcripts
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.speech_scores import MeasuredSpeech, SpeechScores
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe

_LONGEST_KERNEL = 10_000
"""Most frames of features that are tried to find the fewest for one output frame."""


@final
class SpeechRecognition(Recipe):
    """Speech recognition; batches have `waveform`, `length`, `target` and `target_length`.

    A batch has `waveform` float32[B, T], `length` int64[B], `target` int64[B, U], `target_length`
    int64[B], and the lists `transcript` and `name`. The transforms compute the model's input from
    the waveforms, `features` float32[B, F, N] and `feature_length` int64[B].

    The model returns scores or log-probabilities float32[B, K, M]; class 0 is the blank, further
    classes are the letters. If it has a method `output_lengths(feature_length)`, it is called with
    the lengths in addition to the features; otherwise M follows from its 1-d convolutions, and
    utterances are evaluated one by one.

    The loss of an utterance is its negative log-likelihood divided by its characters, and a step's
    loss is the mean over utterances: the default of `torch.nn.CTCLoss`, on which the published
    recipe (pytorch/audio, examples/pipeline_wav2letter) trains. Error rates compare with the
    transcripts themselves; there, both sides are collapsed like paths, which loses doubled letters.

    Args:
        letters: The letters of the labels 1, 2, ....
        decoder: "greedy", or "beam" (requires flashlight-text).
        beam: Options of `decoder="beam"`, as of `ctc.beam_decoder`.
        impossible: What happens to a transcript with more letters than the model has frames:
            "error" or "skip". A skipped transcript adds nothing to a training loss but is counted,
            as with `zero_infinity` of `torch.nn.CTCLoss`; an evaluation's loss is the mean over
            other utterances. Both log the share of such transcripts as `skipped`.
        sample_rate: The waveforms' rate in Hz, for the time axis of pictures; None: unknown.

    Raises:
        ConfigError: Letters are repeated, or the decoder is not available.
    """

    gives = (
        "for each frame a score of the blank (0) and of each of recipe.letters (from 1); "
        "greedy decoding takes the best of each frame, "
        "merges equal neighbours, and leaves out the blanks"
    )
    takes = "recordings"
    extensions = SOUNDS

    def __init__(
        self,
        *,
        letters: str,
        decoder: Literal["greedy", "beam"] = "greedy",
        beam: Mapping[str, Any] | None = None,
        impossible: Literal["error", "skip"] = "error",
        sample_rate: int | None = None,
    ) -> None:
        self.letters = letters
        self._number = {letter: number for number, letter in enumerate(letters, start=1)}
        ConfigError.raise_if(
            len(self._number) != len(letters), "recipe.letters", "must be distinct letters", letters
        )
        self._beam = dict(beam or {}) if decoder == "beam" else None
        if self._beam is not None:
            # A missing decoder is an error before training, not at the first evaluation
            ctc.beam_decoder(letters, **self._beam)
        self._impossible = impossible
        self._sample_rate = sample_rate

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Pad samples `{"waveform": float32[T], "transcript": str}` with zeros.

        `name`, if present, identifies a sample.

        Raises:
            DataError: A sample has another form, or an unknown letter.
        """
        waveforms = [_waveform(sample) for sample in samples]
        names = [str(sample.get("name", "")) for sample in samples]
        texts = [sample["transcript"] for sample in samples]
        labels = [self._labels(text, name) for text, name in zip(texts, names, strict=True)]
        return {
            "waveform": pad_sequence(waveforms, batch_first=True),
            "length": torch.tensor([len(waveform) for waveform in waveforms]),
            "target": pad_sequence(labels, batch_first=True),
            "target_length": torch.tensor([len(label) for label in labels]),
            "transcript": texts,
            "name": names,
        }

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the sum over utterances of nats per character, and the number of utterances."""
        log_probs, lengths = self._read(model, batch)
        nats, possible, explain = self._nats(log_probs, lengths, batch)
        if self._impossible == "skip":
            return Loss(
                torch.where(possible, nats, 0.0).sum(),
                count=len(nats),
                parts={"skipped": (~possible).sum().float()},
            )
        if possible.is_cpu:
            explain()
        return Loss(torch.where(possible, nats, torch.inf).sum(), count=len(nats), explain=explain)

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredSpeech:
        log_probs, lengths = self._read(model, batch)
        nats, possible, explain = self._nats(log_probs, lengths, batch)
        if self._impossible == "error":
            explain()
        # -1 marks impossible transcripts: a negative log-likelihood is never negative
        loss = torch.where(possible, nats.detach(), -1.0).cpu()
        possible = loss != -1.0
        hypotheses = self._decode(log_probs, lengths)
        edits = [
            transcripts.edit_distance(reference, hypothesis)
            for reference, hypothesis in zip(batch["transcript"], hypotheses, strict=True)
        ]
        # The first and the worst utterance of a batch are drawn
        shown = {
            0,
            max(
                range(len(edits)),
                key=lambda place: edits[place] / max(1, len(batch["transcript"][place])),
            ),
        }
        reported = [
            value if fits else None
            for value, fits in zip(loss.tolist(), possible.tolist(), strict=True)
        ]
        lines = [
            self._line(
                batch, place, hypotheses[place], edits[place], reported[place], drawn=place in shown
            )
            for place in range(len(edits))
        ]
        return MeasuredSpeech(torch.where(possible, loss, 0.0), possible, lines)

    def scores(self, dataset: Any) -> SpeechScores:
        return SpeechScores(skips=self._impossible == "skip")

    def read(self, file: Path) -> dict[str, Any]:
        """Read a recording, without its transcript."""
        waveform, _ = read_audio(file, sample_rate=self._sample_rate)
        return {"waveform": waveform, "transcript": "", "name": str(file)}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        log_probs, frames = self._read(model, batch)
        DataError.raise_all(
            Problem(
                name or "dataset",
                "the recording is too short for the model, which gives no frame for it",
            )
            for name, count in zip(batch["name"], frames.tolist(), strict=True)
            if count < 1
        )
        texts = self._decode(log_probs, frames)
        lengths = batch["length"].tolist()
        return [
            Understood(text, batch["waveform"][place, : lengths[place]].cpu(), self._sample_rate)
            for place, text in enumerate(texts)
        ]

    def _labels(self, text: Any, name: str) -> Tensor:
        where = name or "dataset"
        if not isinstance(text, str):
            raise DataError(Problem(where, "its transcript is not a string", type(text).__name__))
        try:
            return torch.tensor([self._number[letter] for letter in text], dtype=torch.int64)
        except KeyError as error:
            raise DataError(
                Problem(
                    where,
                    "the transcript has an unknown letter",
                    error.args[0],
                    self.letters,
                    f"the transcript is {text[:60]!r}; set dataset.letters, or dataset.ignore",
                )
            ) from None

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities float32[B, K, M], and the number of valid frames int64[B]."""
        if "features" not in batch:
            raise ConfigError(
                Problem(
                    "transforms",
                    "give the model no features to read",
                    hint="transforms=mfcc, mel or waveform",
                )
            )
        features, frames = batch["features"], batch["feature_length"]
        measurer = next((part for part in model.modules() if hasattr(part, "output_lengths")), None)
        count: Any = (
            _lengths_after_convolutions
            if measurer is None
            else lambda _, lengths: measurer.output_lengths(lengths)
        )  # type: ignore[union-attr]
        # Short recordings are padded here, as they are next to a longer one in a batch
        if int(count(model, torch.tensor(features.shape[-1]))) < 1:
            # The fewest frames of features for which the model has one output frame
            fewest = int((count(model, torch.arange(1, _LONGEST_KERNEL)) < 1).sum()) + 1
            features = nn.functional.pad(features, (0, fewest - features.shape[-1]))
        output = _apply(
            model, features, frames, partial(count, model), with_lengths=measurer is not None
        )
        if (
            not isinstance(output, Tensor)
            or output.dim() != 3
            or output.shape[1] != len(self.letters) + 1
        ):
            raise ConfigError(
                Problem(
                    "model",
                    "does not return a score for every letter at every frame",
                    form_of(output),
                    f"a tensor [batch, {len(self.letters) + 1}, frames], for the blank and "
                    f"{len(self.letters)} letters",
                    none_hint(output) or "set model.num_classes",
                )
            )
        if int(count(model, torch.tensor(features.shape[-1]))) != output.shape[-1]:
            raise ConfigError(
                Problem(
                    "model",
                    "has a number of frames that its 1-d convolutions do not account for",
                    output.shape[-1],
                    hint="give the model a method output_lengths(lengths)",
                )
            )
        return output.float().log_softmax(1), count(model, frames)

    def _nats(
        self, log_probs: Tensor, lengths: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Return nats per character, feasibility, and a function that raises if one is infeasible.

        Returns:
            float32[B]; bool[B], whether there are enough frames for a finite loss; and the
                function. Tensors are on the CPU if CTC is computed there.
        """
        target, target_length = batch["target"], batch["target_length"]
        if not ctc.stays_on(log_probs, target):
            lengths_and_targets = torch.cat([target.flatten(), target_length, lengths]).to(
                "cpu", non_blocking=True
            )
            # This copy waits for the device, so the copy above is complete too
            log_probs = log_probs.float().cpu()
            size = len(log_probs)
            target, target_length, lengths = (
                lengths_and_targets[: -2 * size].view(target.shape),
                lengths_and_targets[-2 * size : -size],
                lengths_and_targets[-size:],
            )
        needed = ctc.frames_needed(target, target_length)
        possible = needed <= lengths

        def explain() -> None:
            if bool(possible.all()):
                return
            place = int((~possible).nonzero()[0])
            raise DataError(
                Problem(
                    batch["name"][place] or "dataset",
                    f"its transcript needs {int(needed[place])} frames, but the model gives only "
                    f"{int(lengths[place])} for so short a recording",
                    hint=f"the transcript is {batch['transcript'][place][:60]!r}; "
                    "recipe.impossible=skip skips such recordings",
                )
            )

        # An impossible target is replaced by an empty one: no infinity, and no gradient of it,
        # reaches other samples.
        nats = ctc.negative_log_likelihood(
            log_probs, lengths, target, torch.where(possible, target_length, 0)
        )
        # An empty transcript counts as one character
        return nats / target_length.clamp(min=1), possible, explain

    def _decode(self, log_probs: Tensor, lengths: Tensor) -> list[str]:
        if self._beam is not None:
            return ctc.beam_search(log_probs, lengths, letters=self.letters, **self._beam)
        return [
            "".join(self.letters[label - 1] for label in labels)
            for labels in ctc.greedy(log_probs, lengths)
        ]

    def _line(
        self,
        batch: Batch,
        place: int,
        hypothesis: str,
        edits: int,
        loss: float | None,
        *,
        drawn: bool,
    ) -> transcripts.Line:
        length = int(batch["length"][place])
        return transcripts.Line(
            name=batch["name"][place],
            reference=batch["transcript"][place],
            hypothesis=hypothesis,
            edits=edits,
            loss=loss,
            seconds=length / self._sample_rate if self._sample_rate else None,
            spectrogram=transcripts.spectrogram(batch["waveform"][place, :length])
            if drawn
            else None,
        )


@final
class Understood(Prediction):
    """The transcript of a recording.

    Args:
        text: The transcript.
        waveform: float32[T], the recording.
        sample_rate: The waveform's rate in Hz; None: unknown.
    """

    def __init__(self, text: str, waveform: Tensor, sample_rate: int | None) -> None:
        self.text = text
        self._waveform = waveform
        self._seconds = len(waveform) / sample_rate if sample_rate else None

    def values(self) -> dict[str, Any]:
        return {
            "text": self.text,
            **({} if self._seconds is None else {"seconds": round(self._seconds, 3)}),
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME.txt`, and `NAME.png` with the spectrogram and the text."""
        text, picture = folder / f"{name}.txt", folder / f"{name}.png"
        text.write_text(self.text + "\n", encoding="utf-8")
        transcripts.save_spectrogram(
            picture, transcripts.spectrogram(self._waveform), title=self.text, seconds=self._seconds
        )
        return [text, picture]


def _waveform(sample: Any) -> Tensor:
    waveform = sample.get("waveform") if isinstance(sample, Mapping) else None
    if not isinstance(waveform, Tensor) or waveform.dim() != 1 or "transcript" not in sample:
        raise DataError(
            Problem(
                "dataset",
                "a sample is not an utterance",
                form_of(sample),
                "a dict with `waveform`, a tensor [frames], and `transcript`",
            )
        )
    return waveform.float()


def _apply(
    model: nn.Module,
    features: Tensor,
    frames: Tensor,
    count: Callable[[Tensor], Tensor],
    *,
    with_lengths: bool,
) -> Any:
    """Return the model's output for a batch."""
    # Padding counts in a model that does not take lengths, and in a norm over time, as in wav2vec
    # 2.0's base models: evaluation runs each utterance at its own length there
    norms = any(isinstance(part, nn.GroupNorm | nn.InstanceNorm1d) for part in model.modules())
    is_separate = not model.training and (norms or not with_lengths)
    cut = [
        length if length >= 1 and int(count(torch.tensor(length))) >= 1 else features.shape[-1]
        for length in (frames.tolist() if is_separate else ())
    ]
    if all(length == features.shape[-1] for length in cut):
        return model(features, frames) if with_lengths else model(features)
    outputs = [
        model(
            features[place : place + 1, ..., :length],
            *((frames[place : place + 1],) if with_lengths else ()),
        )
        for place, length in enumerate(cut)
    ]
    if not all(isinstance(output, Tensor) and output.dim() == 3 for output in outputs):
        return outputs[0]
    longest = max(
        int(count(torch.tensor(features.shape[-1]))), *(output.shape[-1] for output in outputs)
    )
    return torch.cat(
        [nn.functional.pad(output, (0, longest - output.shape[-1])) for output in outputs]
    )


def _lengths_after_convolutions(model: nn.Module, lengths: Tensor) -> Tensor:
    """Return the frames after a model's 1-d convolutions in sequence.

    T // 2 + 1 for torchaudio's Wav2Letter on features.
    """
    return length_after_all(
        [layer for layer in model.modules() if isinstance(layer, nn.Conv1d)], lengths
    )
