"""Time from the command to the first step, against importing torch and torchvision, as a ratio within one run.

    make bench        or: python tests/benchmarks/bench_startup.py

The two take turns. The first step is there when the trace has its first line.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURNS = 7


def importing() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, torchvision"], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_step(*overrides: str) -> float:
    """Seconds until the first step is in the trace."""
    with tempfile.TemporaryDirectory() as root:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "samewise", "train", "experiment=resnet18_digits", f"run_root={root}", *overrides],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not any(path.read_bytes().count(b"\n") > 1 for path in Path(root).glob("*/*/trace.jsonl")):
            assert process.poll() is None, "the run ended before its first step"
            time.sleep(0.002)
        seconds = time.perf_counter() - began
        process.kill()
        process.wait()
        time.sleep(3 if not overrides else 0.2)  # the sender, if there is one, notices and ends
        return seconds


def main() -> None:
    print(f"{'what':<40} {'import':>8} {'command':>8} {'ratio':>6}")
    for name, overrides in (("first step, tracking=none", ("tracking=none",)), ("first step, MLflow in SQLite", ())):
        importing(), first_step(*overrides)
        pairs = [(importing(), first_step(*overrides)) for _ in range(TURNS)]
        one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"{name:<40} {one:>6.2f} s {two:>6.2f} s {statistics.median(b / a for a, b in pairs):>6.2f}")


if __name__ == "__main__":
    main()
