"""Time per step beside other runners that do the same work, as ratios to a hand-written loop within one run.

    make bench        or: python tests/benchmarks/bench_peers.py [--plot FILE] [--torchvision FOLDER]

All take turns in one process, so that whatever else the machine does meets each of them alike: the same samples, batch, model, optimizer and normalisation,
deterministic algorithms, one thread, the loss read at each step. Another runner trains in a thread of its own, which only goes on while it is its turn.
Peers that are not installed are left out: they come by the extra `bench`; torchvision's own script is in no package, only in its sources.
A ratio is the median over the turns; the range holds eight turns of ten.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import argparse
import copy
import functools
import importlib.util
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loops import MLP, Plain, hand_written, samewise
from torch.utils.data import DataLoader
from turns import Turns, advance, built, in_turns, leave, share_memory, show

from samewise.runner.data.keyed import KeyedDataset
from samewise.runner.training.run import Run
from samewise.runner.training.session import session

WORK = {
    "MLP 64-64-10, batch 32": (["model=mlp", "dataset=digits", "batch_size=32"], 200),
    "ResNet-18 of width 16 at 32 px, batch 32": (
        ["model=resnet18_small", "model.width=16", "dataset=generated_classification", "dataset.image_size=32", "dataset.samples=512", "batch_size=32"],
        10,
    ),
}
COMMON = ["transforms=images", "max_epochs=1000000", "optimizer.lr=0.01", "callbacks=[throughput,learning_rate]"]
OURS = {
    "samewise, no trace": ["trace.every_steps=0", "tracking=none"],
    "samewise": ["tracking=none"],
    "samewise, map-style data": ["tracking=none"],
    "samewise to MLflow": ["tracking=mlflow"],
}


def parts(run: Run) -> tuple[DataLoader, torch.nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
    """What a user of any runner writes: a loader, the model, its optimizer, and the normalisation of a batch."""
    model = copy.deepcopy(run.model).train()
    mean, deviation = (torch.tensor(list(run.config.dataset[name])).view(-1, 1, 1) for name in ("mean", "std"))
    loader = DataLoader(Plain(run), batch_size=run.batch_size, shuffle=True, drop_last=True)
    return loader, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), lambda images: (images.float() / 255 - mean) / deviation


def ignite(run: Run, stepped: Callable[[], None]) -> None:
    from ignite.engine import Engine, Events

    loader, model, optimizer, normalised = parts(run)

    def update(_engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(normalised(batch[0])), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    trainer.logger.setLevel(logging.CRITICAL)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, stepped)
    trainer.run(loader, max_epochs=10**9)


def accelerate(run: Run, stepped: Callable[[], None]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader, model, optimizer, normalised = parts(run)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(normalised(images)), labels)
            accelerator.backward(loss)
            optimizer.step()
            loss.item()
            stepped()


def lightning(run: Run, stepped: Callable[[], None], *, mlflow: str = "") -> None:
    import lightning as L
    from lightning.pytorch.loggers import MLFlowLogger

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader, model, optimizer, normalised = parts(run)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(normalised(batch[0])), batch[1])
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            stepped()

    logger = MLFlowLogger("bench", tracking_uri=mlflow) if mlflow else False
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=-1, logger=logger, log_every_n_steps=1, **quiet)
    trainer.fit(Module(), loader)


def torchvision(run: Run, stepped: Callable[[], None], *, references: Path) -> None:
    """`train_one_epoch` of references/classification/train.py, which also computes the accuracy and keeps meters; what it prints is discarded."""
    sys.path.insert(0, str(references / "classification"))
    import train as script  # pyright: ignore[reportMissingImports]

    sys.path.pop(0)
    loader, model, optimizer, normalised = parts(run)

    class Stepping(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch
                stepped()

    class Normalising(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(normalised(images))

    batches = Stepping(loader.dataset, batch_size=run.batch_size, shuffle=True, drop_last=True)
    settings = argparse.Namespace(print_freq=10, clip_grad_norm=None)  # its defaults
    with open(os.devnull, "w") as nowhere:
        script.utils.print = functools.partial(print, file=nowhere)
        for epoch in range(10**9):
            script.train_one_epoch(Normalising(), torch.nn.CrossEntropyLoss(), optimizer, batches, torch.device("cpu"), epoch, settings)


def peers(store: str, references: Path | None) -> dict[str, Callable[[Run, Callable[[], None]], None]]:
    """The runners that are installed."""
    known = {
        "Ignite": ("ignite", ignite),
        "Accelerate": ("accelerate", accelerate),
        "Lightning": ("lightning", lightning),
        "Lightning to MLflow": ("lightning", functools.partial(lightning, mlflow=store)),
    }
    scripts = {"torchvision's train.py": functools.partial(torchvision, references=references)} if references else {}
    return {**{name: train for name, (package, train) in known.items() if importlib.util.find_spec(package)}, **scripts}


def measure(overrides: list[str], count: int, references: Path | None) -> dict[str, tuple[float, list[float]]]:
    """For each runner, milliseconds per step (median over the turns), and each turn's ratio to the hand-written loop."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        loops: dict[str, Callable[[int], None]] = {}
        runs = {}
        for name, own in OURS.items():
            run = runs[name] = built([*COMMON, *overrides, *own], folder / name.replace(" ", "_").replace(",", ""), models={"mlp": MLP})
            if "map-style" in name:
                run.splits["train"].keyed = KeyedDataset(Plain(run), run.recipe.collate, seed=run.seed, stream="sample")
            stack.enter_context(session(run))
            loops[name] = functools.partial(advance, samewise(run))
        plain = runs["samewise"]
        others = {name: Turns(functools.partial(train, plain)) for name, train in peers(f"sqlite:///{place}/peers.db", references).items()}
        loops = {"by hand": functools.partial(advance, hand_written(plain)), **{name: turns.take for name, turns in others.items()}, **loops}
        found = in_turns(loops, count)
        for turns in others.values():
            turns.end()
        for run in runs.values():
            leave(run)
    return found


def plot(file: Path, rows: dict[str, dict[str, tuple[float, list[float]]]]) -> None:
    """Draw the ratios as a bar chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 2.6 * len(rows)), layout="constrained")
    for axes, (work, found) in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows.items(), strict=True):
        names = list(found)[::-1]
        ratios = [statistics.median(found[name][1]) for name in names]
        axes.barh(names, ratios, color=["#3465a4" if name.startswith("samewise") else "#b0b0b0" for name in names])
        for place, ratio in enumerate(ratios):
            axes.text(ratio, place, f" {ratio:.2f}", va="center")
        axes.set_title(f"{work}: time per step, hand-written loop = 1", fontsize=10)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the ratios as a picture too (.svg, .png)")
    parser.add_argument("--torchvision", type=Path, metavar="FOLDER", help="measure torchvision's own script too: the folder `references` of its sources")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    share_memory()
    rows = {}
    for work, (overrides, count) in WORK.items():
        rows[work] = found = measure(overrides, count, args.torchvision)
        show(work, found)
    if args.plot:
        plot(args.plot, rows)


if __name__ == "__main__":
    main()
