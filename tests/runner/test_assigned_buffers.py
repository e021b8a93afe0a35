"""A model whose forward pass assigns a new tensor to a buffer trains as in a plain loop, and as a model that changes its buffer in place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_jobs import run as run_ranks
from samewise_tiny import work_in_project
from torch import Tensor, nn

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.stages import StageParts
from samewise.runner.training.build import build

MODELS = """
import torch
from torch import nn

class Centred(nn.Module):
    kind = "assigned"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.BatchNorm1d(64), nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, images):
        x = self.body(self.norm(images.double().flatten(1)))
        if self.training:
            self.change(x.detach().mean(0))
        return self.head(x - 0.5 * self.centre + 0.1 * self.last)

    def change(self, mean):
        if self.kind == "assigned":
            self.last = self.centre
            self.centre = 0.7 * self.centre + 0.3 * mean
            self.seen = self.seen + 1
        else:
            self.last.copy_(self.centre)
            self.centre.mul_(0.7).add_(mean, alpha=0.3)
            self.seen.add_(1)

class InPlace(Centred):
    kind = "in place"

class OtherParameter(Centred):
    def change(self, mean):
        self.head.weight = nn.Parameter(0.9 * self.head.weight)

class OtherDtype(Centred):
    def change(self, mean):
        self.seen = self.seen + 0.5

class Expanded(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(8))

class Queue(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 8))

    def change(self, mean):
        self.queue = torch.cat([self.queue, mean[None].float()])

class Late(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def change(self, mean):
        self.mean = mean

class LateLayer(Centred):
    at = 3

    def change(self, mean):
        self.seen += 1
        if int(self.seen) == self.at:
            self.scale = nn.Linear(8, 2)

class Dropping(Centred):
    def change(self, mean):
        pass

    def forward(self, images):
        self.last = torch.zeros(8)
        x = super().forward(images)
        self.last = None
        return x
"""
GIVEN = [
    *("recipe=classification", "model=own", "dataset=digits", "transforms=images", "batch_size=32", "replicas=2", "accumulate=2", "max_steps=5", "device=cpu"),
    *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "scheduler=constant", "loader.shuffle=false", "evaluate.limit=1", "clip_norm=null"),
    *("tracking=none", "evaluate.pictures=false", "callbacks=[ema]", "checkpoint.every_steps=2", "--config-dir", "configs"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Makes a project with a model; returns the overrides of a training."""
    work_in_project(tmp_path, monkeypatch, "own", MODELS, {"model/own": ""})

    def make(name: str) -> list[str]:
        (tmp_path / "configs" / "model" / "own.yaml").write_text(f"# A model\n_target_: own.{name}\n")
        return GIVEN

    return make


def plainly(given: list[str]) -> dict[str, Tensor]:
    """The state after the same steps in a plain loop: each replica starts from the step's buffers, and the first one's are kept."""
    project = Project(Path.cwd(), packages=("own",), configs=(Path.cwd() / "configs",))
    made = build(compose(given[:-2], project=project), project, RunFolder(Path("plain")))
    model, data = made.model.train(), made.splits["train"].dataset
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        start, kept = {name: one.clone() for name, one in model.named_buffers()}, None
        for micro in range(4):
            if micro == 2:
                kept = {name: one.clone() for name, one in model.named_buffers()}
                model.load_state_dict(start, strict=False)
            batch = made.transforms["train"](data.batch(range(32 * step + 8 * micro, 32 * step + 8 * micro + 8)))
            (nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum") / 32).backward()
        model.load_state_dict(kept, strict=False)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def state_of(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "checkpoints" / "latest" / "state.pt", weights_only=True)["model"]


def folder_of(done: Any) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


def test_the_numbers_are_those_of_a_plain_loop_and_the_run_is_verified(samewise: Callable[..., Any], project: Callable[[str], list[str]]) -> None:
    expected = plainly(project("InPlace"))
    folder = folder_of(samewise("train", *project("Centred"), "--json"))
    for name, value in state_of(folder).items():
        assert torch.allclose(value, expected[name], rtol=1e-10, atol=1e-12), name
    verified = samewise("verify", folder)
    assert (verified.returncode, "altered" in verified.stdout) == (0, False), verified.stdout + verified.stderr


def test_a_resumed_run_has_the_same_bits(samewise: Callable[..., Any], project: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder_of(samewise("train", *project("Centred"), "run_root=whole", "--json"))
    with monkeypatch.context() as patches:
        left = iter([False, False, False, True])
        patches.setattr("samewise.runner.optim.schedules.base.Schedule.before_step", lambda self, step: 1 / 0 if next(left) else None)
        assert samewise("train", *GIVEN, "run_root=parts").returncode == 1
    resumed = folder_of(samewise("train", *GIVEN, "run_root=parts", "--json"))
    assert (resumed / "trace.jsonl").read_bytes() == (whole / "trace.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(samewise: Callable[..., Any], project: Callable[[str], list[str]]) -> None:
    one = folder_of(samewise("train", *project("Centred"), "run_root=one", "--json"))
    two = run_ranks(Path("two"), 2, experiment=[*GIVEN, "strategy=elastic"])
    assert (two / "trace.jsonl").read_bytes() == (one / "trace.jsonl").read_bytes()
    assert all(torch.equal(value, state_of(one)[name]) for name, value in state_of(two).items())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Expanded", "mask is an expanded tensor: its elements share memory, so no checkpoint could be loaded into it"),
        ("OtherParameter", "a forward pass replaces the parameter head.weight by another tensor, which no optimizer trains"),
        ("OtherDtype", "a forward pass turns the buffer seen from int64 into float32"),
        ("Queue", "a forward pass turns queue in the model's state_dict from float32 [0, 8] into float32 [2, 8]"),
        ("Late", "a forward pass adds mean to the model's state_dict: a checkpoint with it could not be loaded into a new model"),
        ("LateLayer", "a forward pass adds scale.weight, scale.bias to the model's state_dict"),
        ("Dropping", "a forward pass removes last from the model's state_dict"),
    ],
)
def test_what_could_not_be_trained_or_saved_is_an_error_with_its_name(
    samewise: Callable[..., Any], project: Callable[[str], list[str]], model: str, message: str
) -> None:
    done = samewise("train", *project(model), code=2)
    assert message in done.stderr
    assert not [*Path("runs").glob("*/*/checkpoints/step-*")]
    checked = samewise("check", *GIVEN)
    assert (checked.returncode, message in checked.stderr) == ((0, False) if model == "LateLayer" else (2, True)), checked.stderr


def test_stages_share_the_buffers_that_a_layer_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peers:
        rank, doing = 1, ""

    stage = nn.BatchNorm1d(2)
    parts = StageParts([stage, nn.Identity()], Peers())  # pyright: ignore[reportArgumentType]
    stage.running_mean = stage.running_mean + 1
    monkeypatch.setattr("samewise.runner.strategies.stages.from_rank", lambda rank, tensors: [one + 1 for one in tensors])
    parts.share([[False, False], []])
    assert stage.running_mean.tolist() == [2.0, 2.0]
