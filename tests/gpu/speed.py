"""How fast a device trains with samewise: images and seconds of speech per second, and the cost of the promise. Part of `make gpu`.

Everything is measured in this process, by turns where two things are compared; a rate is the median over the turns.
"""

from __future__ import annotations

import os
import shutil
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import copy
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import photographs
import torch
import torch.nn.functional as F
import torchvision

from samewise.recipes.parts import ctc
from samewise.runner.config import compose, project
from samewise.runner.records import on_device
from samewise.runner.training.batches import training_batches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run
from samewise.runner.training.same_bits.determinism import apply
from samewise.runner.training.session import session

TURNS = 3
NOTHING = ["tracking=none", "callbacks=none", "checkpoint.every_epochs=null", "max_epochs=1000000"]


def built(overrides: list[str], place: Path) -> Run:
    own = project.find()
    composed = compose.compose([*NOTHING, *overrides, f"run_root={place}"], project=own)
    return build(composed, composed.project, composed.folder)


def steps(run: Run) -> Iterator[None]:
    batches = training_batches(run)
    while True:
        apply(run.config.reproducibility)
        run.recorder.record(train_step(run, next(batches)))
        yield


def compiled(run: Run) -> Iterator[None]:
    """A hand-written loop: the model compiled, bf16, nothing deterministic, and only the last loss read."""
    device = run.strategy.device
    torch.use_deterministic_algorithms(False)
    model = torch.compile(copy.deepcopy(run.model).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randint(0, 256, (run.batch_size, 3, *[run.config.dataset.image_size] * 2), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (run.batch_size,), device=device)
    while True:
        torch.use_deterministic_algorithms(False)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images.float().div(255).sub(0.5)), labels)
        loss.backward()
        optimizer.step()
        yield


def rate(loop: Iterator[None], count: int, samples: int, wait: Callable[[], None]) -> float:
    """Samples per second over a number of steps."""
    wait()
    began = time.perf_counter()
    for _ in range(count):
        next(loop)
    wait()
    return count * samples / (time.perf_counter() - began)


def compared(loops: dict[str, tuple[Iterator[None], int, int]], unit: str, wait: Callable[[], None]) -> None:
    """Print each loop's rate, and its ratio to the first one's at the same turn."""
    found: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, (loop, count, samples) in loops.items():
            spent = rate(loop, count, samples, wait)
            if turn:
                found[name].append(spent)
    first = next(iter(found.values()))
    for name, rates in found.items():
        ratio = statistics.median(one / base for one, base in zip(rates, first, strict=True))
        print(f"    {name:<60} {statistics.median(rates):>10,.0f} {unit} {ratio:>6.2f}", flush=True)


def images(device: str, place: Path, stack: ExitStack, wait: Callable[[], None]) -> bool:
    small = device == "cpu"
    size, batch = (32, 4) if small else (224, 128)
    data = [
        "dataset=generated_classification",
        f"dataset.image_size={size}",
        f"dataset.samples={batch * 40}",
        "transforms=images",
        f"loader.num_workers={0 if small else 8}",
    ]
    overrides = ["model=resnet50", *data, f"batch_size={batch}", "optimizer.lr=0.01", "precision=bf16", f"device={device}", "memory_format=channels_last"]
    settings = {
        "fast, no trace": ["reproducibility=fast", "trace.every_steps=0"],
        "strict, no trace": ["trace.every_steps=0"],
        "strict, a trace each step": [],
        "fast, compiled, no trace": ["reproducibility=fast", "trace.every_steps=0", "compile=default"],
    }
    runs = {name: built([*overrides, *own], place / name.replace(",", "").replace(" ", "_")) for name, own in settings.items()}
    loops: dict[str, tuple[Iterator[None], int, int]] = {}
    if not small:
        loops["a compiled loop by hand, not deterministic"] = compiled(next(iter(runs.values()))), 20, batch
    for name, run in runs.items():
        stack.enter_context(session(run))
        loops[name] = steps(run), 2 if small else 20, batch
    print(f"  ResNet-50, bf16, {size} px, batch {batch}: images a second, and as a ratio to the first row", flush=True)
    compared(loops, "images/s", wait)
    return True


def photographs_decoded(device: str, place: Path, stack: ExitStack, wait: Callable[[], None]) -> bool:
    """From JPEG files to the end of a step of ResNet-50, with a worker for each core."""
    small = device == "cpu"
    size, batch, files = (32, 8, (160, 120)) if small else (224, 128, (500, 375))
    folder = photographs.write(place / "photographs", count=16 if small else 256, size=files)
    workers = len(os.sched_getaffinity(0))
    given = [
        "model=resnet50",
        f"batch_size={batch}",
        "optimizer.lr=0.01",
        "precision=bf16",
        f"device={device}",
        "memory_format=channels_last",
        "trace.every_steps=0",
    ]
    loops: dict[str, tuple[Iterator[None], int, int]] = {}
    for name, decode, number in (
        ("decoded by the workers", "worker", workers),
        ("by the device", "device", workers),
        ("by the device, 2 workers", "device", 2),
    ):
        own = [*photographs.overrides(folder, size=size, decode=decode), f"loader.num_workers={number}"]
        run = built([*given, *own], place / f"{decode}_{number}_{len(loops)}")
        stack.enter_context(session(run))
        loops[name] = steps(run), 2 if small else 20, batch
    print(f"  ResNet-50 from JPEG files of {files[0]} x {files[1]} and more, {workers} workers: images a second, and as a ratio to the first row", flush=True)
    compared(loops, "images/s", wait)
    return True


