"""Compares references with hypotheses: edit distances, tables of both, and spectrograms with their
texts.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from samewise.recipes.parts.figures import save_figure
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import truncate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_short = partial(truncate, longest=150, ending="…")


def edit_distance(reference: Sequence[object], hypothesis: Sequence[object]) -> int:
    """The fewest insertions, deletions and substitutions that turn one sequence into the other
    (Levenshtein 1966).

    One row of the usual table at a time: a run of insertions along a row is a running minimum, so
    that rows are vectors.
    """
    number: dict[object, int] = {}
    rows, columns = (
        [number.setdefault(item, len(number)) for item in sequence]
        for sequence in (reference, hypothesis)
    )
    across, place = np.array(columns, dtype=np.int64), np.arange(len(columns) + 1)
    row = place.copy()
    for item in rows:
        best = row + 1  # delete the reference's item
        best[1:] = np.minimum(best[1:], row[:-1] + (across != item))  # or keep or substitute it
        row = np.minimum.accumulate(best - place) + place  # or insert the hypothesis' items
    return int(row[-1])


@dataclass(frozen=True)
class Line:
    """One utterance of a table.

    `loss` is in nats per character, None if it has none; `spectrogram` uint8[height, width], lowest
    frequency first, if kept.
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
    """Write a line per utterance: its recording, both texts, the edits between them, and its loss."""
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
                _loss(line),
            ]
            for line in lines
        ),
    )


def _loss(line: Line) -> str:
    return "" if line.loss is None else f"{line.loss:.4f}"


def save_html(path: Path, lines: Sequence[Line], *, heading: str) -> None:
    """Write a page with both texts below each other and the differences marked."""
    rows = "\n".join(
        f"<tr><td>{html.escape(line.name)}</td><td>{line.edits} of "
        f"{len(line.reference)}</td><td><p>{reference}</p><p>{hypothesis}</p></td></tr>"
        for line in lines
        for reference, hypothesis in [_mark_differences(line.reference, line.hypothesis)]
    )
    path.write_text(_PAGE.format(heading=html.escape(heading), rows=rows), encoding="utf-8")


def save_spectrograms(path: Path, lines: Sequence[Line]) -> None:
    """Draw the lines' spectrograms, each below its two texts; a wrong hypothesis is red."""
    from matplotlib.figure import Figure

    shown = [(line, line.spectrogram) for line in lines if line.spectrogram is not None]
    if not shown:
        return
    figure = Figure(figsize=(10.0, 1.9 * len(shown)), dpi=100, layout="constrained")
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 2.2), dpi=100, layout="constrained")
    _draw(figure.subplots(), picture, _short(title), seconds, "black")
    save_figure(figure, path)


def spectrogram(waveform: Tensor, *, height: int = 64, width: int = 400) -> Tensor:
    """uint8[height, at most width] of float32[T]: decibels from 80 below the maximum (0) to the
    maximum (255), lowest frequency first.
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
    bands = spectrum[:256].square().view(height, -1, spectrum.shape[1]).mean(1)
    decibels = 10.0 * bands.clamp(min=1e-12).log10()
    return (
        ((decibels - decibels.max() + 80.0).clamp(min=0.0) * (255.0 / 80.0)).round().to(torch.uint8)
    )


def _draw(axes: Axes, picture: Tensor, title: str, seconds: float | None, colour: str) -> None:
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


def _mark_differences(reference: str, hypothesis: str) -> tuple[str, str]:
    """Both texts as HTML, with what the other lacks in `<del>` and `<ins>`."""
    left, right = "", ""
    for kind, start, stop, begin, end in difflib.SequenceMatcher(
        None, reference, hypothesis, autojunk=False
    ).get_opcodes():
        said, read = html.escape(reference[start:stop]), html.escape(hypothesis[begin:end])
        left += said if kind == "equal" else f"<del>{said}</del>" if said else ""
        right += read if kind == "equal" else f"<ins>{read}</ins>" if read else ""
    return left, right


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{heading}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
td, th {{ border-top: 1px solid #ccc; padding: .3em .8em; text-align: left; vertical-align: top; }}
p {{ margin: 0; font-family: ui-monospace, monospace; white-space: pre-wrap; }}
del, ins {{ text-decoration: none; }}
del {{ background: #ffd9d9; }}
ins {{ background: #d9e8ff; }}
</style></head><body><h1>{heading}</h1>
<p>Top: what was said; bottom: what was recognised. Red: missed or wrong; blue: recognised instead.</p>
<table><tr><th>recording</th><th>edits</th><th>texts</th></tr>
{rows}
</table></body></html>
"""
