"""Sounds and pictures of them: WAV files that browsers play, and spectrograms side by side."""

from collections.abc import Sequence
from pathlib import Path

import soundfile
from torch import Tensor

from samewise.recipes.parts.figures import make_figure, save_figure
from samewise.recipes.parts.transcripts import spectrogram


def save_wav(path: Path, waveform: Tensor, *, sample_rate: int) -> Path:
    """Write float[T] as a 16-bit WAV file, scaled down if it exceeds full scale."""
    # A diverged model's NaN would leave no playable file
    samples = waveform.detach().float().cpu().nan_to_num()
    samples = samples / samples.abs().max().clamp(min=1.0)
    soundfile.write(path, samples.numpy(), sample_rate, subtype="PCM_16")
    return path


def save_spectrograms(
    path: Path, rows: Sequence[Sequence[tuple[str, Tensor]]], *, sample_rate: int
) -> Path:
    """Draw float[T] waveforms with titles: related sounds in a row, all rows as long as the first.

    Colours span 80 dB below the loudest moment of each.
    """
    columns = max(map(len, rows))
    figure = make_figure(3.2 * columns, 1.9 * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for places, row in zip(grid, rows, strict=True):
        for axes, (title, waveform) in zip(places, row, strict=True):
            extent = (0.0, len(waveform) / sample_rate, 0.0, sample_rate / 2000)
            axes.imshow(
                spectrogram(waveform).numpy(),
                origin="lower",
                aspect="auto",
                cmap="magma",
                vmin=0,
                vmax=255,
                interpolation="nearest",
                extent=extent,
            )
            axes.set_title(title, fontsize=8, loc="left")
            axes.tick_params(labelsize=6)
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=7)
    for places in grid:
        places[0].set_ylabel("kHz", fontsize=7)
    save_figure(figure, path)
    return path
