"""What `check` finds, in one report and before anything is built."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from samewise.runner.config.check import problems
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.training.cautions import data_cautions
from samewise.runner.training.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[2]
BARE = Project(ROOT)


def find_problems(*overrides: str) -> dict[str, Problem]:
    needed = [more for choice in overrides for more in NEEDED.get(choice, ())]
    composed = compose([*overrides, *needed], project=BARE, strict=False)
    return {problem.path: problem for problem in problems(composed, BARE)}


def test_the_default_config_has_no_problems() -> None:
    assert find_problems() == {}


CHOICES = sorted(f"{file.parent.relative_to(ROOT / 'configs')}={file.stem}" for file in (ROOT / "configs").glob("**/*.yaml") if file.parent != ROOT / "configs")
SMALL = {
    "retinanet_bccd": ("retinanet", "coco", "voc", "detection", "canvas", "bccd", "boxes"),
    "maskrcnn_digit_masks": ("maskrcnn", "instance", "coco_masks"),
    "fcn_digit_masks": ("segmentation", "mask", "fcn", "deeplab", "lraspp"),
    "wav2letter_spoken_digits": ("wav2letter", "speech", "librispeech", "yesno", "manifest", "utterances"),
    "conv_tasnet_spoken_digits": ("conv_tasnet", "mix", "separation"),
    "wavernn_spoken_digits": ("wavernn", "ljspeech", "libritts", "vocoder", "recordings"),
    "gan_digits": ("gan", "adversarial"),
    "autoencoder_digits": ("autoencoder", "vae"),
    "linear_diabetes": ("regression", "mlp", "number", "diabetes", "pearson", "spearman", "mape"),
    "gpt_unicode_names": ("language", "text_files", "unicode_names"),
    "transformer_unicode_categories": ("text", "bert", "unicode_categories"),
    "audio_classification_spoken_digits": ("audio", "labelled_recordings", "sounds", "spectrogram"),
}
"""An experiment of each recipe, and words in the names of the choices that may fit it."""

ANYWHERE = (
    *("optimizer", "scheduler", "param_groups", "initialise", "precision", "strategy", "callbacks"),
    *("checkpoint", "tracking", "reproducibility", "launcher", "sweeper"),
)
"""Groups whose choices fit any experiment, and therefore each other: composed together, one of each group at a time."""
NEEDED = {
    "model=timm": ["model.name=resnet10t"],
    "dataset=number_table": ["dataset.features=[height]", "dataset.targets=[weight]"],
    "sweeper=optuna": ["sweeper.sampler=random"],
}
"""What a choice requires in addition."""
OF_GROUPS = [[choice for choice in CHOICES if choice.startswith(f"{group}=")] for group in ANYWHERE]
TOGETHER = [list(filter(None, row)) for row in itertools.zip_longest(*OF_GROUPS)]


@pytest.mark.parametrize("choices", TOGETHER, ids=" ".join)
def test_every_choice_that_fits_any_experiment_has_no_problems(choices: list[str]) -> None:
    if find_problems(*choices):  # they may not fit each other
        assert not {choice: problems for choice in choices if (problems := find_problems(choice))}


@pytest.mark.slow  # tests/kept composes all experiments
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(choice, marks=[pytest.mark.long] * bool(number % 3))
        for number, choice in enumerate(choice for choice in CHOICES if choice.partition("=")[0] not in ANYWHERE)
    ],
)
def test_every_choice_has_no_problems_in_an_experiment_that_it_fits(choice: str) -> None:
    """A data set of speech has no number of classes to give an image classifier: it fits another recipe's experiment."""
    group, name = choice.split("=")
    likely = [experiment for experiment, words in SMALL.items() if group != "experiment" and any(word in name for word in words)]
    told: list[list[Problem]] = []
    for base in dict.fromkeys([*likely, None, *SMALL]):
        composed = compose([*([f"experiment={base}"] if base else []), choice, *NEEDED.get(choice, [])], project=BARE, strict=False)
        told.append(problems(composed, BARE))
        if not told[-1]:
            assert composed.choices[group] == name
            return
    raise AssertionError(told)


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["batch_size=0"], "batch_size", "at least 1"),
        (["clip_norm=-1"], "clip_norm", "positive"),
        (["seed=99999999999999999999"], "seed", "too large"),
        (["optimizer=adamw", "optimizer.betas=[0.9,1.5]"], "optimizer.betas.1", "less than 1"),
        (["evaluate.monitor=valid/accuracy", "evaluate.mode=min"], "evaluate.mode", "max"),
        (["name=../elsewhere"], "name", "folder"),
        (["+fo=1"], "fo", "no such key"),
        (["~seed"], "seed", "set another value: seed=VALUE"),
        (["~loader"], "loader", "set another value: loader.KEY=VALUE"),
        (["~activation_checkpointing"], "activation_checkpointing", "activation_checkpointing=VALUE\n    expected: a list, each a string"),
        (["callbacks=ema", "~callbacks.ema.decay"], "callbacks.ema.decay", "is null, has another value or does not exist"),
        (["~optimizer.lr=7"], "optimizer.lr", "is null, has another value or does not exist"),
        (["++dataset.num_classes=???"], "dataset.num_classes", "must be given"),
        (["~strategy"], "strategy", "must be given; hint: strategy=CHOICE"),
        (["order=mixed"], "loader.order.weights", "must be given; hint: loader.order.weights={train: 3, train_b: 1}"),
        (["+reproducibility.variables.PYTHONPATH=x"], "reproducibility.variables.PYTHONPATH", "may not set"),
        (["reproducibility.benchmark=true"], "reproducibility.benchmark", "reproducibility=fast"),
        (["reproducibility.level=loose"], "reproducibility.level", "strict"),
        (["model._target_=os.system"], "model._target_", "outside the packages"),
        (
            ["scheduler._target_=torch.optim.lr_scheduler.StepLR"],
            "scheduler._target_",
            "scheduler=torch scheduler.scheduler._target_=torch.optim.lr_scheduler.StepLR",
        ),
        (["callbacks.progress._target_=samewise.runner.callbacks.progres.Progress"], "callbacks.progress._target_", "does not exist"),
        (["+model.num_clases=3"], "model.num_clases", "did you mean 'num_classes'?"),
        (["model=resnet18", "+model.weights=IMAGENET1K_V9"], "model.weights", "IMAGENET1K_V1"),
        (["transforms.train.batch.1.mean=0.5"], "transforms.train.batch.1.mean", "Sequence[float]"),
        (["optimizer._partial_=false"], "optimizer.params", "needs this argument"),
        (["loader.order={_target_: samewise.runner.data.order.First, samples: 8}"], "loader.order", "lacks _partial_: true"),
        (["~dataset.valid"], "dataset.valid", "not a component"),
        (["run_root=/proc/runs"], "run_root", "cannot write"),
    ],
)
def test_each_problem_is_found_at_its_path(overrides: list[str], path: str, words: str) -> None:
    told = find_problems(*overrides)
    assert words in str(told[path]), told


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Overrides for torchvision's ImageFolder: six images of each of three classes for training, `valid` left to be made."""
    for number, kind in enumerate(["bird", "cat", "dog"] * 6):
        (tmp_path / "train" / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "train" / kind / f"{number}.png")
    split = "{{_target_:torchvision.datasets.ImageFolder,root:{}}}"
    made = [text for name in ("train", "valid") for text in (f"~dataset.{name}", f"+dataset.{name}=" + split.format(tmp_path / name))]
    small = ["model=resnet18_small", "model.width=4", "dataset.num_classes=3", "dataset.channels=3", "dataset.mean=[0,0,0]", "dataset.std=[1,1,1]"]
    rest = ["transforms=images", "batch_size=4", "max_steps=2", "evaluate.pictures=false", "tracking=none", "device=cpu", f"run_root={tmp_path / 'runs'}"]
    return ["experiment=resnet18_digits", *small, *rest, *made]


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("kinds", [["bird", "cat", "dog"], ["bird", "cat"], ["cat", "dog"]])
def test_a_split_that_numbers_classes_otherwise_is_refused(
    kinds: list[str], command: str, folders: list[str], samewise: Callable[..., Any], tmp_path: Path
) -> None:
    for kind in kinds:
        shutil.copytree(tmp_path / "train" / kind, tmp_path / "valid" / kind)
    done = samewise(command, *folders)
    if kinds[0] == "bird":  # `bird, cat` have the same numbers without `dog`
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    words = "numbers its classes differently from dataset.train: label 0 is 'cat' here, and 'bird' there; hint: "
    assert f"error: dataset.valid: {words}" in done.stderr
    assert "'cat, dog'" in done.stderr
    assert "expected: bird, cat, dog" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_data_set_that_expects_to_be_told_the_epoch_is_warned_about() -> None:
    class Shuffled(list[int]):
        def set_epoch(self, epoch: int) -> None: ...

    (told,) = data_cautions(SimpleNamespace(dataset=Shuffled([1])))
    assert (told.path, told.message) == ("dataset.train", "Shuffled.set_epoch is never called")
    assert not data_cautions(SimpleNamespace(dataset=[1]))


NOT_POSITIVE = {
    "a number of classes of the data": (["dataset.num_classes=-2"], "dataset.num_classes: must be at least 1"),
    "a size that a transform refers to": (["transforms=cifar", "transforms.size=0"], "transforms.size: is not a valid size"),
}


@pytest.mark.parametrize("kind", NOT_POSITIVE)
def test_a_size_that_is_not_positive_is_named_first(kind: str) -> None:
    overrides, words = NOT_POSITIVE[kind]
    with pytest.raises(ConfigError) as caught:
        dry_run(compose([*overrides, "debug=tiny", "tracking=none", "device=cpu"], project=BARE), BARE)
    assert str(caught.value).startswith(words)
