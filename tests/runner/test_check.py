"""What `check` finds, in one report and before anything is built; its summary by layers; and setups of any number of processes."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image
from samewise_tiny import DIGITS, QUIET, work_in_project
from torchvision.models import get_weight

from samewise.runner.config.check import problems
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.training import dry_run as trying
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
        composed = compose(
            [*([f"experiment={base}"] if base else []), choice, *(NEEDED | {"order=mixed": ["loader.order.weights={train: 1}"]}).get(choice, [])],
            project=BARE,
            strict=False,
        )
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
        (["order=repeated"], "loader.order.repeats", "must be given; hint: loader.order.repeats={train: 3, train_b: 1}"),
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


LAB = """
import torch

class Photos(torch.utils.data.Dataset):
    classes = [str(number) for number in range(1000)]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"image": torch.full((3, 224, 224), index / 4), "label": index}
"""
PHOTOS = [
    *(*QUIET, "device=cpu", "dataset=digits", "transforms=none", "batch_size=2", "max_steps=1", "dataset.num_classes=1000", "~model"),
    *("~dataset.train", "+dataset.train={_target_: lab_of_layers.Photos}", "~dataset.valid", "+dataset.valid={_target_: lab_of_layers.Photos}"),
]


@pytest.mark.parametrize("weights", ["ResNet50_Weights.IMAGENET1K_V1", pytest.param("ViT_B_32_Weights.IMAGENET1K_V1", marks=pytest.mark.slow)])
def test_a_summary_has_the_published_parameters_and_operations(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]
) -> None:
    work_in_project(tmp_path, monkeypatch, "lab_of_layers", LAB)
    published: dict[str, Any] = get_weight(weights).meta
    name = weights.partition("_Weights")[0].lower()
    given = [*PHOTOS, f"+model={{_target_: torchvision.models.{name}, num_classes: ${{dataset.num_classes}}}}"]
    done = samewise("check", *given, "--json", "--depth", 9, code=0)
    checked = json.loads(done.stdout)
    model, *inner = checked["layers"]
    assert checked["checkpoint"]["disk"] == pytest.approx(8 * published["num_params"], rel=0.002), "weights and momentum"
    assert model["name"] == ""
    assert model["output"] == [[2, 1000]]
    assert model["parameters"] == model["trained"] == published["num_params"]
    # torchvision counts a multiplication and an addition as one
    assert model["operations"] / 2e9 == pytest.approx(published["_ops"], abs=0.0006)
    # Those at the leaves are all there is, except what a model computes itself
    blocks = [layer for layer in inner if "." not in layer["name"]]
    assert sum(layer["operations"] for layer in blocks) == pytest.approx(model["operations"], rel=1e-6)
    assert sum(layer["parameters"] for layer in blocks) == pytest.approx(model["parameters"], rel=1e-3)


TINY = [*DIGITS, "model.width=4"]
MANY = ["replicas=512", "batch_size=512", "dataset.samples=512"]


def notes(samewise, *overrides: str) -> str:
    done = samewise("check", *TINY, *overrides, "--json", code=0)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    return "\n".join(json.loads(done.stdout)["notes"])


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (["strategy=elastic", "strategy.nproc=512"], ["512 processes", "rank 0 takes micro-batch 0, rank 511 micro-batch 511", "1 bucket"]),
        (["strategy=elastic", "strategy.nproc=128"], ["128 processes", "rank 0 takes micro-batches 0 to 3, rank 127 micro-batches 508 to 511"]),
        (["strategy=ddp", "clip_norm=1"], ["512 processes", "rank 511 micro-batch 511"]),
    ],
    ids=["elastic", "several replicas each", "ddp"],
)
def test_a_setup_of_512_ranks_is_tried_without_building_each(samewise, monkeypatch, strategy, told) -> None:
    built, build = list[object](), trying.build
    monkeypatch.setattr(trying, "build", lambda *given, **more: built.append(given) or build(*given, **more))
    said = notes(samewise, *MANY, *strategy)
    assert all(words in said for words in told), said
    assert len(built) == 1


def test_the_settings_and_cut_of_a_pipeline_are_checked(samewise) -> None:
    assert "2 processes" in notes(samewise, "strategy=pipeline", "accumulate=2")
    done = samewise("check", *TINY, "strategy=pipeline", "strategy.schedule=1f1b", code=2)
    assert "accumulate=2" in done.stderr


@pytest.mark.slow
def test_one_process_replays_what_512_ranks_would_compute(samewise, tmp_path) -> None:
    """test_any_number_of_ranks.py shows that one process computes what several do; this test shows that 512 are not too many for it."""
    model = ["model=resnet20_cifar", "model.depth=8", "model.width=2"]
    overrides = [*MANY, *model, "strategy=elastic", "max_steps=1", f"run_root={tmp_path}"]
    done = samewise("train", *TINY, *overrides, "--json", code=0)
    assert json.loads(done.stdout)["level"] == "R2"