BACKBONE = "BACKBONE"
"""Stands for a file of weights, which takes the place of the pretrained ones."""

PUBLISHED = {
    "RetinaNet, 800 x 1056 pixels": (
        ["experiment=retinanet_coco", "dataset=generated_detection", "model.weights_backbone=null"],
        [
            *("dataset.height=800", "dataset.width=1056"),
            *(f"initialise.weights={BACKBONE}", "initialise.into=backbone.body", "initialise.exclude=[fc.*]"),
        ],
        "images/s",
    ),
    "Wav2Letter, 15 s": (
        ["experiment=wav2letter_librispeech", "dataset=generated_speech_recognition"],
        ["dataset.characters=[180,200]", "dataset.samples=512"],
        "utterances/s",
    ),
    "ConvTasNet, 3 s": (["experiment=conv_tasnet_libri2mix", "dataset=generated_separation"], ["dataset.seconds=3"], "mixtures/s"),
    "WaveRNN, 1375 samples": (["experiment=wavernn_ljspeech", "dataset=generated_vocoder"], [], "clips/s"),
}
"""The published recipes on generated data of the sizes of theirs: the experiment, its sizes, and what is counted."""


def published(device: str, place: Path, stack: ExitStack, wait: Callable[[], None]) -> bool:
    """The published recipes in fp32, strict and fast; whether two strict trainings have the same weights."""
    small, good = device == "cpu", True
    backbone = torchvision.models.resnet50()
    backbone(torch.rand(2, 3, 64, 64))  # statistics that are not the initial ones, which RetinaNet would refuse to freeze
    torch.save(backbone.state_dict(), place / "backbone.pt")
    for name, (experiment, sizes, unit) in PUBLISHED.items():
        sizes = ["debug=tiny", "max_steps=null"] if small else [one.replace(BACKBONE, str(place / "backbone.pt")) for one in sizes]
        given = [*experiment, *sizes, f"device={device}", f"loader.num_workers={0 if small else 8}"]
        settings = {"fast, no trace": ["reproducibility=fast", "trace.every_steps=0"], "strict, a trace each step": [], "strict, once more": []}
        loops: dict[str, tuple[Iterator[None], int, int]] = {}
        runs: list[Run] = []
        for number, (setting, own) in enumerate(settings.items()):
            runs.append(built([*given, *own], place / f"published_{len(name)}_{number}"))
            stack.enter_context(session(runs[-1]))
            loops[setting] = steps(runs[-1]), 2, runs[-1].batch_size
        print(f"  {name}, batch {runs[-1].batch_size}, fp32: {unit}, and as a ratio to the first row", flush=True)
        compared(loops, unit, wait)
        one, other = (on_device.begin(list(run.model.state_dict().values()))() for run in runs[1:])
        print(f"    weights {'of the same bits' if one == other else 'DIFFER'} after {runs[-1].step} steps", flush=True)
        good = good and one == other
    return good


def losses(device: str, place: Path, stack: ExitStack, wait: Callable[[], None]) -> bool:
    """CTC for a batch of LibriSpeech's shape: 32 utterances, 750 frames, 29 labels, 200 letters."""
    frames, batch, letters = (60, 4, 20) if device == "cpu" else (750, 32, 200)
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, 29, frames, generator=drawn).to(device).requires_grad_()
    targets = torch.randint(1, 29, (batch, letters), generator=drawn).to(device)
    lengths, target_lengths = torch.full((batch,), frames, device=device), torch.full((batch,), letters, device=device)
    torch.use_deterministic_algorithms(True)
    digests = set()

    def loop() -> Iterator[None]:
        while True:
            ctc.negative_log_likelihood(logits.log_softmax(1), lengths, targets, target_lengths).sum().backward()
            digests.add(tuple(on_device.begin([logits.grad])()))
            logits.grad = None
            yield

    print(f"  CTC, {batch} utterances, {frames} frames, {letters} letters, forward and backward", flush=True)
    compared({"samewise": (loop(), 5, batch)}, "utterances/s", wait)
    print(f"    gradients {'the same bits each time' if len(digests) == 1 else f'DIFFER: {len(digests)} digests'}", flush=True)
    return len(digests) == 1


def digested(device: str, place: Path, stack: ExitStack, wait: Callable[[], None]) -> bool:
    """A digest of ResNet-50's weights on the device, compared with that of the same weights on the CPU."""
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=drawn) for size in (2_359_296, 2_048_000, 1_048_576, *[65_536] * 60)]
    there = [one.to(device) for one in weights]
    same = on_device.begin(there)() == on_device.begin(weights)()

    def loop() -> Iterator[None]:
        while True:
            on_device.begin(there)()
            yield

    size = sum(one.numel() * 4 for one in weights)
    print(f"  digests of {size / 1e6:.0f} MB: {'the same as the CPU computes' if same else 'OTHERS THAN THE CPU COMPUTES'}", flush=True)
    compared({"samewise": (loop(), 10, size // 10**6)}, "MB/s", wait)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    place, stack = Path(tempfile.mkdtemp(prefix="samewise-gpu-")), ExitStack()
    good = True
    for part in (digested, losses, images, published, photographs_decoded):
        try:
            good = part(device, place, stack, wait) and good
        except Exception:  # whatever happens in one part, the others are measured
            traceback.print_exc()
            good = False
    shutil.rmtree(place, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0 if good else 1)  # the sessions are not finished, and need not be: their workers would be waited for


if __name__ == "__main__":
    raise SystemExit(main())
