"""airbench_cifar10 from its first step to its last: 8 epochs of 50,000 images of 32 pixels in batches of 2000, strict and traced, and whether each
training has the same bits. The images are generated: nothing here says what accuracy they reach.
"""

import os
import re
import statistics
import time

from timing import Loop, Place, built, measured, profiled, trained

from samewise.runner.training.run import Run
from samewise.runner.training.same_bits.determinism import apply
from samewise.runner.training.session import session

CORES = len(os.sched_getaffinity(0))
EXPERIMENT = ["experiment=airbench_cifar10", "dataset=generated_classification", "evaluate.pictures=false"]


def run_of(place: Place, name: str, *own: str) -> Run:
    sizes = ["dataset.samples=64", "batch_size=16", "max_epochs=1", "model.widths=[4,4,4]"] if place.small else ["dataset.samples=50000", "max_epochs=8"]
    run = built([*EXPERIMENT, *sizes, f"device={place.device}", *own], place.folder / re.sub(r"\W+", "_", name))
    place.sessions.enter_context(session(run))
    return run


def time_training(place: Place, run: Run) -> tuple[float, float, str]:
    """Seconds from the first step to the last, those without the first step, and the end of the trace."""
    apply(run.config.reproducibility)
    steps = trained(run)
    began = time.perf_counter()
    next(steps)
    place.wait()
    first = time.perf_counter() - began
    for _ in range(run.total_steps - 1):
        next(steps)
    place.wait()
    spent = time.perf_counter() - began
    return spent, (spent - first) * run.total_steps / (run.total_steps - 1), f"{run.recorder.trace.chain:016x}"


def repeat(place: Place, name: str, *own: str, times: int = 5) -> bool:
    found = [time_training(place, run_of(place, f"{name} {number}", *own)) for number in range(times)]
    whole, steady, chains = zip(*found, strict=True)
    same = "the same bits" if len({*chains}) == 1 else f"{len({*chains})} DIFFERENT TRACES"
    whole_of = f"{statistics.median(whole):.2f} s ({min(whole):.2f}-{max(whole):.2f})"
    print(
        f"    {name:<44} {whole_of:<22} at the pace after step 1: {statistics.median(steady):.2f} s ({min(steady):.2f}-{max(steady):.2f}); {same}", flush=True
    )
    return len({*chains}) == 1


def plain(place: Place) -> bool:
    return repeat(place, "8 workers", "loader.num_workers=" + ("0" if place.small else "8"))


def workers(place: Place) -> bool:
    good = [repeat(place, f"{number} workers", f"loader.num_workers={number}", times=2) for number in ([0] if place.small else [0, 2])]
    return all([*good, repeat(place, "no trace, 8 workers", "trace.every_steps=0", f"loader.num_workers={0 if place.small else 8}", times=2)])


def graphs(place: Place) -> bool:
    """Compiled, and with CUDA graphs: the first training's first step compiles."""
    compiled = [] if place.small else ["compile=default"]
    own = [*compiled, f"loader.num_workers={0 if place.small else 8}"]
    good = repeat(place, "compiled", *own, times=2)
    return place.small or (repeat(place, "compiled, CUDA graphs", *own, "compile.cuda_graphs=true") and good)


def profiles(place: Place) -> None:
    own = [] if place.small else ["compile=default", "compile.cuda_graphs=true", "loader.num_workers=8"]
    for name, settings in {"8 workers": own[-1:], "compiled, CUDA graphs": own}.items():
        run = run_of(place, f"profile of {name}", *settings, "max_epochs=9")
        profiled(place, name, Loop(trained(run), run.batch_size, lambda run=run: apply(run.config.reproducibility)), count=2 if place.small else 5)


if __name__ == "__main__":
    measured((plain, graphs, workers, profiles), __doc__)
