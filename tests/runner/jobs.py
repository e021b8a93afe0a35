"""Ranks of a run, as torchrun starts them: forks of a process that has imported torch, each of which learns its rank from its environment.

The launcher for users is tested in test_launch.py. Tests import this as `samewise_runner_jobs`.
"""

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from samewise_forked import Forked

TINY = [
    "experiment=resnet18_digits",
    "debug=tiny",
    "model.width=8",
    "replicas=4",
    "batch_size=16",
    "max_steps=12",
    "evaluate.limit=3",
    "evaluate.batch_size=16",
    "tracking=none",
    "evaluate.pictures=false",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=3",
    "strategy=elastic",
]


class Job:
    """Some ranks of one run.

    Args:
        run_root: Where the run is kept.
        size: How many ranks the run has.
        overrides: After those of `experiment`.
        experiment: What is trained.
        started: How many of the ranks to start; None: all.
        port: Where they meet; None: a free one.
        before: Code that each runs first.
    """

    def __init__(
        self,
        run_root: Path,
        size: int,
        *overrides: str,
        experiment: Sequence[str] = TINY,
        started: int | None = None,
        port: int | None = None,
        before: str = "",
    ) -> None:
        self.run_root, self._before = run_root, before
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port or free_port()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.ranks = [self._start(rank, size, address, [*experiment, f"run_root={run_root}", *overrides]) for rank in range(started or size)]

    def _start(self, rank: int, size: int, address: dict[str, str], overrides: list[str]) -> Forked:
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **address}
        return Forked("train", *overrides, "--json", said=self.run_root / f"said-{time.monotonic_ns()}-{rank}", variables=variables, before=self._before)

    def wait(self, seconds: float = 400) -> list[int | None]:
        """The exit codes."""
        end = time.monotonic() + seconds
        codes = [rank.wait(max(end - time.monotonic(), 0.1)) for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
        return codes

    @property
    def errors(self) -> str:
        return "".join(rank.errors for rank in self.ranks)

    @property
    def output(self) -> str:
        return "".join(rank.output for rank in self.ranks)

    def steps(self) -> int:
        """The number of steps in the trace."""
        return sum(path.read_bytes().count(b"\n") - 1 for path in self.run_root.glob("*/*/trace.jsonl"))

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 200
        while self.steps() < step:
            assert time.monotonic() < deadline, "the run makes no progress: " + self.errors
            time.sleep(0.002)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run(run_root: Path, ranks: int, *overrides: str, experiment: Sequence[str] = TINY, before: str = "") -> Path:
    """Train to the end on this many ranks; returns the run's folder."""
    job = Job(run_root, ranks, *overrides, experiment=experiment, before=before)
    assert job.wait() == [0] * ranks, job.errors
    assert job.output.count("\n") == 1, "rank 0 alone prints the summary"
    assert "Warning" not in job.errors
    return Path(json.loads(job.output)["folder"])


def weights(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def assert_same(folder: Path, reference: Path) -> None:
    assert weights(folder) == weights(reference)
    assert (folder / "trace.jsonl").read_bytes() == (reference / "trace.jsonl").read_bytes()
    assert folder.name == reference.name
    summary, expected = (json.loads((one / "summary.json").read_text()) for one in (folder, reference))
    assert summary["metrics"] == expected["metrics"]
