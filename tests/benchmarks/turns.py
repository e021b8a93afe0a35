"""Lets loops take turns in one process, so that whatever else the machine does meets each of them alike; other runners' in threads of their own."""

import ctypes
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from samewise.runner.config import compose, project
from samewise.runner.training.build import build
from samewise.runner.training.run import Run

TURNS = 15


class Ended(Exception):
    """The measurement is over: raised out of another runner's step."""


def share_memory() -> None:
    """Let all threads allocate as the main one does, in which samewise trains: glibc returns the memory of other threads to the kernel far more often."""
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX; before any thread


class Turns:
    """Another runner's loop, in a thread, as an iterator of steps: it waits until it is its turn."""

    def __init__(self, train: Callable[[Callable[[], None]], None]) -> None:
        self.mine, self.theirs, self.failed, self.over = threading.Event(), threading.Event(), None, False
        self.thread = threading.Thread(target=self._train, args=(train,), daemon=True)
        self.left = 0

    def _train(self, train: Callable[[Callable[[], None]], None]) -> None:
        self._wait()
        try:
            train(self._stepped)
        except Ended:
            pass
        except BaseException as error:
            self.failed = error
        self.theirs.set()

    def _wait(self) -> None:
        self.mine.wait()
        self.mine.clear()
        if self.over:
            raise Ended

    def _stepped(self) -> None:
        self.left -= 1
        if not self.left:
            self.theirs.set()
            self._wait()

    def take(self, count: int) -> None:
        if not self.thread.is_alive() and not self.over:
            self.thread.start()
        self.left = count
        self.theirs.clear()
        self.mine.set()
        self.theirs.wait()
        if self.failed:
            raise self.failed

    def end(self) -> None:
        self.over = True
        self.mine.set()
        self.thread.join()


def run_two_ranks(file: str) -> None:
    """Run a benchmark's file as each of two ranks, to their end."""
    with socket.socket() as probe, ExitStack() as running:
        probe.bind(("localhost", 0))
        address = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1])}
        probe.close()
        for number in ("0", "1"):
            running.enter_context(subprocess.Popen([sys.executable, file], env={**os.environ, **address, "RANK": number, "LOCAL_RANK": number}))


def built(overrides: list[str], folder: Path, *, models: Mapping[str, str]) -> Run:
    """The run of some overrides in a folder, with further choices for `model`."""
    (folder / "configs/model").mkdir(parents=True, exist_ok=True)
    for name, text in models.items():
        (folder / f"configs/model/{name}.yaml").write_text(text)
    composed = compose.compose([*overrides, f"run_root={folder}/runs"], project=project.find(configs=[folder / "configs"]))
    return build(composed, composed.project, composed.folder)


def in_turns(loops: Mapping[str, Callable[[int], None]], count: int, *, clock: Callable[[], float] = time.perf_counter) -> dict[str, tuple[float, list[float]]]:
    """For each loop, milliseconds per step (median over the turns of `count` steps), and each turn's ratio to the first loop."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 2):
        for name, take in loops.items():
            began = clock()
            take(count)
            spent = (clock() - began) / count
            if turn >= 2:
                seconds[name].append(spent)
    first = next(iter(seconds.values()))
    return {name: (1000 * statistics.median(spent), [ours / its for ours, its in zip(spent, first, strict=True)]) for name, spent in seconds.items()}


def advance(steps: Iterator[None], count: int) -> None:
    for _ in range(count):
        next(steps)


def leave(run: Run) -> None:
    """Let a run's session end without an evaluation."""
    run.progress.evaluated = run.step
    run.recorder.scores = {"valid": run.recipe.scores(run.splits["valid"].dataset)}


def show(work: str, found: Mapping[str, tuple[float, list[float]]]) -> None:
    """Print a table of what `in_turns` found."""
    print(f"{work:<44} {'ms a step':>10} {'ratio':>7}  range")
    for name, (milliseconds, ratios) in found.items():
        low, *_, high = statistics.quantiles(ratios, n=10)
        print(f"  {name:<42} {milliseconds:>10.3f} {statistics.median(ratios):>7.2f}  {low:.2f} to {high:.2f}", flush=True)
