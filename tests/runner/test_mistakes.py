"""Typical mistakes of newcomers: the error message says what to do, and its first line gives a hint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DIGITS = ("train", "experiment=resnet18_digits", "tracking=none", "device=cpu")
TINY = (*DIGITS, "debug=tiny")
FOLDER = ("train", "dataset=image_folder", "debug=tiny", "tracking=none", "device=cpu")

MISTAKES = {
    "a scheduler misspelt": ((*DIGITS, "scheduler=cosin"), "did you mean 'cosine'?"),
    "an experiment without its key": (("train", "resnet18_digits"), "experiment=resnet18_digits"),
    "an experiment's file": (("train", "experiment=mine/first.yaml"), "--config-dir mine"),
    "an option": ((*DIGITS, "--lr", "0.1"), "settings are written without dashes: optimizer.lr=0.1"),
    "the best run": (("runs", "--best"), "--sort valid/accuracy"),
    "--override": ((*DIGITS, "--override", "batch_size=3"), "settings are written without dashes"),
    "a command misspelt": (("trian",), "did you mean 'train'?"),
    "another tool's key": ((*DIGITS, "epochs=3"), "did you mean 'max_epochs'?"),
    "another tool's device": ((*DIGITS, "device=gpu"), "did you mean device=cuda?"),
    "another tool's folder": ((*DIGITS, "output_dir=out"), "did you mean run_root?"),
    "a list for a number": ((*DIGITS, "optimizer.lr=[0.1,0.2]"), "optimizer.lr=A,B, without brackets, trains with each"),
    "choices in brackets": (
        ("sweep", *DIGITS[1:], "optimizer=[adamw,sgd]"),
        "in a sweep values are separated by commas, without brackets: optimizer=adamw,sgd",
    ),
    "trackers in brackets": (("train", "tracking=[mlflow,wandb]"), "tracking.report_to=[mlflow,wandb]"),
    "values with a space": (("sweep", *DIGITS[1:], "optimizer.lr=0.1,", "0.2"), "write the values without spaces: optimizer.lr=0.1,0.2"),
    "a config's file": (("train", "runs/a/config.yaml"), "samewise train --config runs/a/config.yaml"),
    "a key without =": ((*DIGITS, "epochs"), "a value is written epochs=VALUE"),
    "a short option": (("train", "-e", "resnet18_digits"), "KEY=resnet18_digits"),
    "--resume": ((*DIGITS, "--resume"), "run the same command again without it"),
    "spaces around =": ((*DIGITS, "seed = 3"), "seed=3"),
    "a missing +": ((*DIGITS, "optimizer.amsgrad=true"), "write +optimizer.amsgrad=true to add it"),
    "a + too much": ((*DIGITS, "+callbacks=ema"), "without the +: callbacks=CHOICE"),
    "a word for a number": ((*DIGITS, "optimizer.lr=high"), "expected: a number"),
    "a batch that cannot be cut": ((*DIGITS, "batch_size=30", "replicas=4"), "batch_size=32"),
    "a batch larger than the data": ((*DIGITS, "batch_size=100000"), "loader.drop_last=false"),
    "a setting of another optimizer": ((*DIGITS, "optimizer=adam", "optimizer.momentum=0.8"), "remove it with ~optimizer.momentum"),
    "an element of a list removed": ((*DIGITS, "~transforms.train.sample.0"), "set the whole list: 'transforms.train.sample=[...]'"),
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
    "a metric's key misspelt": ((*DIGITS, "evaluate.moniter=valid/loss", "evaluate.mode=min"), "did you mean 'evaluate.monitor'?"),
    "one more metric": ((*DIGITS, "metrics=[recall]", "evaluate.monitor=valid/f1", "evaluate.mode=max"), "metrics=[recall,f1]"),
    "a list with a space": ((*DIGITS, "metrics=[f1,", "auroc]"), "quote it: 'metrics=[f1, auroc]'"),
    "letters outside of ASCII in a mapping": ((*DIGITS, "tracking.tags={owner: Zoë Åh, of: it}"), "quote what holds spaces, ,:{}[] or other than ASCII"),
    "a mapping with new keys": ((*DIGITS, "scheduler={_target_: samewise.runner.optim.schedules.Step, step_size: 3}"), "write '++scheduler={_target_"),
    "an own class over a choice": ((*DIGITS, "optimizer=adamw", "optimizer._target_=torch.optim.optimizer.Optimizer"), "remove it with ~optimizer.betas"),
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
    "override without a colon": (f"defaults:\n{CHOICES}  - override /scheduler cosine\n", "`- override /GROUP: CHOICE`"),
    "two choices in one entry": ("defaults:\n  - override /model: resnet20_cifar\n    override /dataset: digits\n", "begin each entry with a dash"),
    "a defaults list without dashes": ("defaults:\n  override /model: resnet20_cifar\n", "begin each entry with a dash: `- override /GROUP: CHOICE`"),
    "callbacks among the values": ("callbacks: [default, ema]\n", "as `- override /callbacks: [default, ema]`"),
    "a reference of words in another order": ("model:\n  num_classes: ${dataset.classes_num}\n", "did you mean 'dataset.num_classes'?"),
    "a list of choices": ("defaults:\n  - override /optimizer: [adamw, sgd]\n", "write `- override /optimizer: adamw`, or another of them"),
    "a group in the plural": ("defaults:\n  - override /models: resnet20_cifar\n", "did you mean 'model'?"),
}


@pytest.fixture
def here(here: Path) -> Path:
    """A folder that is empty except for one called runs."""
    (here / "runs").mkdir()
    return here


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
    done = samewise("check", "experiment=mine", "--config-dir", here, "--static", "tracking=none", "device=cpu", code=2)
    first = done.stderr.splitlines()[0]
    assert first.startswith(f"error: {here / 'experiment' / 'mine.yaml'}:"), done.stderr
    assert advice in first.partition("hint: ")[2], done.stderr
