"""A `samewise train ... strategy.nproc=N` in its own process, a fork, and the ranks that it has started, forks of it."""

import contextlib
import time
from pathlib import Path

import psutil
from samewise_forked import Forked
from samewise_tiny import DIGITS

TINY = [*DIGITS, "model.width=8", "replicas=4", "batch_size=16", "checkpoint.every_steps=2", "strategy=elastic"]


def start(run_root: Path, *overrides: str) -> Forked:
    return Forked("train", *TINY, f"run_root={run_root}", *overrides, "--json", said=run_root / f"said-{time.monotonic_ns()}")


def ranks_of(process: Forked) -> dict[int, psutil.Process]:
    """The living ranks of a launcher, by number."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if (name := child.name()).startswith("rank "):
                    found[int(name[5:])] = child
    return found


def shares_imports(rank: psutil.Process) -> bool:
    """Whether it is a fork that has started no program of its own (PF_FORKNOEXEC of linux/sched.h), so that its parent has imported torch for it."""
    return bool(int(Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[6]) & 0x40)


def wait_for_step(process: Forked, run_root: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while sum(path.read_bytes().count(b"\n") - 1 for path in run_root.glob("*/*/trace.jsonl")) < step:
        assert process.poll() is None, process.errors
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.01)
