"""How fast a device trains with samewise: images and seconds of speech per second, and the cost of the promise. Part of `make gpu`.

Everything is measured in this process, by turns where things are compared; a rate is the median over the turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import photographs
import resnet50
import torch
from timing import Loop, Place, built, by_turns, measured, samewise

from samewise.recipes.parts import ctc
from samewise.runner.records import on_device
from samewise.runner.training.session import session


def photographs_decoded(place: Place) -> None:
    """From JPEG files to the end of a step of ResNet-50, with a worker for each core."""
    size, batch, files = (32, 8, (160, 120)) if place.small else (224, 128, (500, 375))
    folder = photographs.write(place.folder / "photographs", count=16 if place.small else 256, size=files)
    workers = len(os.sched_getaffinity(0))
    given = [
        "model=resnet50",
        f"batch_size={batch}",
        "optimizer.lr=0.01",
        "precision=bf16",
        f"device={place.device}",
        "memory_format=channels_last",
        "trace.every_steps=0",
    ]
    loops = dict[str, Loop]()
    for name, decode, number in (
        ("decoded by the workers", "worker", workers),
        ("by the device", "device", workers),
        ("by the device, 2 workers", "device", 2),
    ):
        own = [*photographs.overrides(folder, size=size, decode=decode), f"loader.num_workers={number}"]
        run = built([*given, *own], place.folder / f"{decode}_{number}_{len(loops)}")
        place.sessions.enter_context(session(run))
        loops[name] = samewise(run)
    print(f"  ResNet-50 from JPEG files of {files[0]} x {files[1]} and more, {workers} workers: images a second, and as a ratio to the first row", flush=True)
    by_turns(place, loops, 2 if place.small else 20, "images/s", turns=3)


def losses(place: Place) -> bool:
    """CTC for a batch of LibriSpeech's shape: 32 utterances, 750 frames, 29 labels, 200 letters."""
    frames, batch, letters = (60, 4, 20) if place.small else (750, 32, 200)
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, 29, frames, generator=drawn).to(place.device).requires_grad_()
    targets = torch.randint(1, 29, (batch, letters), generator=drawn).to(place.device)
    lengths, target_lengths = torch.full((batch,), frames, device=place.device), torch.full((batch,), letters, device=place.device)
    torch.use_deterministic_algorithms(True)
    digests = set()

    def loop() -> Iterator[None]:
        while True:
            ctc.negative_log_likelihood(logits.log_softmax(1), lengths, targets, target_lengths).sum().backward()
            digests.add(tuple(on_device.begin([logits.grad])()))
            logits.grad = None
            yield

    print(f"  CTC, {batch} utterances, {frames} frames, {letters} letters, forward and backward", flush=True)
    by_turns(place, {"samewise": Loop(loop(), batch)}, 5, "utterances/s", turns=3)
    print(f"    gradients {'the same bits each time' if len(digests) == 1 else f'DIFFER: {len(digests)} digests'}", flush=True)
    return len(digests) == 1


def digested(place: Place) -> bool:
    """A digest of ResNet-50's weights on the device, compared with that of the same weights on the CPU."""
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=drawn) for size in (2_359_296, 2_048_000, 1_048_576, *[65_536] * 60)]
    there = [one.to(place.device) for one in weights]
    same = on_device.begin(there)() == on_device.begin(weights)()

    def loop() -> Iterator[None]:
        while True:
            on_device.begin(there)()
            yield

    size = sum(one.numel() * 4 for one in weights)
    print(f"  digests of {size / 1e6:.0f} MB: {'the same as the CPU computes' if same else 'OTHERS THAN THE CPU COMPUTES'}", flush=True)
    by_turns(place, {"samewise": Loop(loop(), size // 10**6)}, 10, "MB/s", turns=3)
    return same


if __name__ == "__main__":
    measured((digested, losses, resnet50.settings, photographs_decoded), __doc__)
