"""Faults of the kind that only a CUDA device shows, planted in a user's recipe and transform, are found on any machine, with their line."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from pretended_cuda import Counts, DeviceError, written
from pretended_cuda.steps import counted

from samewise.runner.config.project import Project, find
from samewise.runner.errors import SamewiseError

SMALL = ("experiment=resnet18_digits", "model.width=4", "callbacks=none")
PLANTED = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from samewise.recipes.classification import Classification
    from samewise.runner.interfaces import Loss

    class Sound(Classification):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.head = nn.Linear(10, 10).requires_grad_(False)
            self.weights = torch.ones(10)

    class ReadsTheLoss(Sound):
        def loss(self, model, batch, phase):
            found = super().loss(model, batch, phase)
            self.last = found.total.item()  # FAULT ReadsTheLoss
            return found

    class ChoosesByMask(Sound):
        def loss(self, model, batch, phase):
            wanted = batch["label"] >= 0
            answers = model(batch["image"])[wanted]  # FAULT ChoosesByMask
            return Loss(F.cross_entropy(answers, batch["label"], reduction="sum"), count=len(wanted))

    class MakesANumberEachStep(Sound):
        def loss(self, model, batch, phase):
            found = super().loss(model, batch, phase)
            return Loss(found.total * torch.tensor([1.0], device=batch["label"].device)[0], count=found.count)  # FAULT MakesANumberEachStep

    class LeavesWeightsBehind(Sound):
        def loss(self, model, batch, phase):
            scores = model(batch["image"])
            return Loss(F.cross_entropy(scores, batch["label"], self.weights, reduction="sum"), count=len(scores))  # FAULT LeavesWeightsBehind

    class MovesNothing(Sound):
        def measure(self, model, batch):
            self.head(model(batch["image"]))  # FAULT MovesNothing

    class ReadsAsNumpy(Sound):
        def measure(self, model, batch):
            model(batch["image"]).numpy()  # FAULT ReadsAsNumpy

    class Brighter:
        def __call__(self, batch):
            return {**batch, "image": batch["image"] + torch.full((1, 1, 1), 0.1)}  # FAULT Brighter
    """


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A user's project with the planted faults."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "planted_lab.py").write_text(dedent(PLANTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield find(folder, packages=["planted_lab"])


@pytest.fixture(scope="module")
def sound(lab: Project, tmp_path_factory: pytest.TempPathFactory) -> written.Written:
    """The counts without a fault."""
    return written.plain(train(lab, tmp_path_factory.mktemp("sound"), "Sound"))


def place(fault: str) -> str:
    """The place of a fault, as the tool should name it."""
    line = next(number for number, text in enumerate(dedent(PLANTED).splitlines(), 1) if text.endswith(f"# FAULT {fault}"))
    return f"planted_lab.py:{line} ("


def train(lab: Project, folder: Path, recipe: str, *overrides: str) -> dict[str, Counts]:
    return counted([*SMALL, f"recipe._target_=planted_lab.{recipe}", *overrides], folder / "run", lab)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("ReadsTheLoss", {"waits": 1, "copies_out": 1, "blocking_copies_out": 1, "bytes_out": 4}),
        ("ChoosesByMask", {"waits": 2}),  # again in the backward pass
        ("MakesANumberEachStep", {"waits": 1, "copies_in": 1, "blocking_copies_in": 1, "bytes_in": 4}),
    ],
)
def test_a_line_that_makes_a_step_wait_or_copy_is_named(lab: Project, sound: written.Written, tmp_path: Path, fault: str, kinds: dict[str, int]):
    told = written.differences(sound, train(lab, tmp_path, fault))
    for kind, more in kinds.items():
        was = sum(sound["step"][kind].values())
        assert any(line.startswith(f"step: {kind} {was} -> {was + more} ") for line in told), told
    assert any(place(fault) in line for line in told), told


@pytest.mark.parametrize("fault", ["LeavesWeightsBehind", "MovesNothing", "ReadsAsNumpy"])
def test_a_tensor_of_a_recipe_on_the_wrong_device_is_named(lab: Project, tmp_path: Path, fault: str):
    with pytest.raises(SamewiseError) as raised:
        train(lab, tmp_path, fault)
    assert isinstance(raised.value.__cause__, DeviceError)
    assert place(fault) in str(raised.value.__cause__)
