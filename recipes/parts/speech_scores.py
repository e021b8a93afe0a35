"""What an evaluation of speech recognition measures, and its scores: loss, error rates, transcripts
to read.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from samewise.recipes.parts import transcripts
from samewise.runner.errors import DataError
from samewise.runner.interfaces import Scores


@dataclass(frozen=True)
class MeasuredSpeech:
    """The measurements of one evaluation batch of B utterances, on the CPU.

    Args:
        loss: float32[B], nats a character.
        possible: bool[B], whether there are enough frames for the transcript; otherwise the loss is
            0.
        lines: One for each utterance; the worst of the batch carry spectrograms.
    """

    loss: Tensor
    possible: Tensor
    lines: list[transcripts.Line]


@final
class SpeechScores(Scores):
    """Integer counts of edits, and a float64 sum of losses in utterance order: the same for any
    split into batches.

    Args:
        skips: Whether transcripts that are impossible are left out of the loss.
        rows: Utterances in the table, the first of the split.
        drawn: Spectrograms kept: of the highest error rates.
    """

    def __init__(self, *, skips: bool = False, rows: int = 5000, drawn: int = 6) -> None:
        self.count = self._skipped = 0
        self._skips = skips
        self._loss = 0.0
        self._character_edits = self._characters = self._word_edits = self._words = 0
        self._rows, self._drawn = rows, drawn
        self._lines: list[transcripts.Line] = []
        self._worst: list[
            tuple[float, int, transcripts.Line]
        ] = []  # a heap, the least error on top

    def add(self, measured: MeasuredSpeech) -> None:
        self._skipped += int((~measured.possible).sum())
        for loss, line in zip(measured.loss.tolist(), measured.lines, strict=True):
            said, read = line.reference.split(), line.hypothesis.split()
            self._loss += loss
            self._character_edits += line.edits
            self._characters += len(line.reference)
            self._word_edits += transcripts.edit_distance(said, read)
            self._words += len(said)
            self._keep(line)
            self.count += 1

    def compute(self) -> dict[str, float]:
        """`loss` (nats a character, the mean over utterances that are not skipped), and `cer` and
        `wer`: all edits over all characters and words.
        """
        if not self.count:
            raise DataError("the evaluated split is empty")
        cer, wer = (
            self._character_edits / max(1, self._characters),
            self._word_edits / max(1, self._words),
        )
        read = self.count - self._skipped
        skipped = {"skipped": self._skipped / self.count} if self._skips else {}
        return {"loss": self._loss / read if read else math.inf, "cer": cer, "wer": wer, **skipped}

    def save_pictures(self, folder: Path) -> None:
        """Write `transcripts.csv`, `transcripts.html` (the worst first) and `spectrograms.png`."""
        scores = self.compute()
        by_rate = sorted(self._lines, key=lambda line: -line.rate)
        heading = (
            f"{self.count} utterances: character error rate {scores['cer']:.2%}, word error "
            f"rate {scores['wer']:.2%}"
        )
        transcripts.save_csv(folder / "transcripts.csv", self._lines)
        transcripts.save_html(folder / "transcripts.html", by_rate[:300], heading=heading)
        transcripts.save_spectrograms(
            folder / "spectrograms.png", [line for *_, line in sorted(self._worst, reverse=True)]
        )

    def _keep(self, line: transcripts.Line) -> None:
        if line.spectrogram is not None:
            push = heapq.heappush if len(self._worst) < self._drawn else heapq.heappushpop
            push(self._worst, (line.rate, -self.count, line))
        if len(self._lines) < self._rows:
            self._lines.append(line)
