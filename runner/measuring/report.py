"""Prints a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.measuring.ranges import RANGES
from samewise.runner.records.json_text import to_json
from samewise.runner.training.guards.memory import PARTS
from samewise.runner.training.guards.memory import format_bytes as bytes_in_words


def print_report(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Print a profile, as JSON if `given["json"]`."""
    out = Path(given["asked"]["out"])
    if given["json"]:
        print(to_json({**found, "folder": str(out)}, indent=2))
    else:
        print("\n".join(lines(found, out)))


def lines(found: Mapping[str, Any], out: Path) -> Iterator[str]:
    """The profile as text."""
    first = found["ranks"][0]
    several = f", rank 0 of {len(found['ranks'])}" if len(found["ranks"]) > 1 else ""
    yield f"{found['name']} ({found['fingerprint'][:12]}) on {found['device']}{several}"
    spread = (
        f"median of {found['steps']} steps, {first['fastest_ms']:.4g} to {first['slowest_ms']:.4g}"
    )
    yield (
        f"  a step of {found['batch_size']} samples takes {found['step_ms']:.4g} ms "
        f"({spread}): {found['samples_per_s']:,.4g} samples a second"
    )
    yield (
        "where its time goes"
        + (", waiting for the device after each part" if found["device"].startswith("cuda") else "")
        + " (means)"
    )
    whole = sum(first["parts_ms"].values()) or 1.0
    for part, meaning in RANGES.items():
        yield (
            f"  {part:<12} {first['parts_ms'][part]:>9.3f} ms "
            f"{first['parts_ms'][part] / whole:>7.1%}   {meaning}"
        )
    for rank, other in enumerate(found["ranks"][1:], start=1):
        theirs = sum(other["parts_ms"].values()) or 1.0
        most = sorted(other["parts_ms"].items(), key=lambda one: -one[1])[:4]
        yield f"  rank {rank}: {other['median_ms']:.4g} ms, " + ", ".join(
            f"{name} {ms / theirs:.0%}" for name, ms in most
        )
    yield "what memory it takes"
    yield "  " + ", ".join(
        f"{name} {bytes_in_words(first['memory'][name])}"
        for name in PARTS
        if first["memory"].get(name)
    )
    yield (
        "what to change"
        if found["advice"]
        else "nothing stands out: no setting is likely to make it much faster"
    )
    for cause in found["advice"]:
        yield f"  {cause['part']}, {cause['share']:.0%} of a step: {cause['why']}"
        for change, keeps in cause["change"].items():
            yield (
                f"    {change:<40} "
                f"{'the same bits' if keeps else 'another experiment, with different bits'}"
            )
    yield f"written to {out}"
    for file in found["files"]:
        yield f"  {file:<28} {_meaning(file)}".rstrip()
    if found["device"] == "cpu":
        yield "  (no memory snapshot: torch takes one on CUDA only)"


def _meaning(file: str) -> str:
    kinds = {
        ".trace.json.gz": "for https://ui.perfetto.dev or chrome://tracing",
        ".memory.pickle": "for https://pytorch.org/memory_viz",
    }
    return next((meaning for end, meaning in kinds.items() if file.endswith(end)), "")
