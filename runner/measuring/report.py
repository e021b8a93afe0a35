"""Print a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.measuring.ranges import RANGES
from samewise.runner.records.json_text import to_json
from samewise.runner.training.guards.memory import PARTS
from samewise.runner.training.guards.memory import format_bytes as bytes_in_words


def print_report(result: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Print a profile, as JSON if `options["json"]`."""
    out = Path(options["scope"]["out"])
    if options["json"]:
        print(to_json({**result, "folder": str(out)}, indent=2))
    else:
        print("\n".join(lines(result, out)))


def lines(result: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Yield the profile as lines of text."""
    main_rank = result["ranks"][0]
    rank_text = f", rank 0 of {len(result['ranks'])}" if len(result["ranks"]) > 1 else ""
    yield f"{result['name']} ({result['fingerprint'][:12]}) on {result['device']}{rank_text}"
    spread = (
        f"median of {result['steps']} steps, {main_rank['fastest_ms']:.4g} to "
        f"{main_rank['slowest_ms']:.4g}"
    )
    yield (
        f"  a step of {result['batch_size']} samples takes {result['step_ms']:.4g} ms "
        f"({spread}): {result['samples_per_s']:,.4g} samples a second"
    )
    yield (
        "where its time goes"
        + (
            ", waiting for the device after each part"
            if result["device"].startswith("cuda")
            else ""
        )
        + " (means)"
    )
    total_ms = sum(main_rank["parts_ms"].values()) or 1.0
    for part, meaning in RANGES.items():
        yield (
            f"  {part:<12} {main_rank['parts_ms'][part]:>9.3f} ms "
            f"{main_rank['parts_ms'][part] / total_ms:>7.1%}   {meaning}"
        )
    for rank, measurement in enumerate(result["ranks"][1:], start=1):
        step_ms = sum(measurement["parts_ms"].values()) or 1.0
        largest_parts = sorted(measurement["parts_ms"].items(), key=lambda x: -x[1])[:4]
        yield f"  rank {rank}: {measurement['median_ms']:.4g} ms, " + ", ".join(
            f"{name} {ms / step_ms:.0%}" for name, ms in largest_parts
        )
    yield "what memory it takes"
    yield "  " + ", ".join(
        f"{name} {bytes_in_words(main_rank['memory'][name])}"
        for name in PARTS
        if main_rank["memory"].get(name)
    )
    yield (
        "what to change"
        if result["advice"]
        else "nothing stands out: no setting is likely to make it much faster"
    )
    for cause in result["advice"]:
        yield f"  {cause['part']}, {cause['share']:.0%} of a step: {cause['why']}"
        for change, keeps_bits in cause["change"].items():
            yield (
                f"    {change:<40} "
                f"{'the same bits' if keeps_bits else 'another experiment, with different bits'}"
            )
    yield f"written to {out}"
    for file in result["files"]:
        yield f"  {file:<28} {_meaning(file)}".rstrip()
    if result["device"] == "cpu":
        yield "  (no memory snapshot: torch takes one on CUDA only)"


def _meaning(file: str) -> str:
    kinds = {
        ".trace.json.gz": "for https://ui.perfetto.dev or chrome://tracing",
        ".memory.pickle": "for https://pytorch.org/memory_viz",
    }
    return next((meaning for end, meaning in kinds.items() if file.endswith(end)), "")
