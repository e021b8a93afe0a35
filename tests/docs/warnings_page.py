"""docs/warnings.md: the warnings of `check` and `train`, each with settings that cause it and with its text.

python tests/docs/warnings_page.py            print it
python tests/docs/warnings_page.py --write    write the page
"""

import contextlib
import io
import shlex
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "warnings.md"

HEAD = """# Warnings

If a setting would not have the effect that its name promises, there is an error or a warning.
`samewise check` and `samewise train` print warnings and continue; after a warning, `samewise check
--strict` exits with code 2. `python tests/docs/warnings_page.py --write` makes this page by running
each command; a test compares the page with their output.

| warning | reason |
|---|---|
"""

SMALL = "dataset=digits model=resnet20_cifar model.width=4 transforms=images max_epochs=2 device=cpu"

EMA = "callbacks=[default,ema] callbacks.ema."

OTHER = "experiment=resnet18_digits model=resnet18_small optimizer=adamw"

MIXUP = "transforms=imagenet_v2 transforms.size=8 transforms.eval_size=8 transforms.eval_resize=8"

WARNINGS: dict[str, tuple[str, str]] = {
    "A schedule longer than the training": ("training ends before the schedule does", "scheduler=warmup_cosine"),
    "A milestone after the end": ("the learning rate is never lowered", "scheduler=multi_step scheduler.milestones=[30]"),
    "A moving average that spans more than the training": ("it stays close to its first weights", f"{EMA}decay=0.99998 callbacks.ema.rescale=false"),
    "A moving average that is never updated": ("no step is averaged", f"{EMA}every_steps=1000"),
    "A schedule that follows a metric, and a single evaluation": ("the learning rate is never lowered", "scheduler=plateau evaluate.every_epochs=null"),
    "Early stopping with a single evaluation": ("that one is at the end", "callbacks=[default,early_stopping] evaluate.every_epochs=null"),
    "TF32 on the CPU": ("only CUDA devices support it", "precision=tf32"),
    "float16 on the CPU": ("most CPUs are slower with it, not faster", "precision=fp16"),
    "A layer that is never unfrozen": ("training ends first", "+param_groups.head={match:fc.*,frozen_until:5}"),
    "An option of the optimizer for frozen layers": ("what is frozen has no optimizer", "+param_groups.head={match:fc.*,frozen:true,lr:0.01}"),
    "A `max_steps` that is not reached": ("`max_epochs` ends training first", "max_steps=1000"),
    "Evaluations by steps and by epochs": ("the steps decide", "evaluate.every_steps=9 evaluate.every_epochs=2"),
    "Settings of another choice": ("an experiment file sets them for its own choice; another choice gets only those that it takes", OTHER),
    "A key that nothing reads": ("no value refers to it", "+dataset.licence=MIT"),
    "Transforms that decode on the device, without `dataset.decode=device`": (
        "the images are decoded already",
        "transforms=imagenet_on_device transforms.size=8 transforms.eval_resize=8",
    ),
    "Random transforms in evaluation": (
        "they alter what is measured; augmentation is for training",
        "transforms.eval.batch=[{_target_:samewise.datasets.transforms.numeric.ToFloat},{_target_:samewise.datasets.transforms.geometry.RandomHorizontalFlip}]",
    ),
    "MixUp or CutMix with one image in each micro-batch": ("images are mixed with others of their micro-batch", f"{MIXUP} batch_size=8 accumulate=8"),
    "A key that is set more than once": ("the last value is used", "optimizer.lr=0.1 optimizer.lr=0.2"),
}


def arguments(overrides: str) -> list[str]:
    """The overrides, after those of `SMALL` whose keys they do not set."""
    keys = {one.partition("=")[0] for one in overrides.split()}
    return [*(one for one in SMALL.split() if one.partition("=")[0] not in keys), *overrides.split()]


def warnings_of(overrides: str) -> list[str]:
    """The lines of the warnings that `samewise check` prints."""
    from samewise.runner.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["check", *arguments(overrides)])
    assert code == 0, (overrides, said.getvalue())
    # Without the table of layers, which comes last
    lines = said.getvalue().partition("\n  layer ")[0].splitlines()
    first = next((number for number, line in enumerate(lines) if "warning: " in line), len(lines))
    return [line.strip() if "warning: " in line else f"    {line.strip()}" for line in lines[first:]]


def page() -> str:
    """The whole page, for which every command is run."""
    table = "".join(f"| {what} | {why} |\n" for what, (why, _) in WARNINGS.items())
    table += "| `resume_from` with epochs of another length | the position in training is a number of steps, so training continues in a different epoch |\n"
    table += "| `resume_from` with a schedule made for another length | the learning rate jumps |\n"
    table += "| A data set with a method `set_epoch` | it is never called; what a sample draws differs from epoch to epoch anyway |\n"
    table += "| `train callbacks=a,b` | this is a sweep, with a run for each; `callbacks=[a,b]` is one run with both |\n"
    table += "| A metric that torchmetrics warns of | a class without evaluated samples makes it meaningless; reported once, when it is first computed |\n"
    table += "| `debug=...` with `initialise.weights` | the reduced run starts with random weights, since its model has other sizes |\n"
    blocks = []
    for what, (_, overrides) in WARNINGS.items():
        command = f"    $ samewise check {shlex.join(arguments(overrides))}"
        blocks.append("\n".join([f"## {what}\n", command, *(f"    {line}" for line in warnings_of(overrides)), ""]))
    return HEAD + table + "\n" + "\n".join(blocks)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
