"""The published recipes and ResNet-50 on generated data of their sizes: the time and memory of a step by setting, beside a plain loop, and where it goes.

The plain loop has the recipe's own model, loss, transforms and optimizer, and batches that are loaded and copied ahead; it reads the loss at each step.
"""

import os
from collections.abc import Callable, Iterator

import torch
import torchvision
from timing import Loop, Place, built, by_turns, measured, profiled, samewise

from samewise.runner.records import on_device
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.run import Run
from samewise.runner.training.session import session

BACKBONE = "BACKBONE"
"""Stands for a file of weights, which takes the place of the pretrained ones."""
WORKERS = min(14, len(os.sched_getaffinity(0)))
PUBLISHED = {
    "classification": (
        "ResNet-50, 224 pixels, bf16",
        ["model=resnet50", "dataset=generated_classification", "transforms=images", "optimizer.lr=0.01"],
        ["dataset.image_size=224", "dataset.samples=1024", "batch_size=128", "precision=bf16", "memory_format=channels_last"],
    ),
    "detection": (
        "RetinaNet, 800 x 1056 pixels",
        ["experiment=retinanet_coco", "dataset=generated_detection", "model.weights_backbone=null"],
        [
            *("dataset.height=800", "dataset.width=1056", "replicas=1"),
            *(f"initialise.weights={BACKBONE}", "initialise.into=backbone.body", "initialise.exclude=[fc.*]"),
        ],
    ),
    "speech_recognition": (
        "Wav2Letter, 15 s",
        ["experiment=wav2letter_librispeech", "dataset=generated_speech_recognition"],
        ["dataset.characters=[180,200]", "dataset.samples=512", "replicas=1"],
    ),
    "separation": ("ConvTasNet, 3 s", ["experiment=conv_tasnet_libri2mix", "dataset=generated_separation"], ["dataset.seconds=3", "replicas=1"]),
    "vocoder": ("WaveRNN, 1375 samples", ["experiment=wavernn_ljspeech", "dataset=generated_vocoder"], ["replicas=1"]),
}
"""By recipe: a title, the experiment, and its sizes."""
UNCOMPILED = ("detection", "vocoder", "speech_recognition")
"""Recipes whose models torch.compile refuses, or would compile again for each length of a batch."""
FAST, UNTRACED = "reproducibility=fast", "trace.every_steps=0"
SETTINGS = {
    "samewise, fast, no trace": [FAST, UNTRACED],
    "samewise, strict, no trace": [UNTRACED],
    "samewise, strict, a trace each step": [],
    "the same, strategy=ddp, one process": ["strategy=ddp"],
    "the same, strategy=elastic, one process": ["strategy=elastic"],
}
COMPILED = {"samewise, fast, no trace, compiled": [FAST, UNTRACED, "compile=default"], "samewise, strict, a trace each step, compiled": ["compile=default"]}


def write_backbone(place: Place) -> str:
    """The file of a ResNet-50 whose statistics are not the initial ones, which RetinaNet would refuse to freeze."""
    backbone = torchvision.models.resnet50()
    backbone(torch.rand(2, 3, 64, 64))
    file = place.folder / "backbone.pt"
    torch.save(backbone.state_dict(), file)
    return str(file)


def plain(run: Run) -> Loop:
    """A loop by hand around the recipe's parts, which trains the run's model."""

    def prepare() -> None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True

    def steps() -> Iterator[None]:
        batches, (phase,) = TrainingBatches(run), run.phases
        for micro_batches in batches:
            run.schedule.before_step(run.step)
            phase.optimizer.zero_grad()
            for micro in micro_batches:
                batch = run.transforms["train"](micro.sent() if micro.sent else run.to_device(micro.batch))
                with run.precision.autocast():
                    loss = run.recipe.loss(run.model, batch, phase.spec)
                (loss.total / loss.count).backward()
            if phase.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(run.parameters, phase.clip_norm)
            phase.optimizer.step()
            batches.load_next()
            loss.total.item()
            yield

    return Loop(steps(), run.batch_size, prepare)


def recipe(place: Place, kind: str) -> bool:
    """One recipe's table and profile; whether two strict trainings had the same bits."""
    title, experiment, sizes = PUBLISHED[kind]
    sizes = ["debug=tiny", "max_steps=null", "replicas=1"] if place.small else [one.replace(BACKBONE, write_backbone(place)) for one in sizes]
    settings = {"a plain loop": [FAST], **SETTINGS, **({} if place.small or kind in UNCOMPILED else COMPILED)}
    loops, runs = dict[str, Loop](), dict[str, Run]()
    for number, (name, own) in enumerate(settings.items()):
        meet = [f"strategy.init_method=file://{place.folder}/{kind}_{number}"] if any("strategy" in one for one in own) else []
        given = [*experiment, *sizes, f"device={place.device}", f"loader.num_workers={0 if place.small else WORKERS}", *own, *meet]
        try:
            run = built(given, place.folder / f"{kind}_{number}_run")
            place.sessions.enter_context(session(run))
        except Exception as error:
            print(f"    {name:<58} cannot be built: {type(error).__name__}: {error}", flush=True)
            continue
        runs[name], loops[name] = run, (samewise if number else plain)(run)
    print(f"  {title}, batch {next(iter(runs.values())).batch_size}", flush=True)
    by_turns(place, loops, 2 if place.small else 4, "samples/s", turns=3)
    strict = [name for name in ("samewise, strict, no trace", "samewise, strict, a trace each step") if name in runs]
    digests = {tuple(on_device.begin(list(runs[name].model.state_dict().values()))()) for name in strict}
    print(f"    two strict trainings: {'the same bits' if len(digests) == 1 else 'OTHER BITS'} after {runs[strict[-1]].step} steps", flush=True)
    profiled(place, strict[-1], loops[strict[-1]], count=2, top=8)
    loops.clear()
    return len(digests) == 1


def parts() -> list[Callable[[Place], bool]]:
    def named(kind: str) -> Callable[[Place], bool]:
        def part(place: Place) -> bool:
            return recipe(place, kind)

        part.__name__ = kind
        return part

    return [named(kind) for kind in ("detection", "vocoder", "speech_recognition", "separation", "classification")]


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    measured(parts(), __doc__)
