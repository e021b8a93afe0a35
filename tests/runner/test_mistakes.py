"""Typical mistakes of newcomers: the error message says what to do, and its first line gives a hint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

DIGITS = ("train", "experiment=resnet18_digits", "tracking=none", "device=cpu")
TINY = (*DIGITS, "debug=tiny")
FOLDER = ("train", "dataset=image_folder", "debug=tiny", "tracking=none", "device=cpu")

MISTAKES = {
    "a model with a hyphen": ((*DIGITS, "model=resnet-18"), "did you mean 'resnet18'?"),
    "a scheduler misspelt": ((*DIGITS, "scheduler=cosin"), "did you mean 'cosine'?"),
    "an experiment without its key": (("train", "resnet18_digits"), "experiment=resnet18_digits"),
    "an experiment misspelt": (("train", "experiment=resnet_digits"), "did you mean 'resnet18_digits'?"),
    "an experiment's file": (("train", "experiment=mine/first.yaml"), "--config-dir mine"),
    "a word for a key": (("train", "experiment", "resnet18_digits"), "write experiment=VALUE, without spaces around the ="),
    "an option": ((*DIGITS, "--lr", "0.1"), "settings are written without dashes: optimizer.lr=0.1"),
    "an option of another name": ((*DIGITS, "--epochs", "3"), "settings are written without dashes: max_epochs=3"),
    "the best run": (("runs", "--best"), "--sort valid/accuracy"),
    "--override": ((*DIGITS, "--override", "batch_size=3"), "settings are written without dashes"),
    "a command misspelt": (("trian",), "did you mean 'train'?"),
    "a short key": ((*DIGITS, "lr=0.1"), "did you mean 'optimizer.lr'?"),
    "another tool's key": ((*DIGITS, "epochs=3"), "did you mean 'max_epochs'?"),
    "another tool's key for the device": ((*DIGITS, "gpu=1"), "did you mean device=cuda?"),
    "another tool's device": ((*DIGITS, "device=gpu"), "did you mean device=cuda?"),
    "another tool's precision": ((*DIGITS, "precision=amp"), "did you mean precision=bf16 or precision=fp16?"),
    "another tool's weights": ((*DIGITS, "model.pretrained=true"), "did you mean initialise.weights=torchvision:IMAGENET1K_V1"),
    "another tool's loss": ((*DIGITS, "loss=ce"), "did you mean loss=cross_entropy?"),
    "an absolute error": ((*DIGITS, "loss=mae"), "did you mean loss=l1?"),
    "another tool's scheduler": ((*DIGITS, "scheduler=CosineAnnealingLR"), "did you mean scheduler=cosine?"),
    "a device by its number": ((*DIGITS, "device=0"), "did you mean device=cuda?"),
    "bits for a precision": ((*DIGITS, "precision=32"), "did you mean precision=fp32?"),
    "another tool's clipping": ((*DIGITS, "gradient_clip_val=1.0"), "did you mean clip_norm?"),
    "a short word": ((*DIGITS, "bs=32"), "did you mean batch_size?"),
    "another tool's folder": ((*DIGITS, "output_dir=out"), "did you mean run_root?"),
    "what only Hydra has": ((*DIGITS, "verbose=1"), "`samewise show` lists the keys"),
    "a callback's setting": ((*DIGITS, "patience=3"), "callbacks=[default,early_stopping] callbacks.early_stopping.patience=NUMBER"),
    "a tracker as a switch": ((*DIGITS, "wandb=true"), "did you mean tracking=wandb?"),
    "processes without a strategy": ((*DIGITS, "nproc=2"), "did you mean strategy=ddp strategy.nproc=NUMBER?"),
    "a list for a number": ((*DIGITS, "optimizer.lr=[0.1,0.2]"), "optimizer.lr=A,B, without brackets, trains with each"),
    "choices in brackets": (
        ("sweep", *DIGITS[1:], "optimizer=[adamw,sgd]"),
        "in a sweep values are separated by commas, without brackets: optimizer=adamw,sgd",
    ),
    "choices in brackets for one training": ((*DIGITS, "model=[resnet18,resnet50]"), "takes one choice, not a list of several"),
    "trackers in brackets": (("train", "tracking=[mlflow,wandb]"), "tracking.report_to=[mlflow,wandb]"),
    "values with a space": (("sweep", *DIGITS[1:], "optimizer.lr=0.1,", "0.2"), "write the values without spaces: optimizer.lr=0.1,0.2"),
    "values with a space before the comma": ((*DIGITS, "seed=1", ",2,", "3"), "write the values without spaces: seed=1,2,3"),
    "a comma at the end": ((*DIGITS, "batch_size=32,"), "batch_size=32"),
    "a config's file": (("train", "runs/a/config.yaml"), "samewise train --config runs/a/config.yaml"),
    "a key without =": ((*DIGITS, "epochs"), "did you mean max_epochs=VALUE?"),
    "a short option": (("train", "-e", "resnet18_digits"), "KEY=resnet18_digits"),
    "--resume": ((*DIGITS, "--resume"), "run the same command again without it"),
    "a command that there is not": (("resume", "3f2a"), "resumes where the run was stopped"),
    "no scheduler": ((*DIGITS, "scheduler=none"), "did you mean scheduler=constant?"),
    "spaces around =": ((*DIGITS, "seed = 3"), "seed=3"),
    "a missing +": ((*DIGITS, "optimizer.amsgrad=true"), "write +optimizer.amsgrad=true to add it"),
    "a + too much": ((*DIGITS, "+callbacks=ema"), "without the +: callbacks=CHOICE"),
    "a fraction for a whole number": ((*DIGITS, "max_epochs=3.5"), "expected: a whole number"),
    "a word for a number": ((*DIGITS, "optimizer.lr=high"), "expected: a number"),
    "a batch that cannot be cut": ((*DIGITS, "batch_size=30", "replicas=4"), "batch_size=32"),
    "a batch larger than the data": ((*DIGITS, "batch_size=100000"), "loader.drop_last=false"),
    "a setting of another optimizer": ((*DIGITS, "optimizer=adam", "optimizer.momentum=0.8"), "remove it with ~optimizer.momentum"),
    "an argument that the model lacks": ((*DIGITS, "+model.depth=3"), "remove it with ~model.depth"),
    "an element of a list removed": ((*DIGITS, "~transforms.train.sample.0"), "set the whole list: 'transforms.train.sample=[...]'"),
    "an element after the last": ((*DIGITS, "transforms.train.sample.9._target_=x"), "set the whole list: 'transforms.train.sample=[...]'"),
    "an element added": ((*DIGITS, "+transforms.train.sample.9={p: 1}"), "set the whole list: 'transforms.train.sample=[...]'"),
    "an element by a name": ((*DIGITS, "transforms.train.sample.crop.p=1"), "set the whole list: 'transforms.train.sample=[...]'"),
    "another number of classes": ((*DIGITS, "model.num_classes=5"), "model.num_classes=${dataset.num_classes}"),
    "a metric misspelt": ((*DIGITS, "evaluate.monitor=valid/acc"), "did you mean 'valid/accuracy'?"),
    "a metric without its split": ((*DIGITS, "evaluate.monitor=accuracy"), "evaluate.monitor=valid/accuracy"),
    "weights that are not there": ((*DIGITS, "initialise.weights=/nowhere/x.pt"), "the folder /nowhere does not exist"),
    "weights by a run's fingerprint": ((*DIGITS, "initialise.weights=e6341f"), "write run:e6341f"),
    "weights by a model's name": ((*DIGITS, "initialise.weights=torchvision:resnet18"), "ResNet18_Weights.IMAGENET1K_V1"),
    "a folder for a data set": ((*DIGITS, "dataset=/data/cats"), "dataset=image_folder dataset.root=/data/cats"),
    "data that are not there": ((*FOLDER, "dataset.root=/nowhere"), "dataset.root=FOLDER"),
    "data that are not downloaded": (("train", "dataset=mnist", "debug=tiny", "tracking=none"), "dataset.download=true"),
    "recordings for an image model": (("train", "dataset=spoken_digits"), "transforms=none"),
    "transforms that leave bytes": ((*TINY, "transforms=none"), "such as transforms=images"),
    "grey images for a colour model": (("train", "dataset=digits", "model=resnet18", "debug=tiny", "tracking=none"), "model=resnet18_small"),
    "another number of channels": ((*DIGITS, "model.in_channels=3"), "hint: the model takes 3 channels, and the data have 1: model.in_channels=1"),
    "a metric that is not computed yet": ((*DIGITS, "evaluate.monitor=valid/f1", "evaluate.mode=max"), "metrics=[f1]"),
    "one more metric": ((*DIGITS, "metrics=[recall]", "evaluate.monitor=valid/f1", "evaluate.mode=max"), "metrics=[recall,f1]"),
    "a list with a space": ((*DIGITS, "metrics=[f1,", "auroc]"), "quote it: 'metrics=[f1, auroc]'"),
    "a letter outside of ASCII": ((*DIGITS, "name=über"), "quote them: 'name=\"über\"'"),
    "letters outside of ASCII in a mapping": ((*DIGITS, "tracking.tags={owner: Zoë Åh, of: it}"), "quote them: 'tracking.tags={owner: \"Zoë Åh\", of: it}'"),
    "a key with letters outside of ASCII": ((*DIGITS, "tracking.tags.größe=3"), "set it in a config file"),
    "a mapping with spaces": ((*DIGITS, "+param_groups.head={match:", "fc.*,", "lr:", "1.0}"), "quote it: '+param_groups.head={match: fc.*, lr: 1.0}'"),
    "a mapping with new keys": ((*DIGITS, "scheduler={_target_: samewise.runner.optim.schedules.Step, step_size: 3}"), "write '++scheduler={_target_"),
    "another optimizer's class": ((*DIGITS, "optimizer._target_=torch.optim.RMSprop"), "choose optimizer=rmsprop; in a file: `- override /optimizer: rmsprop`"),
    "an own class over a choice": ((*DIGITS, "optimizer=adamw", "optimizer._target_=torch.optim.optimizer.Optimizer"), "~optimizer.betas ~optimizer.eps"),
    "words in another order": ((*DIGITS, "model.num_classes=${dataset.classes_num}"), "did you mean 'dataset.num_classes'?"),
    "a run that is not there": (("eval", "0123456789ab"), "samewise train"),
    "no run": (("eval",), "`samewise eval --help`"),
    "a sweep that is not there": (("report", "mine"), "samewise sweep"),
    "a folder of runs for a run": (("eval", "runs"), "samewise runs"),
    "an unknown package": (("train", "model._target_=mymodels.Net"), "--package"),
}


CHOICES = "  - override /model: resnet20_cifar\n  - override /dataset: digits\n"

IN_FILES = {
    "a choice without override": ("defaults:\n  - /model: resnet20_cifar\n  - override /dataset: digits\n", "write `- override /model: resnet20_cifar`"),
    "choices without anything": ("defaults:\n  - model: resnet20_cifar\n  - _self_\n", "write `- override /model: resnet20_cifar`, with the slash"),
    "override without a slash": ("defaults:\n  - override model: resnet20_cifar\n", "write `- override /model: resnet20_cifar`, with the slash"),
    "override without a colon": (f"defaults:\n{CHOICES}  - override /scheduler cosine\n", "write `- override /scheduler: cosine`, with a colon"),
    "override with =": (f"defaults:\n{CHOICES}  - override /scheduler=cosine\n", "write `- override /scheduler: cosine`, with a colon"),
    "two choices in one entry": ("defaults:\n  - override /model: resnet20_cifar\n    override /dataset: digits\n", "begin each with a dash"),
    "a defaults list without dashes": ("defaults:\n  override /model: resnet20_cifar\n", "begin each entry with a dash: `- override /model: resnet20_cifar`"),
    "a data set among the values": ("dataset: digits\n", "move it into the list under `defaults:`, as `- override /dataset: digits`"),
    "an optimizer among the values": (f"defaults:\n{CHOICES}  - _self_\noptimizer: adamw\n", "as `- override /optimizer: adamw`"),
    "a loss among the values": ("loss: focal\n", "as `- override /loss: focal`"),
    "callbacks among the values": ("callbacks: [default, ema]\n", "as `- override /callbacks: [default, ema]`"),
    "another optimizer's class in a file": (
        "defaults:\n  - override /optimizer: adamw\n  - _self_\noptimizer:\n  _target_: torch.optim.SGD\n  momentum: 0.9\n",
        "in a file: `- override /optimizer: sgd`",
    ),
    "a reference of words in another order": ("model:\n  num_classes: ${dataset.classes_num}\n", "did you mean 'dataset.num_classes'?"),
    "a list of choices": ("defaults:\n  - override /optimizer: [adamw, sgd]\n", "write `- override /optimizer: adamw`, or another of them"),
    "a group in the plural": ("defaults:\n  - override /models: resnet20_cifar\n", "did you mean 'model'?"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is empty except for one called runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", MISTAKES)
def test_each_mistake_gets_advice_and_the_first_line_has_a_hint(kind: str, samewise: Callable[..., Any], here: Path) -> None:
    given, advice = MISTAKES[kind]
    done = samewise(*given)
    assert list((here / "runs").iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    first = lines[1] if lines[0].endswith("problems:") else lines[0]
    assert done.returncode == 2, done.stderr
    assert any(advice in line for line in lines if not line.startswith(("    value:", "    expected:"))), done.stderr
    assert "hint: " in first or "expected: " in first, done.stderr


@pytest.mark.parametrize("kind", IN_FILES)
def test_a_mistake_in_an_experiment_file_is_reported_with_its_line_and_advice(kind: str, samewise: Callable[..., Any], here: Path) -> None:
    text, advice = IN_FILES[kind]
    (here / "experiment").mkdir()
    (here / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    done = samewise("check", "experiment=mine", "--config-dir", here, "--static", "tracking=none", "device=cpu")
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first.startswith(f"error: {here / 'experiment' / 'mine.yaml'}:"), done.stderr
    assert advice in first.partition("hint: ")[2], done.stderr


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm2d(1), torch.nn.Linear(64, num_classes)

    def forward(self, images):
        return self.head(self.norm(images).flatten(1)[:, :63])  # mine
"""


