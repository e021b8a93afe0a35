"""Write comparisons as tables for a terminal and a paper, and as a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samewise.runner.compare.comparison import PairedComparison
from samewise.runner.compare.gate import Verdict
from samewise.runner.records.files import write_atomically
from samewise.runner.secrets import redact


def rows(comparisons: Sequence[PairedComparison]) -> list[dict[str, str]]:
    """Return a table: a row for each comparison, a column for each figure."""
    return [
        {
            "metric": f"{x.metric} ({x.unit or x.mode})",
            "setting": x.first,
            "baseline": x.second,
            "mean": _spread(x, 0),
            "baseline's": _spread(x, 1),
            "gain": x.show(x.estimate.mean),
            "95 % interval": f"{x.show(x.estimate.low)} to {x.show(x.estimate.high)}"
            if x.estimate.pairs > 1
            else "",
            "effect size": "" if math.isnan(x.estimate.effect) else f"{x.estimate.effect:.2f}",
            "pairs": str(x.estimate.pairs),
            "verdict": x.verdict,
        }
        for x in comparisons
    ]


def plain_values(comparison: PairedComparison) -> dict[str, Any]:
    """Return a comparison for programs, with None for what is unknown."""
    values = dataclasses.asdict(comparison)
    numbers = {key: x if math.isfinite(x) else None for key, x in values.pop("estimate").items()}
    return {**values, **numbers, "verdict": comparison.verdict, "sentence": str(comparison)}


def save(comparisons: Sequence[PairedComparison], folder: Path) -> list[Path]:
    """Write tables in Markdown and LaTeX, and pictures in SVG and PDF; return the files."""
    import pandas

    files = [folder / f"comparison.{kind}" for kind in ("md", "tex", "svg", "pdf")]
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(comparisons)
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(row.values()) for row in table)]
    markdown = ["| " + " | ".join(x.replace("|", "\\|") for x in line) + " |" for line in lines]
    text = "\n".join([*(f"- {x}" for x in comparisons), "", *markdown, ""])
    write_atomically(files[0], redact(text))
    write_atomically(files[1], redact(pandas.DataFrame(table).to_latex(index=False, escape=True)))
    _draw(comparisons, files[2:])
    return files


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict for programs."""
    return {
        **vars(verdict),
        "comparison": verdict.comparison and plain_values(verdict.comparison),
    }


def save_verdict(verdict: Verdict, folder: Path) -> None:
    """Write a verdict as gate.md, beside its comparison's files."""
    folder.mkdir(parents=True, exist_ok=True)
    if verdict.comparison:
        save([verdict.comparison], folder)
    write_atomically(folder / "gate.md", redact("# " + str(verdict).replace("\n", "\n- ") + "\n"))


def _spread(comparison: PairedComparison, side: int) -> str:
    """Format the mean and the standard deviation of a side's values."""
    values = [pair[side] for pair in comparison.values]
    deviation = f" ± {comparison.show(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return comparison.show(float(np.mean(values))) + deviation


def _draw(comparisons: Sequence[PairedComparison], files: Sequence[Path]) -> None:
    """Draw the gain of each pair, and the mean with its interval, beside zero."""
    import matplotlib
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(x.metric for x in comparisons))
    panels = [[x for x in comparisons if x.metric == metric] for metric in metrics]
    with matplotlib.rc_context({"svg.hashsalt": "samewise", "svg.fonttype": "none"}):
        figure = Figure((7, 1 + 0.5 * len(comparisons) + 0.6 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            scale = 100.0 if panel[0].unit else 1.0
            for place, x in enumerate(panel):
                sign = 1.0 if x.mode == "max" else -1.0
                gains = [scale * sign * (a - b) for a, b in x.values]
                axis.plot(gains, [place + 0.2] * len(gains), "o", color="0.6", markersize=4)
                now, spread = x.estimate, np.nan
                if now.pairs > 1:
                    spread = [[scale * (now.mean - now.low)], [scale * (now.high - now.mean)]]
                axis.errorbar(scale * now.mean, place, xerr=spread, fmt="D", color="C0", capsize=4)
            axis.axvline(0.0, color="0.3", linewidth=0.8)
            axis.set_yticks(
                range(len(panel)), [f"{x.first}\n{x.estimate.pairs} pairs" for x in panel]
            )
            axis.set_ylim(len(panel) - 0.5, -0.5)
            axis.set_xlabel(
                f"gain in {panel[0].metric}{' (points)' if panel[0].unit else ''} over {panel[0].second}"
            )
        for file in files:
            date = {"Date": None} if file.suffix == ".svg" else {"CreationDate": None}
            figure.savefig(file, metadata=date)
