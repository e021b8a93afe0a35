"""How the promise is tested: runs of the command line in separate processes, some of which are killed. Tests get it as the fixture `promise`."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from samewise_forked import Forked


class Promise:
    """One small experiment, to be trained again and again.

    Args:
        overrides: The overrides that define it.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = list(overrides)

    def start(self, run_root: Path, *overrides: str) -> Forked:
        """Train in a separate process."""
        return Forked("train", *self.overrides, f"run_root={run_root}", *overrides, "--json", said=run_root / f"said-{time.monotonic_ns()}")

    def run(self, run_root: Path, *overrides: str) -> Path:
        """Train to the end; returns the run's folder."""
        process = self.start(run_root, *overrides)
        assert process.wait(200) == 0, process.errors
        return Path(json.loads(process.output)["folder"])

    def run_afresh(self, run_root: Path, *overrides: str) -> Path:
        """Like `run`, in a new interpreter, as a user would start it."""
        command = [sys.executable, "-m", "samewise", "train", *self.overrides, f"run_root={run_root}", *overrides, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return Path(json.loads(done.stdout)["folder"])

    def kill_within(self, run_root: Path, chance: random.Random, *overrides: str, fewest: int = 4, most: int = 8) -> bool:
        """Start the run and kill it with SIGKILL after `fewest` to `most` further steps, at a random moment of one. False: it ended before that."""
        process = self.start(run_root, *overrides)
        deadline, before = time.monotonic() + 90, trace_lines(run_root)
        wanted = max(before - 4, 0) + chance.randint(fewest, most)
        while process.poll() is None and trace_lines(run_root) < wanted:
            assert time.monotonic() < deadline, "the run makes no progress"
            time.sleep(0.005)
        time.sleep(chance.random() * 0.03)
        process.send(signal.SIGKILL)
        assert process.wait(60) in (0, -signal.SIGKILL), process.errors
        return process.poll() != 0


def weights(folder: Path) -> str:
    """The SHA-256 of a finished run's weights."""
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def trace(folder: Path) -> bytes:
    """The trace: digests of every step's batch, inputs, gradients and weights, and the loss."""
    return (folder / "trace.jsonl").read_bytes()


def trace_lines(run_root: Path) -> int:
    """The number of lines in the traces of all runs below a folder: one for each step, and a head line for each trace."""
    return sum(path.read_bytes().count(b"\n") for path in run_root.glob("*/*/trace.jsonl"))
