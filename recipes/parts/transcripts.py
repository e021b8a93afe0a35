"""Compares references with hypotheses: edit distances, tables, and spectrograms."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samewise.recipes.parts.figures import make_figure, save_figure
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import truncate

_short = partial(truncate, longest=150, ending="…")


def edit_distance(reference: Sequence[object], hypothesis: Sequence[object]) -> int:
    """Return the fewest insertions, deletions and substitutions between two sequences.

    Source: Levenshtein 1966, Binary codes capable of correcting deletions, insertions, and
    reversals.
    """
    # One row of the usual table at a time: a run of insertions along a row is a running minimum, so
    # rows are vectors
    number: dict[object, int] = {}
    rows, columns = (
        [number.setdefault(item, len(number)) for item in sequence]
        for sequence in (reference, hypothesis)
    )
    across, place = np.array(columns, dtype=np.int64), np.arange(len(columns) + 1)
    row = place.copy()
    for item in rows:
        # Delete the reference's item, keep or substitute it, or insert the hypothesis's items
        best = row + 1
        best[1:] = np.minimum(best[1:], row[:-1] + (across != item))
        row = np.minimum.accumulate(best - place) + place
    return int(row[-1])


@dataclass(frozen=True)
class Line:
    """One utterance of a table.

    Args:
        name: The recording's name.
        reference: The transcript.
        hypothesis: The recognised text.
        edits: The edit distance of both texts.
        loss: Nats per character; None without a loss.
        seconds: The recording's length in seconds; None: unknown.
        spectrogram: uint8[height, width], the lowest frequency first, if kept.
    """

    name: str
    reference: str
    hypothesis: str
    edits: int
    loss: float | None
    seconds: float | None = None
    spectrogram: Tensor | None = None

    @property
    def rate(self) -> float:
        """Edits per character of the reference."""
        return self.edits / max(1, len(self.reference))


def save_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write a line per utterance: its recording, both texts, their edits, and its loss."""
    head = ("recording", "reference", "hypothesis", "edits", "characters", "loss")
    write_csv(
        path,
        head,
        (
            [
                line.name,
                line.reference,
                line.hypothesis,
                line.edits,
                len(line.reference),
                "" if line.loss is None else f"{line.loss:.4f}",
            ]
            for line in lines
        ),
    )


def save_spectrograms(path: Path, lines: Sequence[Line]) -> None:
    """Draw the lines' spectrograms, each below its two texts; a wrong hypothesis is red."""
    shown = [(line, line.spectrogram) for line in lines if line.spectrogram is not None]
    if not shown:
        return
    figure = make_figure(10.0, 1.9 * len(shown))
    for axes, (line, picture) in zip(
        figure.subplots(len(shown), 1, squeeze=False).flatten(), shown, strict=True
    ):
        _draw(
            axes,
            picture,
            f"said: {_short(line.reference)}\nread: {_short(line.hypothesis)}",
            line.seconds,
            "crimson" if line.edits else "black",
        )
    save_figure(figure, path)


def save_spectrogram(path: Path, picture: Tensor, *, title: str, seconds: float | None) -> None:
    """Draw one spectrogram, uint8[height, width], below a text."""
    figure = make_figure(10.0, 2.2)
    _draw(figure.subplots(), picture, _short(title), seconds, "black")
    save_figure(figure, path)


def spectrogram(waveform: Tensor, *, height: int = 64, width: int = 400) -> Tensor:
    """Return uint8[height, at most width] of a waveform float32[T], the lowest frequency first.

    Values span the 80 dB below the maximum (0) to the maximum (255).
    """
    hop = max(64, -(-len(waveform) // width))
    spectrum = torch.stft(
        waveform.float().cpu(),
        512,
        hop,
        window=torch.hann_window(512),
        pad_mode="constant",
        return_complex=True,
    ).abs()
    # Without the last of 257 bins, every band has as many
    bands = spectrum[:256].square().view(height, -1, spectrum.shape[1]).mean(1)
    decibels = 10.0 * bands.clamp(min=1e-12).log10()
    return (
        ((decibels - decibels.max() + 80.0).clamp(min=0.0) * (255.0 / 80.0)).round().to(torch.uint8)
    )


def _draw(axes: Any, picture: Tensor, title: str, seconds: float | None, colour: str) -> None:
    extent = (0.0, seconds or picture.shape[1], 0.0, 1.0)
    axes.imshow(
        picture.numpy(),
        origin="lower",
        aspect="auto",
        cmap="magma",
        interpolation="nearest",
        extent=extent,
    )
    axes.set_yticks([])
    axes.set_xlabel("seconds" if seconds else "", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.set_title(title, fontsize=8, loc="left", color=colour)
