"""ResNet-50 in bf16 at 224 pixels: samewise, strict and traced, beside loops by hand, the loop of torchvision's reference, and Lightning.

The baseline is a compiled loop that trains on one batch over and over and reads only its last loss. `--device cpu` tries the script.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from timing import Loop, Place, built, by_turns, measured, profiled, samewise
from torch.utils.data import DataLoader, Dataset

from samewise.runner.data.loading import MicroBatch
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run
from samewise.runner.training.same_bits.determinism import apply
from samewise.runner.training.session import session

WORKERS = min(14, len(os.sched_getaffinity(0)))
UNTRACED = ["trace.every_steps=0"]
BY_HAND = "by hand, compiled, not deterministic, one batch"


def sizes(place: Place) -> tuple[int, int]:
    """Pixels and batch."""
    return (32, 4) if place.small else (224, 128)


def model_of(place: Place) -> Any:
    """ResNet-50 with ten classes; ResNet-18 where the script is only tried."""
    made = torchvision.models.resnet18 if place.small else torchvision.models.resnet50
    return made(num_classes=10).to(place.device, memory_format=torch.channels_last)


def compiled(place: Place, mode: str = "default") -> list[str]:
    """The settings; none where the script is only tried, since compiling takes a minute and more there."""
    return [] if place.small else [f"compile={mode}"]


def run_of(place: Place, name: str, *own: str) -> Run:
    """A run whose session has begun."""
    size, batch = sizes(place)
    data = ["dataset=generated_classification", f"dataset.image_size={size}", f"dataset.samples={batch * 8}", "transforms=images"]
    settings = [
        *(f"model=resnet{18 if place.small else 50}", f"batch_size={batch}", "optimizer.lr=0.01", "precision=bf16", f"device={place.device}"),
        "memory_format=channels_last",
    ]
    run = built([*settings, *data, f"loader.num_workers={0 if place.small else WORKERS}", *own], place.folder / name)
    place.sessions.enter_context(session(run))
    return run


def by_hand(place: Place, *, deterministic: bool = False, compiles: bool = True) -> Loop:
    """One batch, uint8, over and over; SGD's fused kernel."""
    size, batch = sizes(place)
    model = model_of(place)
    if compiles and not place.small:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=place.device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=place.device)

    def prepare() -> None:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, False

    def steps() -> Iterator[None]:
        while True:
            optimizer.zero_grad()
            with torch.autocast(place.device, torch.bfloat16):
                loss = F.cross_entropy(model(images.float().div(255).sub(0.5)), labels)
            loss.backward()
            optimizer.step()
            yield

    return Loop(steps(), batch, prepare)


class Normalised(Dataset[tuple[torch.Tensor, int]]):
    """Images as the reference's workers make them: floats, normalised."""

    def __init__(self, place: Place) -> None:
        size, batch = sizes(place)
        self.images = torch.randint(0, 256, (batch * 8, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images) * 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)].float().div_(255).sub_(0.5).div_(0.205), index % 10


def loader_of(place: Place) -> DataLoader[Any]:
    workers = 0 if place.small else WORKERS
    return DataLoader(Normalised(place), sizes(place)[1], shuffle=False, num_workers=workers, pin_memory=not place.small, persistent_workers=workers > 0)


