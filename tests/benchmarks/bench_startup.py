"""Time from the command to the first step, relative to importing torch and torchvision; that of commands that do not train, relative to importing Hydra.

    make bench        or: python tests/benchmarks/bench_startup.py

The two of a ratio take turns. The first step is there when the trace has its first line.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

TURNS = 7


def run(*arguments: str) -> float:
    """The seconds that a Python process takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
        while any(root in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])):
            time.sleep(0.2)  # the sender, if there is one, notices and ends
        return seconds


def compare(name: str, one: Callable[[], float], other: Callable[[], float]) -> None:
    """Print the medians of both, and that of their ratio."""
    one(), other()
    pairs = [(one(), other()) for _ in range(TURNS)]
    importing, command = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{name:<40} {importing:>6.2f} s {command:>6.2f} s {statistics.median(b / a for a, b in pairs):>6.2f}")


def main() -> None:
    print(f"{'what':<40} {'import':>8} {'command':>8} {'ratio':>6}")
    torch, hydra = partial(run, "-c", "import torch, torchvision"), partial(run, "-c", "import hydra")
    compare("first step, tracking=none", torch, partial(first_step, "tracking=none"))
    compare("first step, MLflow in SQLite", torch, first_step)
    for arguments in (["show", "experiment=resnet18_digits"], ["list"], ["--help"]):
        compare(" ".join(["samewise", *arguments]), hydra, partial(run, "-m", "samewise", *arguments))


if __name__ == "__main__":
    main()
