"""Measures the time and memory of a few training steps. Only the profile is kept."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from samewise.runner.config.compose import Composed
from samewise.runner.data import streams
from samewise.runner.data.keyed import training_keys
from samewise.runner.errors import ConfigError, Problem, SamewiseError, first_line
from samewise.runner.measuring.advice import advise
from samewise.runner.measuring.ranges import (
    Clock,
    sum_by_part,
    time_batches,
    time_samples,
    with_clock,
)
from samewise.runner.measuring.report import print_report
from samewise.runner.processes.this_process import end_rank
from samewise.runner.records.files import write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.torch_private import dump_memory_snapshot, record_memory_history
from samewise.runner.tracking.tracker import Tracker
from samewise.runner.training import launch
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.guards import memory
from samewise.runner.training.guards.step_errors import explain_step_error, refused_operator
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run

_WARM = 2
"""Steps before those that are measured: buffers are made, kernels chosen, workers started."""


@dataclass(frozen=True)
class Scope:
    """What to measure: `steps` for time, then `traced` more under torch's profiler, which slows
    them down.
    """

    steps: int
    traced: int
    out: str


@contextmanager
def rehearse(composed: Composed, *, alone: bool = False) -> Generator[Run]:
    """The run of a config in a temporary folder, with journal and trace open as in training.

    ConfigError if a part cannot be made, the parts do not fit together, or there is too little
    memory.
    """
    run: Run | None = None
    with (
        tempfile.TemporaryDirectory(prefix="samewise-measured-") as temporary,
        streams.preserve_generators(),
    ):
        folder = RunFolder(Path(temporary) / composed.name / composed.fingerprint[:12])
        try:
            run = build(composed, composed.project, folder, alone=alone)
            folder.create()
            if run.strategy.peers.is_main:
                run.recorder.trace.open(0, 0)
                run.recorder.tracker = Tracker(folder, resume_step=None)
                run.recorder.tracker.start()
            yield run
        except SamewiseError as error:
            if run:
                run.strategy.abandon(error)
            raise
        except (Exception, SystemExit) as error:
            explained = run.strategy.peers.explain(error, step=run.step + 1) if run else error
            if run:
                run.strategy.abandon(explained)
            if explained is not error or run is None:
                raise explained from error
            raise ConfigError(
                refused_operator(error)
                or memory.out_of_memory(run, error)
                or explain_step_error(error, composed, run)
            ) from error
        finally:
            if run is not None:
                run.recorder.trace.close()
                run.recorder.tracker.finish("FINISHED")
        if run is not None:
            run.strategy.end()


def take_profile(composed: Composed, asked: Scope) -> dict[str, Any]:
    """Measure a config's training, in this process and its other ranks, and write the profile.

    Returns what was found, the same on all ranks. ConfigError if the experiment has too few steps,
    or cannot be trained.
    """
    out = Path(asked.out)
    with rehearse(composed) as run:
        apart = 2 if run.strategy.device.type == "cuda" else 1
        fewest = _WARM + apart + asked.traced
        if run.total_steps < fewest:
            raise ConfigError(
                Problem(
                    "max_steps",
                    f"a profile takes at least {fewest} steps",
                    run.total_steps,
                    f"at least {fewest}",
                )
            )
        steps = min(asked.steps, (run.total_steps - _WARM - asked.traced) // apart)
        clock = Clock(run.strategy.device)
        used = memory.parts_of(run, samples=None if run.strategy.peers.size == 1 else 0)
        mine = _measure_steps(
            with_clock(run, clock), clock, steps=steps, traced=asked.traced, out=out
        )
        if run.strategy.device.type == "cuda":
            mine["memory_peak"] = torch.cuda.max_memory_allocated()
        mine["memory"] = memory.parts_of(run, samples=0) | {
            name: used[name] for name in ("activations", "batch") if name in used
        }
        ranks = run.strategy.peers.gather(mine)
        found: dict[str, Any] = {
            "name": composed.name,
            "fingerprint": composed.fingerprint,
            "device": str(run.strategy.device),
            "batch_size": run.batch_size,
            "steps": steps,
            "step_ms": ranks[0]["median_ms"],
            "samples_per_s": ranks[0]["samples_per_s"],
            "ranks": ranks,
            "chain": f"{run.recorder.trace.chain:016x}",
            "parameters": sum(one.numel() for one in run.parameters),
        }
        found["advice"] = advise(run, ranks[0])
        if run.strategy.peers.is_main:
            found["files"] = sorted(
                {"profile.json", *(path.name for path in out.iterdir() if path.is_file())}
            )
            write_json(out / "profile.json", found)
    return found


def _measure_steps(run: Run, clock: Clock, *, steps: int, traced: int, out: Path) -> dict[str, Any]:
    """Take the steps of one training. Times in milliseconds."""
    for callback in run.callbacks.values():
        callback.on_start(run.recorder.view)
    loaded = TrainingBatches(run)
    batches = time_batches(loaded, clock)
    load_next = clock.time_calls("data", loaded.load_next)

    def step() -> tuple[float, int]:
        began = time.perf_counter()
        micro_batches = next(batches)
        outcome = train_step(run, micro_batches, load_next)
        with clock.range("callbacks"):
            run.recorder.record(outcome)
        return time.perf_counter() - began, outcome.samples

    apart = run.config.loader.num_workers > 0
    batch = _batch(run, clock) if apart else {}
    with time_samples(run, clock):
        for _ in range(_WARM):
            step()
        clock.waits = False
        clock.restart()
        each, samples = zip(*(step() for _ in range(steps)), strict=True)
        if (
            run.strategy.device.type == "cuda"
        ):  # again, with a wait at each range: the undisturbed time of a step is already known
            clock.waits = True
            clock.restart()
            for _ in range(steps):
                step()
        spent = {name: 1000 * seconds / steps for name, seconds in clock.stop().items()}
        if traced:
            _trace(run, clock, step, traced, out)
    return {
        "measured_ms": sum(spent.values()),
        "fastest_ms": 1000 * min(each),
        "median_ms": 1000 * statistics.median(each),
        "slowest_ms": 1000 * max(each),
        "samples_per_s": sum(samples) / sum(each),
        "parts_ms": sum_by_part(spent),
        "ranges_ms": dict(sorted(spent.items(), key=lambda one: -one[1])),
        "batch_ms": batch,
    }


def _batch(run: Run, clock: Clock) -> dict[str, float]:
    """Milliseconds that a worker takes for a step's batches, by range.

    Measured here by making them once.
    """
    keys = list(
        training_keys(
            run.order, run.plan, first_step=0, steps=1, micro_batches=run.strategy.micro_batches
        )
    )
    with time_samples(run, clock):
        for key in keys:  # the first time, other things are initialised too
            run.splits["train"].keyed[key]
        clock.restart()
        for key in keys:
            with clock.range("data"):
                run.splits["train"].keyed[key]
        return {name: 1000 * seconds for name, seconds in clock.stop().items()}


def _trace(run: Run, clock: Clock, step: Any, traced: int, out: Path) -> None:
    """Run some steps under torch's profiler, for a Perfetto trace."""
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if run.strategy.device.type == "cuda" else []),
    ]
    clock.marks, clock.waits = True, False
    snapshot = _snapshot(run.strategy.device, out / f"rank-{run.strategy.peers.rank}.memory.pickle")
    with (
        snapshot,
        profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        ) as watched,
    ):
        for _ in range(traced):
            with torch.profiler.record_function(f"step {run.step + 1}"):
                step()
    clock.marks = False
    watched.export_chrome_trace(str(out / f"rank-{run.strategy.peers.rank}.trace.json.gz"))


@contextmanager
def _snapshot(device: torch.device, file: Path) -> Generator[None]:
    """On CUDA, record what is allocated within, by line; elsewhere nothing."""
    try:
        if device.type == "cuda":
            record_memory_history()
    except RuntimeError as error:  # only torch's own allocator records allocations
        print(f"warning: no memory snapshot: {first_line(error)}", file=sys.stderr)
        device = torch.device("cpu")
    yield
    if device.type == "cuda":
        dump_memory_snapshot(str(file))
        record_memory_history(enabled=None)


def profile_rank(composed: Composed, given: Mapping[str, Any]) -> None:
    """Run `samewise profile` as one rank; the first prints the result."""
    found = take_profile(composed, Scope(**given["asked"]))
    if "files" in found:
        print_report(found, given)


if __name__ == "__main__":
    end_rank(launch.main(Path(sys.argv[1]), work=profile_rank))
