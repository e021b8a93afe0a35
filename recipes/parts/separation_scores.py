"""Measures a separation: the results of a batch, and of all batches."""

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from samewise.recipes.parts.sounds import save_spectrograms, save_wav
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import Problem, first_few, number_of
from samewise.runner.interfaces import Scores

FULL_SCALE = 32767.0
"""Largest sample of 16 bits."""


@dataclass(frozen=True)
class Example:
    """One separated mixture to listen to, at most four seconds of it.

    Args:
        position: Position in the batch.
        signals: int16[1 + 2 S, T]: the mixture, the S true signals, and the S estimates in the
            order of the true ones.
    """

    position: int
    signals: Tensor


@dataclass(frozen=True)
class MeasuredSeparation:
    """Measurements in dB of one evaluation batch of B mixtures of S speakers, on the CPU.

    Args:
        names: The B mixtures' names.
        is_audible: bool[B, S], whether a true signal is not silent.
        si_sdr: float64[B, S], SI-SDR of the estimates, in the order of the true signals.
        si_sdr_before: float64[B, S], SI-SDR of the mixture as an estimate of each signal.
        sdr: float64[B, S], as `si_sdr`, with BSS eval's SDR, NaN for a silent source; None if it is
            not evaluated.
        sdr_before: float64[B, S], SDR of the mixture as an estimate.
        examples: The best and the worst mixture of the batch.
        loss: float64[B, S], the recipe's loss, in the order of the true signals.
    """

    names: list[str]
    is_audible: Tensor
    si_sdr: Tensor
    si_sdr_before: Tensor
    sdr: Tensor | None
    sdr_before: Tensor | None
    examples: tuple[Example, ...]
    loss: Tensor


@final
class SeparationScores(Scores):
    """Scores of a separation: the same bits however the split is cut into batches.

    Sums are float64 in the order of mixtures.

    Args:
        sample_rate: The examples' rate in Hz.
        examples: Number of the worst, and of the best, mixtures that are kept to listen to.
    """

    sometimes = ("sdr", "sdri")

    def __init__(self, *, sample_rate: int, examples: int = 3) -> None:
        self.sample_rate = sample_rate
        self._most = examples
        self._rows: list[tuple[str, dict[str, float]]] = []
        self._silent: list[str] = []
        # Heaps, with the example to drop next on top
        self._worst: list[tuple[float, int, Tensor]] = []
        self._best: list[tuple[float, int, Tensor]] = []

    def add(self, measured: MeasuredSeparation) -> None:
        count = len(self._rows)
        for place, name in enumerate(measured.names):
            reached, before = (
                measured.si_sdr[place].mean().item(),
                measured.si_sdr_before[place].mean().item(),
            )
            row = {
                "loss": measured.loss[place].mean().item(),
                "si_sdr": reached,
                "si_sdri": reached - before,
            }
            is_audible = measured.is_audible[place]
            self._silent += [] if bool(is_audible.all()) else [name]
            if measured.sdr is not None and measured.sdr_before is not None and is_audible.any():
                sdr = measured.sdr[place][is_audible].mean().item()
                row |= {
                    "sdr": sdr,
                    "sdri": sdr - measured.sdr_before[place][is_audible].mean().item(),
                }
            self._rows.append((name, row))
        for example in measured.examples:
            gain, number = (
                self._rows[count + example.position][1]["si_sdri"],
                count + example.position,
            )
            for heap, order in ((self._worst, -gain), (self._best, gain)):
                # The number decides between equal gains, so tensors are not compared
                push = heapq.heappush if len(heap) < self._most else heapq.heappushpop
                push(heap, (order, -number, example.signals))

    def compute(self) -> dict[str, float]:
        """Return means over the mixtures in dB, and `loss`, by default minus `si_sdr`.

        They are `si_sdr` and `sdr`, and their improvements over the mixture, `si_sdri` and `sdri`.
        """
        totals, counts = dict[str, float](), dict[str, int]()
        for _, row in self._rows:
            for name, value in row.items():
                totals[name], counts[name] = totals.get(name, 0.0) + value, counts.get(name, 0) + 1
        return {name: total / counts[name] for name, total in totals.items()}

    def doubts(self) -> list[Problem]:
        if not self._silent:
            return []
        return [
            Problem(
                "si_sdr",
                f"counts the silent source of {number_of(len(self._silent), 'mixture')} as badly "
                f"separated: {first_few(self._silent, 3)}",
                hint="leave them out; sdr and sdri leave out the source",
            )
        ]

    def save_pictures(self, folder: Path) -> None:
        """Write the best and worst separated mixtures, and a table of all mixtures.

        Mixtures are written as WAV files and spectrograms.
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
            # In a small split, a mixture may be among both the worst and the best
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