def reference(place: Place) -> Loop:
    """As torchvision's references/classification/train.py, `train_one_epoch` with --amp, in bf16 and channels_last: the loss and the accuracy are read
    at each step.
    """
    model = model_of(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def prepare() -> None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True

    def steps() -> Iterator[None]:
        for images, labels in loader_of(place):
            images, labels = images.to(place.device, memory_format=torch.channels_last), labels.to(place.device)
            with torch.autocast(place.device, torch.bfloat16):
                output = model(images)
                loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = output.topk(5).indices == labels[:, None]
            loss.item(), right[:, 0].sum().item(), right.sum().item()
            yield

    return Loop(steps(), sizes(place)[1], prepare)


def repeated(run: Run) -> Loop:
    """samewise's step on one batch that is on the device already: without loading and copying."""

    def steps() -> Iterator[None]:
        (first,) = next(TrainingBatches(run))
        assert first.sent is None or run.strategy.device.type == "cuda"
        held = first.sent() if first.sent else first.batch
        while True:
            run.recorder.record(train_step(run, [MicroBatch(first.number, first.batch, lambda: dict(held))]))
            yield

    return Loop(steps(), run.batch_size, lambda: apply(run.config.reproducibility))


def strict(place: Place) -> None:
    """The question: a compiled step, strict and traced, beside the loop by hand; and where the time goes."""
    graphs = {} if place.small else {"samewise, strict, traced, compiled, CUDA graphs": run_of(place, "graphs", *compiled(place), "compile.cuda_graphs=true")}
    runs = {"samewise, strict, traced, compiled": run_of(place, "compiled", *compiled(place)), **graphs}
    loops = {BY_HAND: by_hand(place), **{name: samewise(run) for name, run in runs.items()}}
    print(f"  ResNet-50, bf16, channels_last, {sizes(place)[0]} px, batch {sizes(place)[1]}, {WORKERS} workers", flush=True)
    ratios = by_turns(place, loops, 2 if place.small else 20, "images/s")
    best = sorted((name for name in runs if name in ratios), key=ratios.__getitem__)[-1:]
    for name in [one for one in (BY_HAND, *best) if one in ratios]:
        profiled(place, name, loops[name])


def costs(place: Place) -> None:
    """What determinism, the trace, and loading and copying take of a compiled step."""
    fixed, untraced = run_of(place, "fixed", *compiled(place)), run_of(place, "compiled_untraced", *compiled(place), *UNTRACED)
    loops = {
        BY_HAND: by_hand(place),
        "the same, deterministic": by_hand(place, deterministic=True),
        "samewise, strict, not traced, compiled": samewise(untraced),
        "samewise, strict, traced, compiled, one batch on the device": repeated(fixed),
    }
    by_turns(place, loops, 2 if place.small else 20, "images/s")


def settings(place: Place) -> None:
    """Without compiling, and with images made in the process that trains."""
    loops = {
        BY_HAND: by_hand(place),
        "by hand, not compiled, one batch": by_hand(place, compiles=False),
        "samewise, strict, traced": samewise(run_of(place, "strict")),
        "samewise, strict, not traced": samewise(run_of(place, "untraced", *UNTRACED)),
        "samewise, fast, not traced": samewise(run_of(place, "fast", "reproducibility=fast", *UNTRACED)),
        "samewise, strict, traced, compiled, no workers": samewise(run_of(place, "alone", *compiled(place), "loader.num_workers=0")),
        "torchvision's reference, bf16": reference(place),
    }
    by_turns(place, loops, 2 if place.small else 20, "images/s", turns=3)


def lightning(place: Place) -> None:
    """Lightning's Trainer on the compiled model, with its own defaults but for logging, from loader workers."""
    import lightning as L

    chunk, ends = 2 if place.small else 20, list[float]()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(place) if place.small else torch.compile(model_of(place))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(batch[0].to(memory_format=torch.channels_last)), batch[1])
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step % chunk == 0:
                place.wait()
                ends.append(time.perf_counter())

    torch.use_deterministic_algorithms(False)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    accelerator = "cpu" if place.small else "gpu"
    trainer = L.Trainer(accelerator=accelerator, devices=1, precision="bf16-mixed", max_steps=chunk * 6, **quiet)
    trainer.fit(Module(), loader_of(place))
    rates = [chunk * sizes(place)[1] / (after - before) for before, after in itertools.pairwise(ends)]
    print(f"    Lightning {L.__version__}, compiled, bf16-mixed: {statistics.median(rates):,.0f} images/s ({min(rates):,.0f}-{max(rates):,.0f})", flush=True)


def searched(place: Place) -> None:
    """compile=max, which takes long to compile, with CUDA graphs and without."""
    loops = {BY_HAND: by_hand(place), "samewise, strict, traced, compile=max": samewise(run_of(place, "max", *compiled(place, "max")))}
    if not place.small:
        loops["the same, CUDA graphs"] = samewise(run_of(place, "max_graphs", "compile=max", "compile.cuda_graphs=true"))
    by_turns(place, loops, 2 if place.small else 20, "images/s", turns=3)


PARTS: tuple[Callable[[Place], None], ...] = (strict, costs, settings, lightning, searched)

if __name__ == "__main__":
    measured(PARTS, __doc__)
