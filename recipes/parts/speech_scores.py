"""Measures speech recognition: the results of a batch, and of all batches."""

import heapq
import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from samewise.recipes.parts import transcripts
from samewise.runner.interfaces import Scores


@dataclass(frozen=True)
class MeasuredSpeech:
    """Measurements of one evaluation batch of B utterances, on the CPU.

    Args:
        loss: float32[B], nats per character.
        possible: bool[B], whether there are enough frames for the transcript; otherwise the loss is
            0.
        lines: A line for each utterance; the worst of the batch have spectrograms.
    """

    loss: Tensor
    possible: Tensor
    lines: list[transcripts.Line]


@final
class SpeechScores(Scores):
    """Scores of speech recognition: the same bits however the split is cut into batches.

    Counts of edits are integers; the loss is a float64 sum in the order of utterances.

    Args:
        skips: Whether impossible transcripts are left out of the loss.
        rows: Number of utterances in the table, the first of the split.
        drawn: Number of spectrograms kept, of the highest error rates.
    """

    def __init__(self, *, skips: bool = False, rows: int = 5000, drawn: int = 6) -> None:
        self.count = self._skipped = 0
        self._skips = skips
        self._loss = 0.0
        self._character_edits = self._characters = self._word_edits = self._words = 0
        self._rows, self._drawn = rows, drawn
        self._lines: list[transcripts.Line] = []
        # A heap with the least error on top
        self._worst: list[tuple[float, int, transcripts.Line]] = []

    def add(self, measured: MeasuredSpeech) -> None:
        self._skipped += int((~measured.possible).sum())
        for loss, line in zip(measured.loss.tolist(), measured.lines, strict=True):
            reference, hypothesis = line.reference.split(), line.hypothesis.split()
            self._loss += loss
            self._character_edits += line.edits
            self._characters += len(line.reference)
            self._word_edits += transcripts.edit_distance(reference, hypothesis)
            self._words += len(reference)
            self._keep(line)
            self.count += 1

    def compute(self) -> dict[str, float]:
        """Return `loss` in nats per character, and the error rates `cer` and `wer`.

        The loss is the mean over utterances that are not skipped; error rates are all edits over
        all characters and words.
        """
        cer, wer = (
            self._character_edits / max(1, self._characters),
            self._word_edits / max(1, self._words),
        )
        read = self.count - self._skipped
        skipped = {"skipped": self._skipped / self.count} if self._skips else {}
        return {"loss": self._loss / read if read else math.inf, "cer": cer, "wer": wer, **skipped}

    def save_pictures(self, folder: Path) -> None:
        """Write `transcripts.csv`, and `spectrograms.png` of the worst."""
        transcripts.save_csv(folder / "transcripts.csv", self._lines)
        transcripts.save_spectrograms(
            folder / "spectrograms.png", [line for *_, line in sorted(self._worst, reverse=True)]
        )

    def _keep(self, line: transcripts.Line) -> None:
        if line.spectrogram is not None:
            push = heapq.heappush if len(self._worst) < self._drawn else heapq.heappushpop
            # The count decides between equal rates, so lines are not compared
            push(self._worst, (line.rate, -self.count, line))
        if len(self._lines) < self._rows:
            self._lines.append(line)
