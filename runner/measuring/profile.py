"""Measure the time and memory of a few training steps. Only the profile is kept."""

import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from samewise.runner.config.compose import Composed
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, SamewiseError, first_line
from samewise.runner.measuring import operators
from samewise.runner.measuring.ranges import (
    RANGES,
    Clock,
    sum_by_part,
    time_batches,
    time_samples,
    with_clock,
)
from samewise.runner.records.files import write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.json_text import to_json
from samewise.runner.torch_private import dump_memory_snapshot, record_memory_history
from samewise.runner.tracking.tracker import Tracker
from samewise.runner.training import memory
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.failures import explain_trial
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run

_WARMUP_STEPS = 2
"""Steps before the measured ones: buffers are made, kernels chosen, workers started."""


@contextmanager
def rehearse(composed: Composed) -> Generator[Run]:
    """Build a config's run in a temporary folder, with journal and trace open as in training.

    Args:
        composed: The config.

    Yields:
        The run.

    Raises:
        ConfigError: A part cannot be made, the parts do not fit together, or there is too little
            memory.
    """
    run: Run | None = None
    with (
        tempfile.TemporaryDirectory(prefix="samewise-measured-") as temporary,
        streams.preserve_generators(),
    ):
        folder = RunFolder(Path(temporary) / composed.name / composed.fingerprint[:12])
        try:
            run = build(composed, composed.project, folder)
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
            raise explain_trial(error, composed, run) from error
        finally:
            if run is not None:
                run.recorder.trace.close()
                run.recorder.tracker.finish("FINISHED")
        if run is not None:
            run.strategy.end()


def take_profile(composed: Composed, *, steps: int, traced: int, out: Path) -> dict[str, Any]:
    """Measure a config's training, in this process and its other ranks, and write the profile.

    Args:
        composed: The config.
        steps: Most steps to measure for time.
        traced: Further steps under torch's profiler, which slows them down.
        out: Folder for the profile.

    Returns:
        The profile, the same on all ranks.

    Raises:
        ConfigError: The experiment has too few steps, or cannot be trained.
    """
    with rehearse(composed) as run:
        # On CUDA the steps are measured again with a wait at each range
        repeats = 2 if run.strategy.device.type == "cuda" else 1
        min_steps = _WARMUP_STEPS + repeats + traced
        ConfigError.raise_if(
            run.total_steps < min_steps,
            "max_steps",
            f"a profile takes at least {min_steps} steps",
            run.total_steps,
            f"at least {min_steps}",
        )
        steps = min(steps, (run.total_steps - _WARMUP_STEPS - traced) // repeats)
        clock = Clock(run.strategy.device)
        # On one of several ranks, a forward pass would wait for the others
        activations = memory.activations_of(run) if run.strategy.peers.size == 1 else {}
        measurement = _measure_steps(
            with_clock(run, clock), clock, steps=steps, traced=traced, out=out
        )
        if run.strategy.device.type == "cuda":
            measurement["memory_peak"] = torch.cuda.max_memory_allocated()
        measurement["memory"] = memory.parts_of(run) | activations
        measurement["checkpoint"] = memory.checkpoint_of(run)
        ranks = run.strategy.peers.gather(measurement)
        result: dict[str, Any] = {
            "name": composed.name,
            "fingerprint": composed.fingerprint,
            "device": str(run.strategy.device),
            "batch_size": run.batch_size,
            "steps": steps,
            "step_ms": ranks[0]["median_ms"],
            "samples_per_s": ranks[0]["samples_per_s"],
            "ranks": ranks,
            "chain": f"{run.recorder.trace.chain:016x}",
            "parameters": sum(x.numel() for x in run.parameters),
        }
        if run.strategy.peers.is_main:
            result["files"] = sorted(
                {"profile.json", *(path.name for path in out.iterdir() if path.is_file())}
            )
            write_json(out / "profile.json", result)
    return result


def _measure_steps(run: Run, clock: Clock, *, steps: int, traced: int, out: Path) -> dict[str, Any]:
    """Take the steps of one training, and return times in milliseconds."""
    for callback in run.callbacks.values():
        callback.on_start(run.recorder.view)
    loaded = TrainingBatches(run)
    batches = time_batches(loaded, clock)
    load_next = clock.time_calls("data", loaded.load_next)

    def step() -> tuple[float, int]:
        began = time.perf_counter()
        outcome = train_step(run, next(batches), load_next)
        with clock.range("callbacks"):
            run.recorder.record(outcome)
        return time.perf_counter() - began, outcome.samples

    with time_samples(run, clock):
        for _ in range(_WARMUP_STEPS):
            step()
        clock.waits = False
        clock.restart()
        durations, samples = zip(*(step() for _ in range(steps)), strict=True)
        # With a wait at each range, now that the undisturbed time of a step is known
        if run.strategy.device.type == "cuda":
            clock.waits = True
            clock.restart()
            for _ in range(steps):
                step()
        range_ms = {name: 1000 * seconds / steps for name, seconds in clock.stop().items()}
        tables = _trace(run, clock, step, traced, out) if traced else {}
    return {
        **tables,
        "measured_ms": sum(range_ms.values()),
        "fastest_ms": 1000 * min(durations),
        "median_ms": 1000 * statistics.median(durations),
        "slowest_ms": 1000 * max(durations),
        # An epoch's last batch may be smaller
        "samples_per_s": sum(samples) / sum(durations),
        "parts_ms": sum_by_part(range_ms),
        "ranges_ms": dict(sorted(range_ms.items(), key=lambda x: -x[1])),
    }


def _trace(run: Run, clock: Clock, step: Any, traced: int, out: Path) -> dict[str, operators.Table]:
    """Run some steps under torch's profiler, for a Perfetto trace and tables."""
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if run.strategy.device.type == "cuda" else []),
    ]
    clock.marks, clock.waits = True, False
    snapshot = _snapshot(run.strategy.device, out / f"rank-{run.strategy.peers.rank}.memory.pickle")
    with (
        snapshot,
        operators.mark_layers(run.model),
        operators.timed_rpc() as calls,
        profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        ) as profiler,
    ):
        for _ in range(traced):
            with torch.profiler.record_function(f"step {run.step + 1}"):
                step()
    clock.marks = False
    profiler.export_chrome_trace(str(out / f"rank-{run.strategy.peers.rank}.trace.json.gz"))
    return operators.tables(profiler.events() or [], calls, traced)


