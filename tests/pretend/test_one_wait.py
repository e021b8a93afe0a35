"""Faults in a step are named although nothing waits for the device before the end of the step."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from pretended_cuda import Counts, DeviceError, steps, written
from pretended_cuda.steps import counted
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project, find
from samewise.runner.errors import Interrupted, SamewiseError, TrainingError
from samewise.runner.records import on_device, trace_reader
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.session import session

STEP = ("debug=tiny", "device=cuda", "tracking=none", "loader.num_workers=0", "dataset.samples=16")


def test_every_recipe_waits_at_most_once_per_step_and_no_copy_blocks():
    for recipe, counts in written.read()["recipes"].items():
        step = counts["step"]
        assert sum(step["waits"].values()) <= 1, recipe
        assert not step["blocking_copies_in"], recipe
        assert not step["blocking_copies_out"], recipe


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", written.RECIPES)
def test_the_host_waits_for_a_real_device_at_most_once_per_step(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ready, synchronize = list[bool](), torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (ready.append(event.query()), synchronize(event)))
    project = Project(Path.cwd())
    run = build(compose([*written.RECIPES[recipe], *steps.ALONE], project=project), project, RunFolder(tmp_path))
    with suppress(Interrupted), session(run):
        batches = TrainingBatches(run)
        for _ in range(steps.STEADY):
            run.recorder.record(train_step(run, next(batches)))
        ready.clear()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, record_function("the whole step"):
            run.recorder.record(train_step(run, next(batches)))
        raise Interrupted("counted")
    events = profiled.events()
    assert events
    (step,) = (one.time_range for one in events if one.name == "the whole step" and one.device_type == DeviceType.CPU)
    inside = sorted((one.time_range.start, one.name) for one in events if step.start <= one.time_range.start <= step.end)
    calls = [name for _, name in inside]
    assert "cudaLaunchKernel" in calls
    assert ready
    assert ready.count(False) <= 1
    assert not [name for name in calls if "Pageable" in name or ("Synchronize" in name and name != "cudaEventSynchronize")]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("recipe", ["classification", "adversarial"])
def test_the_whole_step_is_launched_before_the_host_waits(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project = Project(Path.cwd())
    run = build(compose([*written.RECIPES[recipe], *STEP], project=project), project, RunFolder(tmp_path))
    launched, read, begin = list[str](), on_device.PendingTensor.read, run.recorder.trace.digest_weights
    for phase in run.phases:
        phase.optimizer.register_step_post_hook(lambda *_: launched.append("optimizer"))
    monkeypatch.setattr(run.recorder.trace, "digest_weights", lambda step: (begin(step), launched.append("digests")))
    monkeypatch.setattr(on_device.PendingTensor, "read", lambda pending: (launched.append("wait"), read(pending))[1])
    batches = TrainingBatches(run)
    train_step(run, next(batches))
    assert launched[: len(run.phases) + 2] == [*["optimizer"] * len(run.phases), "digests", "wait"]


@pytest.mark.usefixtures("device")
def test_a_gradient_that_is_not_finite_is_named_after_the_optimizer_was_launched(tmp_path: Path):
    project = Project(Path.cwd())
    run = build(compose([*written.RECIPES["classification"], *STEP], project=project), project, RunFolder(tmp_path))
    batches = TrainingBatches(run)
    with pytest.raises(TrainingError, match=r"step 2: the gradient of fc\.weight is not finite; the learning rate was 0\.028, "), session(run):  # noqa: PT012
        run.recorder.record(train_step(run, next(batches)))
        dict(run.model.named_parameters())["fc.weight"].register_hook(lambda gradient: gradient * torch.nan)
        train_step(run, next(batches))
    assert [line["step"] for line in trace_reader.read_trace(run.folder.trace)[1]] == [1]
    assert not list(run.folder.checkpoints.iterdir())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("phase", ["discriminator", "generator"])
def test_a_gradient_that_is_not_finite_is_named_in_each_phase(phase: str, tmp_path: Path):
    project = Project(Path.cwd())
    run = build(compose([*written.RECIPES["adversarial"], *STEP], project=project), project, RunFolder(tmp_path))
    run.recorder.trace.open(0, 0)
    name, spoilt = next((name, one) for name, one in run.model.named_parameters() if name.startswith(phase))
    spoilt.register_hook(lambda gradient: gradient * torch.nan)
    try:
        with pytest.raises(TrainingError, match=f"step 1: the gradient of {name} is not finite"):
            train_step(run, next(TrainingBatches(run)))
    finally:
        run.recorder.trace.close()


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
