"""Measures a separation: the results of a batch, and of all batches."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from samewise.recipes.parts.sounds import save_spectrograms, save_wav
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import DataError, Problem, first_few, number_of
from samewise.runner.interfaces import Scores

FULL_SCALE = 32767.0
"""The largest sample of 16 bits."""


@dataclass(frozen=True)
class Example:
    """One separated mixture to listen to, at most four seconds of it.

    Args:
        position: In the batch.
        signals: int16[1 + 2 S, T]: the mixture, the S true signals, the S estimates in the order of
            the true ones.
    """

    position: int
    signals: Tensor


@dataclass(frozen=True)
class MeasuredSeparation:
    """The measurements of one evaluation batch of B mixtures of S speakers, in dB, on the CPU.

    Args:
        names: B, of the mixtures.
        si_sdr: float64[B, S], of the estimates, in the order of the true signals.
        si_sdr_before: float64[B, S], of the mixture itself taken for each of them.
        sdr: float64[B, S], as `si_sdr`, but of BSS-eval's SDR, NaN for a silent source, which has
            none; None where it was not asked for.
        sdr_before: float64[B, S], of the mixture itself.
        examples: The best and the worst of the batch.
    """

    names: list[str]
    si_sdr: Tensor
    si_sdr_before: Tensor
    sdr: Tensor | None
    sdr_before: Tensor | None
    examples: tuple[Example, ...]


@final
class SeparationScores(Scores):
    """float64 sums in the order of the mixtures: the same bits for any split into batches.

    Args:
        sample_rate: Of the examples, in Hz.
        kept: How many of the worst and of the best mixtures are kept to listen to.
    """

    sometimes = ("sdr", "sdri")

    def __init__(self, *, sample_rate: int, kept: int = 3) -> None:
        self.sample_rate = sample_rate
        self._kept = kept
        self._rows: list[tuple[str, dict[str, float]]] = []
        self._silent: list[str] = []
        self._worst: list[tuple[float, int, Tensor]] = []  # heaps, what is dropped next on top
        self._best: list[tuple[float, int, Tensor]] = []

    def add(self, measured: MeasuredSeparation) -> None:
        first = len(self._rows)
        for place, name in enumerate(measured.names):
            reached, before = (
                measured.si_sdr[place].mean().item(),
                measured.si_sdr_before[place].mean().item(),
            )
            row = {"si_sdr": reached, "si_sdri": reached - before}
            if measured.sdr is not None and measured.sdr_before is not None:
                heard = ~measured.sdr_before[place].isnan()
                self._silent += [] if bool(heard.all()) else [name]
                if bool(heard.any()):
                    sdr = measured.sdr[place][heard].mean().item()
                    row |= {
                        "sdr": sdr,
                        "sdri": sdr - measured.sdr_before[place][heard].mean().item(),
                    }
            self._rows.append((name, row))
        for example in measured.examples:
            gain, number = (
                self._rows[first + example.position][1]["si_sdri"],
                first + example.position,
            )
            for heap, order in ((self._worst, -gain), (self._best, gain)):
                heapq.heappush(heap, (order, -number, example.signals))
                if len(heap) > self._kept:
                    heapq.heappop(heap)

    def compute(self) -> dict[str, float]:
        """Means over the mixtures, in dB: `si_sdr` and `sdr`, `si_sdri` and `sdri` (their
        improvement over the mixture), and `loss`, minus `si_sdr`.
        """
        if not self._rows:
            raise DataError("the evaluated split is empty")
        totals, counts = dict[str, float](), dict[str, int]()
        for _, row in self._rows:
            for name, value in row.items():
                totals[name], counts[name] = totals.get(name, 0.0) + value, counts.get(name, 0) + 1
        means = {name: total / counts[name] for name, total in totals.items()}
        return {"loss": -means["si_sdr"], **means}

    def doubts(self) -> list[Problem]:
        if not self._silent:
            return []
        which = (
            f"{number_of(len(self._silent), 'mixture')} with a silent source "
            f"({first_few(self._silent, 3)})"
        )
        hint = (
            "si_sdr and the loss count such a source as badly separated: leave these mixtures out"
        )
        return [
            Problem("sdr", f"{which}, which has no SDR and is left out of sdr and sdri", hint=hint)
        ]

    def save_pictures(self, folder: Path) -> None:
        """Write the best and worst separated mixtures as WAV files, their spectrograms, and a table
        of all mixtures.
        """
        columns = [column for column in self.compute() if column != "loss"]
        lines = (
            [name, *(f"{row[column]:.2f}" if column in row else "" for column in columns)]
            for name, row in self._rows
        )
        write_csv(folder / "mixtures.csv", ("mixture", *columns), lines)
        shown = {
            -place: ("worst", signals) for _, place, signals in sorted(self._worst, reverse=True)
        }
        for _, place, signals in sorted(self._best, reverse=True):
            shown.setdefault(-place, ("best", signals))
        rows = list[list[tuple[str, Tensor]]]()
        for number, (kind, signals) in shown.items():
            name, row = self._rows[number]
            titles = _titles(len(signals) // 2)
            waveforms = signals / FULL_SCALE
            for title, waveform in zip(titles, waveforms, strict=True):
                save_wav(
                    folder / f"{kind}_{number:05d}_{title.replace(' ', '_')}.wav",
                    waveform,
                    sample_rate=self.sample_rate,
                )
            heading = f"{kind}, {row['si_sdri']:+.1f} dB: {name}"
            rows.append(
                [
                    (heading if not place else title, waveform)
                    for place, (title, waveform) in enumerate(zip(titles, waveforms, strict=True))
                ]
            )
        save_spectrograms(folder / "spectrograms.png", rows, sample_rate=self.sample_rate)


def _titles(speakers: int) -> list[str]:
    names = [f"speaker {number}" for number in range(1, speakers + 1)]
    return [
        "mixture",
        *(f"{name} true" for name in names),
        *(f"{name} estimated" for name in names),
    ]
