"""strategy=tensor_parallel: a model that declares a plan trains on two processes as on one, and its checkpoints move."""

import json

import pytest
import torch
from samewise_runner_jobs import Job, run, weights

from samewise.runner.records import checkpoint

MODEL = """
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 10)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, images):
        x = self.norm(self.first(images.flatten(1)))
        return self.head(x + self.narrow(self.wide(x).relu()))

    def tensor_parallel_plan(self):
        return {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
"""
SETTINGS = ["--config-dir", "configs", "recipe=classification", "model=own", "dataset=digits", "transforms=images", "batch_size=32", "accumulate=2"]
SETTINGS += ["max_steps=6", "tracking=none", "evaluate.limit=1", "optimizer=sgd", "clip_norm=0.5", "callbacks=ema", "checkpoint.every_steps=2"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["own"]\n')
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "own.yaml").write_text("# A model\n_target_: own.Divided\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_close(folder, reference):
    states = [checkpoint.load(path / "checkpoints" / "latest") for path in (folder, reference)]
    for one, other in (states, [state["callbacks"]["ema"]["averaged"] for state in states]):
        torch.testing.assert_close(one.get("model", one), other.get("model", other), rtol=1e-4, atol=1e-5)
    losses = [json.loads((path / "summary.json").read_text())["metrics"]["final"]["valid/loss"] for path in (folder, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_agree_with_one_resume_with_the_same_bits_and_one_process_goes_on(project):
    two = run(project / "two", 2, "strategy=tensor_parallel", experiment=SETTINGS)
    alone = run(project / "alone", 1, "strategy=single", experiment=SETTINGS)
    assert_close(two, alone)
    assert json.loads((two / "summary.json").read_text())["level"] == "R1"
    job = Job(project / "killed", 2, "strategy=tensor_parallel", experiment=SETTINGS)
    job.wait_for_step(3)
    job.ranks[1].kill()
    job.wait()
    assert weights(run(project / "killed", 2, "strategy=tensor_parallel", experiment=SETTINGS)) == weights(two)
    moved = run(project / "moved", 1, "strategy=single", f"resume_from={two / 'checkpoints' / 'step-00000004'}", experiment=SETTINGS)
    assert_close(moved, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["experiment=resnet18_digits"], "SmallImageResNet"),
        (["experiment=resnet18_digits", "replicas=2"], "strategy=tensor_parallel divides the model, not the batch: it carries one replica"),
    ],
)
def test_what_cannot_be_divided_is_refused(samewise, options, message):
    done = samewise("check", *options, "strategy=tensor_parallel", "debug=tiny", code=2)
    assert message in done.stderr
