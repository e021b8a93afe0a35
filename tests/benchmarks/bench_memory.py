"""Memory of strategy=elastic against torch's DDP on two ranks, and against one process with one replica: in sizes of the model's parameters.

    make bench        or: python tests/benchmarks/bench_memory.py

Each process trains a network of known size on small images, so that activations count little, and reads the kernel's peak of its resident memory over a
few steps (VmHWM), less what it had before the network was made. Weights, gradients and SGD's momentum are three sizes; what is above is the exchange's.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", MALLOC_MMAP_THRESHOLD_="65536")  # freed tensors go back to the kernel

import gc
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from turns import run_two_ranks

from samewise.runner.config import compose, project
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step

COMMON = [
    *("dataset=generated_classification", "dataset.samples=64", "dataset.image_size=8", "transforms=images", "model=resnet18_small", "model.width=96"),
    *("batch_size=8", "max_epochs=100000", "optimizer.lr=0.01", "optimizer.momentum=0.9", "tracking=none", "callbacks=none", "trace.every_steps=0"),
]
ALONE = {"1 process, 1 replica: single": ["strategy=single"], "1 process, 4 replicas: single": ["strategy=single", "replicas=4"]}
IN_PAIRS = {
    "2 processes, 2 replicas: DDP": ["strategy=ddp", "replicas=2"],
    **{f"2 processes, {replicas} replicas: elastic": ["strategy=elastic", f"replicas={replicas}"] for replicas in (2, 4)},
}


def kibibytes(name: str) -> int:
    """The value of a line in /proc/self/status, such as VmRSS, in KiB."""
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(found)


def sizes(*overrides: str) -> tuple[float, float]:
    """(the peak over three steps in sizes of the parameters, one size in MiB), after the first step, which makes what is kept."""
    gc.collect()
    before = kibibytes("VmRSS")
    run = build(compose.compose([*COMMON, *overrides], project=project.find()), project.find(), RunFolder(Path(tempfile.mkdtemp())))
    batches = TrainingBatches(run)
    train_step(run, next(batches))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(3):
        train_step(run, next(batches))
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters()) / 1024
    return (kibibytes("VmHWM") - before) / parameters, parameters / 1024


def print_all(work: dict[str, list[str]]) -> None:
    train = compose.compose([*COMMON, "model.width=4"], project=project.find())
    run = build(train, project.find(), RunFolder(Path(tempfile.mkdtemp())))
    train_step(run, next(TrainingBatches(run)))  # includes what torch loads and keeps in any training
    del run
    for name, overrides in work.items():
        peak, parameters = sizes(*overrides)
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {peak:.2f} sizes of the parameters ({parameters:.0f} MiB)", flush=True)


def main() -> None:
    run_two_ranks(__file__)
    subprocess.run([sys.executable, __file__], env={**os.environ, "ALONE": "1"}, check=True)


if __name__ == "__main__":
    if "RANK" in os.environ or "ALONE" in os.environ:
        print_all(IN_PAIRS if "RANK" in os.environ else ALONE)
    else:
        main()
