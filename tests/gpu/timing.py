"""Times loops of steps by turns in one process, and says what the device and the host did in some of them."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import itertools
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from samewise.runner.config import compose, project
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run, checkpoint_due, evaluation_due, is_done
from samewise.runner.training.same_bits.determinism import apply

TURNS = 5
ALONE = ["tracking=none", "callbacks=[throughput,learning_rate]", "checkpoint.every_epochs=null", "max_epochs=1000000", "compile.max_graphs=64"]
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Of the events of a profile, those of the device."""


def nothing() -> None:
    pass


@dataclass
class Place:
    """Where a script measures.

    Args:
        device: cuda, or cpu to try the script with tiny sizes.
        folder: Removed at the end.
        sessions: Of runs; they are left open, since what ends them evaluates.
    """

    device: str
    folder: Path
    sessions: ExitStack

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def wait(self) -> None:
        if not self.small:
            torch.cuda.synchronize()


@dataclass
class Loop:
    """A loop that takes a step each time it is asked for the next.

    Args:
        steps: It.
        samples: Of a step.
        prepare: Sets what the process is to have set in this loop's turn.
    """

    steps: Iterator[Any]
    samples: int
    prepare: Callable[[], None] = nothing

    def take(self, count: int) -> None:
        for _ in range(count):
            next(self.steps)


def built(overrides: list[str], folder: Path, *, configs: Path | None = None) -> Run:
    own = project.find(configs=[configs] if configs else [])
    composed = compose.compose([*ALONE, *overrides, f"run_root={folder}"], project=own)
    return build(composed, composed.project, composed.folder)


def trained(run: Run) -> Iterator[None]:
    """What `fit` does between two evaluations."""
    batches = TrainingBatches(run)
    while True:
        if evaluation_due(run):
            run.progress.evaluated = run.step
        if checkpoint_due(run):
            run.recorder.saved = run.step
        is_done(run)
        run.recorder.record(train_step(run, next(batches), batches.load_next))
        yield


def samewise(run: Run) -> Loop:
    return Loop(trained(run), run.batch_size, lambda: apply(run.config.reproducibility))


def by_turns(place: Place, loops: Mapping[str, Loop], count: int, unit: str, *, turns: int = TURNS) -> dict[str, float]:
    """Print, of each loop, samples a second (median and range of the turns), milliseconds a step, its ratio to the first one's at the same turn, and the
    memory that its steps take besides what was there. Returns the ratios. What fails is said and left out.
    """
    rates: dict[str, list[float]] = {name: [] for name in loops}
    memory = dict[str, float]()
    for turn, (name, loop) in itertools.product(range(turns + 1), loops.items()):
        if name not in rates:
            continue
        loop.prepare()
        place.wait()
        held = 0 if place.small else torch.cuda.memory_allocated()
        if not place.small:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            loop.take(count if turn else 3)
            place.wait()
        except Exception as error:
            print(f"    {name:<58} failed: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", flush=True)
            traceback.print_exc()
            del rates[name]
            continue
        spent = time.perf_counter() - began
        if turn:
            rates[name].append(count * loop.samples / spent)
        else:
            print(f"    first steps of {name}: {spent:.1f} s", flush=True)
        memory[name] = 0.0 if place.small else (torch.cuda.max_memory_allocated() - held) / 2**30
    first = next(iter(rates.values()), [])
    ratios = dict[str, float]()
    print(f"    {'':<58} {unit:>12} {'range':>15} {'ms':>8} {'ratio':>6} {'GiB':>6}")
    for name, each in rates.items():
        ratios[name] = statistics.median(one / base for one, base in zip(each, first, strict=True))
        median, milliseconds = statistics.median(each), 1000 * loops[name].samples / statistics.median(each)
        span = f"{min(each):,.0f}-{max(each):,.0f}"
        print(f"    {name:<58} {median:>12,.1f} {span:>15} {milliseconds:>8.2f} {ratios[name]:>6.3f} {memory[name]:>6.1f}", flush=True)
    return ratios


