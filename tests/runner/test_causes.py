"""The first line of a message names the cause of a mistake, not its consequence."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise import train
from samewise.runner.errors import SamewiseError

OF_MODELS = {
    "lab.tdnn.TDNN": ("TDNN failed", "raised at "),
    "lab.tdnn.Mute": ("does not return one row of logits", "its forward returns nothing: is the `return` missing?"),
    "tdnn.TDNN": ("outside the packages", "--package tdnn"),
}

TDNN = """
import torch

class TDNN(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        self.head = torch.nn.Linear(64, num_classes)

class Mute(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, num_classes)

    def forward(self, images):
        self.head(images.flatten(1))
"""


@pytest.mark.parametrize("target", OF_MODELS)
def test_a_mistake_in_a_users_model_is_named(target: str, here: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    message, hint = OF_MODELS[target]
    (here / "lab").mkdir()
    (here / "lab" / "__init__.py").touch()
    (here / "lab" / "tdnn.py").write_text(TDNN)
    (here / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab"]\n')
    monkeypatch.syspath_prepend(str(here))
    given = ["dataset=digits", f"model={{_target_:{target},num_classes:10}}", "~model.shortcut", "~model.in_channels", "~model.width"]
    first = samewise("check", *given, "tracking=none", "debug=tiny", "device=cpu").stderr.splitlines()[0]
    assert message in first
    assert hint in first.partition("hint: ")[2]


STEPS = """
import torch
from samewise.runner.interfaces import Loss, Recipe, Scores

class Marks(torch.utils.data.Dataset):
    def __init__(self, *, unknown=None, broken=None):
        self.unknown, self.broken = unknown, broken

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self.broken:
            raise KeyError("missing")
        return {"image": torch.full((1, 8, 8), index / 40), "number": torch.tensor(12 if index == self.unknown else 1)}

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, images):
        return super().forward(images.flatten(1))

class Numbers(Recipe):
    def __init__(self, *, kind="loss"):
        self.kind = kind

    def loss(self, model, batch, phase):
        total = torch.nn.functional.cross_entropy(model(batch["image"]), batch["number"], reduction="sum")
        if self.kind == "fails" and batch["image"][0, 0, 0, 0] > 0.5:
            raise KeyError("hue")
        return total if self.kind == "tensor" else Loss(total, count=8)

    def measure(self, model, batch):
        if batch["image"][0, 0, 0, 0] >= {"measures": 0.5, "rehearses": 0.0}.get(self.kind, 1.0):
            raise ValueError("not measured")
        return len(model(batch["image"]))

    def scores(self, dataset):
        return Count()

class Count(Scores):
    def add(self, measured):
        pass

    def compute(self):
        return {"accuracy": 1.0}
"""


@pytest.fixture
def steps(here: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]) -> Callable[..., str]:
    """Trains five steps with a data set, model and recipe of the user's; returns the error, or what is printed."""
    (here / "steps_lab.py").write_text(STEPS)
    (here / "pyproject.toml").write_text('[tool.samewise]\npackages = ["steps_lab"]\n')
    monkeypatch.syspath_prepend(str(here))
    data = "{_target_:steps_lab.Marks,unknown:%s}"
    given = ["dataset=digits", "~model", "+model={_target_:steps_lab.Net}", "tracking=none", "callbacks=none", "device=cpu", "evaluate.monitor=valid/accuracy"]
    given += ["transforms=none", "loader.shuffle=false", "batch_size=8", "max_epochs=1", "~dataset.valid", "+dataset.valid=" + data % "null"]

    def of(kind: str, unknown: str = "null") -> list[str]:
        return [*given, "~recipe", f"+recipe={{_target_:steps_lab.Numbers,kind:{kind}}}", "~dataset.train", "+dataset.train=" + data % unknown]

    def train(kind: str, unknown: str = "null", code: int = 1) -> str:
        done = samewise("train", *of(kind, unknown))
        assert done.returncode == code, done.stderr
        return done.stderr[done.stderr.index("error:") :] if code else done.stdout

    train.given = of  # pyright: ignore
    return train


@pytest.mark.parametrize(("sample", "step", "code"), [("3", "", 2), ("19", "step 3: ", 1)])
def test_a_label_without_a_class_is_named_with_its_step_sample_and_line(steps: Callable[..., str], sample: str, step: str, code: int) -> None:
    said = steps("loss", sample, code)
    words = f"{step}the data has the label 12 (sample {sample}, number), but the model has no class for it"
    assert said.startswith(f"error: dataset.num_classes: {words}; hint: raised at ")
    assert "steps_lab.py:" in said
    assert "at least 13" in said


@pytest.mark.parametrize(("kind", "fault"), [("fails", "hue"), ("measures", "not measured"), ("rehearses", "not measured")])
def test_training_that_fails_leaves_no_workers(steps: Callable[..., str], kind: str, fault: str) -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(SamewiseError, match=fault) as caught:  # its traceback holds the loop's frames
        train(*steps.given(kind), "loader.num_workers=2", "evaluate.batch_size=8")
    assert caught.tb is not None
    assert not set(multiprocessing.active_children()) - others


def test_an_error_in_a_later_step_names_the_step_and_the_users_line(steps: Callable[..., str]) -> None:
    said = steps("fails")
    assert said.startswith("error: step 4: KeyError: 'hue'; hint: raised at ")
    assert "steps_lab.py:" in said


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("sample", [19, 20])  # of 40; the fingerprint looks at 19
def test_an_error_in_any_sample_names_the_split_the_sample_and_the_users_line(
    sample: int, split: str, workers: int, steps: Callable[..., str], samewise: Callable[..., Any]
) -> None:
    broken = [f"~dataset.{split}", f"+dataset.{split}={{_target_:steps_lab.Marks,broken:{sample}}}", f"loader.num_workers={workers}"]
    done = samewise("train", *steps.given("loss"), *broken)  # pyright: ignore
    assert f"error: dataset.{split}: Marks fails at sample {sample}: KeyError: 'missing'; hint: raised at " in done.stderr
    assert 'raise KeyError("missing")' in done.stderr


@pytest.mark.parametrize(
    ("root", "first"),
    [
        ("../blod", "error: dataset.root: this folder does not exist; hint: did you mean ../blood?"),
        ("../nowhere/blood", "error: dataset.root: this folder does not exist; hint: set dataset.root=FOLDER"),
    ],
)
def test_a_wrong_data_root_is_reported_with_a_hint(root: str, first: str, here: Path, samewise: Callable[..., Any]) -> None:
    for folder in ("JPEGImages", "Annotations"):
        (here / "blood" / folder).mkdir(parents=True)
    (here / "lab").mkdir()
    os.chdir(here / "lab")
    given = ["dataset.images_dir=JPEGImages", "dataset.annotations_dir=Annotations", "recipe=detection", "model=retinanet_resnet18", "transforms=detection"]
    done = samewise("check", "dataset=voc_folder", *given, f"dataset.root={root}", "tracking=none", "device=cpu")
    assert done.stderr.splitlines()[0] == first, done.stderr