@contextmanager
def _snapshot(device: torch.device, file: Path) -> Generator[None]:
    """Record on CUDA what is allocated within, by line."""
    try:
        if device.type == "cuda":
            record_memory_history()
    except RuntimeError as error:
        # Only torch's own allocator records allocations
        print(f"warning: no memory snapshot: {first_line(error)}", file=sys.stderr)
        device = torch.device("cpu")
    yield
    if device.type == "cuda":
        dump_memory_snapshot(str(file))
        record_memory_history(enabled=None)


def profile_rank(composed: Composed, options: Mapping[str, Any]) -> None:
    """Run `samewise profile` as one rank; the main rank prints the result."""
    out = Path(options["out"])
    result = take_profile(composed, steps=options["steps"], traced=options["traced"], out=out)
    if "files" in result and options["json"]:
        print(to_json({**result, "folder": str(out)}, indent=2))
    elif "files" in result:
        print("\n".join(report_lines(result, out, options["by"])))


def report_lines(result: Mapping[str, Any], out: Path, by: str) -> Iterator[str]:
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
        f"{name} {memory.format_bytes(main_rank['memory'][name])}"
        for name in memory.PARTS
        if main_rank["memory"].get(name)
    )
    yield from (f"  {line}" for line in memory.checkpoint_lines(main_rank["checkpoint"]))
    if by in main_rank:
        yield from operators.table_lines(main_rank, by)
        for rank, tables in enumerate(result["ranks"] if main_rank["communication"] else []):
            computation, communication = operators.sum_apart(tables)
            yield (
                f"  rank {rank}: computation {computation:.4g} ms, communication with the wait "
                f"for other ranks {communication:.4g} ms, some of it meanwhile"
            )
    yield f"written to {out}"
    for file in result["files"]:
        yield f"  {file}"
    if result["device"] == "cpu":
        yield "  (no memory snapshot: torch takes one on CUDA only)"