def profiled(place: Place, name: str, loop: Loop, *, count: int = 5, top: int = 12) -> None:
    """Print what the device and the host did in some steps: by torch's profiler, which slows down the host."""
    loop.prepare()
    loop.take(2)
    place.wait()
    with profile(activities=[ProfilerActivity.CPU, *([] if place.small else [ProfilerActivity.CUDA])], acc_events=True) as found:
        loop.take(count)
        place.wait()
    file = place.folder / "profile.json"
    found.export_chrome_trace(str(file))
    events = [one for one in json.loads(file.read_text())["traceEvents"] if one.get("ph") == "X"]
    there = sorted((one for one in events if one.get("cat") in KINDS), key=lambda one: one["ts"])
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    print(f"  profile of {count} steps: {name}")
    if not there:
        print("    the device did nothing", flush=True)
        return
    busy, end, gaps = 0.0, there[0]["ts"], list[tuple[float, str, str]]()
    for before, one in zip([there[0], *there], there, strict=False):
        if one["ts"] > end:
            gaps.append((one["ts"] - end, before["name"], one["name"]))
        busy += max(0.0, one["ts"] + one["dur"] - max(end, one["ts"]))
        end = max(end, one["ts"] + one["dur"])
    span = end - there[0]["ts"]
    print(f"    device busy {busy / count / 1000:.2f} of {span / count / 1000:.2f} ms a step; {len(there) / count:.0f} kernels and copies a step")
    print(f"    idle {sum(gap for gap, *_ in gaps) / count / 1000:.2f} ms a step, of which in gaps over 20 us:", end=" ")
    print(f"{sum(gap for gap, *_ in gaps if gap > 20) / count / 1000:.2f}; the longest:")
    for gap, before, after in sorted(gaps, reverse=True)[:6]:
        print(f"      {gap:>8.0f} us between {before[:56]} and {after[:56]}")
    host = Counter[str]()
    for one in calls:
        host[one["name"]] += 1
    print(f"    calls a step: {', '.join(f'{call} {number / count:.1f}' for call, number in host.most_common(9))}")
    waits = [one for one in calls if "Synchronize" in one["name"] or (one["name"].startswith("cudaMemcpy") and one["dur"] > 100)]
    told = ", ".join(f"{one['name']} {one['dur'] / 1000:.2f}" for one in waits[-6:])
    print(f"    waits a step: {len(waits) / count:.1f}, {sum(one['dur'] for one in waits) / count / 1000:.2f} ms; the last, in ms: {told}")
    spent, numbers = Counter[str](), Counter[str]()
    for one in there:
        spent[one["name"]] += one["dur"]
        numbers[one["name"]] += 1
    for kernel, microseconds in spent.most_common(top):
        print(f"    {microseconds / count / 1000:>8.3f} ms {100 * microseconds / busy:>5.1f} % {numbers[kernel] / count:>6.1f} x {kernel[:100]}")
    sys.stdout.flush()


def heading() -> None:
    there = torch.cuda.is_available()
    card = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if there else "no CUDA device"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores"
    print(f"{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}: {card}, {versions}", flush=True)


def measured(parts: Iterable[Callable[[Place], bool | None]], description: str | None) -> None:
    """Carry out what a script measures, each part whatever became of the others; end the process with 1 where one failed or returned False."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", metavar="PART", help="some parts alone, in this order")
    args = parser.parse_args()
    known = {part.__name__: part for part in parts}
    heading()
    torch._dynamo.config.recompile_limit = 64  # several models of one class
    place = Place(args.device, Path(tempfile.mkdtemp(prefix="samewise-gpu-")), ExitStack())
    good = True
    for part in [known[name] for name in args.only or known]:
        began = time.perf_counter()
        try:
            good = part(place) is not False and good
        except Exception as error:
            print(f"  {part.__name__} failed: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            good = False
        print(f"  ({part.__name__}: {time.perf_counter() - began:.0f} s)", flush=True)
    shutil.rmtree(place.folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0 if good else 1)  # the sessions are not finished, and need not be: their workers would be waited for