def test_debug_ends_in_the_failed_forward_and_the_first_line_names_it(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from samewise.runner.cli import main

    (here / "lab").mkdir()
    (here / "lab" / "__init__.py").write_text(NET)
    (here / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab"]\n')
    monkeypatch.syspath_prepend(str(here))
    given = ["dataset=digits", "model={_target_:lab.Net,num_classes:10}", "~model.shortcut", "~model.in_channels", "~model.width"]
    assert main(["check", *given, "tracking=none", "debug=tiny", "device=cpu", "--debug"]) == 2
    traceback, _, told = capfd.readouterr().err.partition("\nerror: ")
    assert "samewise.runner.errors.ConfigError" not in traceback  # the traceback ends with the underlying error
    assert traceback.rstrip().splitlines()[-1].startswith("RuntimeError: ")
    frames = [line for line in traceback.splitlines() if line.startswith("  File ")]
    assert [line for line in frames if "/torch/" not in line][-1].endswith("in forward")
    assert "in forward: return self.head(" in told.splitlines()[0]


def test_check_does_not_decode_a_data_set_that_training_keeps_in_memory(here: Path, samewise: Callable[..., Any]) -> None:
    from torchvision.io import write_png

    for split in ("train", "valid"):
        for label in "ab":
            (here / "data" / split / label).mkdir(parents=True)
            for number in range(80):
                write_png(torch.full((3, 32, 32), number, dtype=torch.uint8), str(here / "data" / split / label / f"{number}.png"))
    damaged = here / "data" / "train" / "b" / "77.png"  # neither used by the step nor read for the fingerprint
    damaged.write_bytes(damaged.read_bytes()[:40])
    given = ["dataset=image_folder", f"dataset.root={here / 'data'}", "dataset.num_classes=2", "dataset.cache=memory", "batch_size=2", "device=cpu"]
    done = samewise("check", *given, "model=resnet20_cifar", "model.width=2")
    assert done.returncode == 0, done.stderr


TRANSFORM = {
    "mixes": "{_target_:torchvision.transforms.v2.MixUp,num_classes:10}",
    "fails": "{_target_:torchvision.transforms.v2.RandomCrop,size:20}",
    "floats": "{_target_:samewise.datasets.transforms.numeric.ToFloat}",
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"sample=[{TRANSFORM['mixes']}]", "transforms.train.sample.0: MixUp mixes images of a batch, and is given one image; hint: transforms.train.batch"),
        (f"sample=[{TRANSFORM['fails']}]", "transforms.train.sample.0: RandomCrop fails at sample "),
        (
            f"batch=[{TRANSFORM['floats']},{TRANSFORM['mixes'].replace('10', '2')}]",
            "transforms.train.batch.1: MixUp fails in the first step: RuntimeError",
        ),
    ],
)
def test_a_transform_that_fails_is_named(given: str, said: str, samewise: Callable[..., Any], here: Path) -> None:
    key, value = given.split("=", 1)
    done = samewise("check", "dataset=digits", "model=resnet18_small", "model.width=4", "transforms=none", f"+transforms.train.{key}={value}", "device=cpu")
    assert (done.returncode, said in done.stderr + done.stdout) == (2, True), done.stderr + done.stdout
