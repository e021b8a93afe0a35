"""strategy=pipeline and strategy=rpc: a ResNet cut in two on two processes gives the weights of one process, exactly.

There is no tolerance: the stages compute what the whole model computes, with the same kernels on the same samples, and gradients are added in the same order.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from samewise_forked import Forked
from samewise_runner_jobs import run
from samewise_tiny import DIGITS
from torch import Tensor, nn

from samewise.recipes.models.resnet import resnet18_small
from samewise.runner.errors import ConfigError
from samewise.runner.strategies.stages import cut_model, draws

TINY = [*DIGITS, "model.width=8", "batch_size=16", "accumulate=4", "max_steps=6", "checkpoint.every_steps=2"]
STRATEGIES = {"gpipe": ["strategy=pipeline"], "1f1b": ["strategy=pipeline", "strategy.schedule=1f1b"], "rpc": ["strategy=rpc"]}
MORE = ["precision=bf16", "clip_norm=0.5", "loader.drop_last=false", "dataset.samples=50"]  # the last batch of an epoch has 2 samples, in one micro-batch


def test_stages_compute_what_the_model_computes_and_share_its_layers() -> None:
    torch.manual_seed(0)
    model = resnet18_small(width=4)
    stages = cut_model(model, ["layer2", "layer4"])
    assert [id(p) for stage in stages for p in stage.parameters()] == [id(p) for p in model.parameters()]
    images = torch.randn(2, 3, 8, 8)
    value = images
    for stage in stages:
        value = stage(value)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(value, model(images))
    assert all(buffer.ne(statistics[name]).any() for name, buffer in model.named_buffers()), "batch norm's statistics are the model's own"


class Folds(nn.Module):
    """Calls functions before its layer, or no layer at all."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Tensor:
        folded = value.abs().roll(1, -1)
        return folded if self.layer is None else self.layer(folded)


def test_a_part_that_begins_with_a_function_begins_a_stage() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Folds(nn.Linear(3, 3)), Folds())
    stages = cut_model(model, ["1", "2"])
    value = torch.randn(2, 3)
    assert torch.equal(stages[0](value), model[0](value))
    assert torch.equal(stages[1](stages[0](value)), model[:2](value))
    assert torch.equal(stages[2](stages[1](stages[0](value))), model(value))


class Skips(nn.Module):
    """Passes its input to both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value)) + value


class Chooses(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(value) if value.sum() > 0 else self.first(value)


class Adds(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.zeros(3))

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value) + self.more)


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value))


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (resnet18_small(width=4), ["layr3"], "did you mean 'layer3'?"),
        (resnet18_small(width=4), ["layer3", "layer2"], "in another order"),
        (resnet18_small(width=4), ["conv1"], "a stage would be empty"),
        (Skips(), ["second"], "needs a value that stage 0 does not pass on"),
        (Chooses(), ["second"], "cannot be cut into stages"),
        (Adds(), ["second"], "stage 0 uses more, and torch.fx can put only what layers of torch.nn hold into a stage"),
        (Shares(), ["second"], "share the parameter"),
    ],
    ids=["no such part", "order", "empty", "skips", "chooses", "adds", "shares"],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, split: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut_model(model, split)
    assert message in str(caught.value)


def test_where_tracing_stops_is_told() -> None:
    line = Chooses.forward.__code__.co_firstlineno + 1
    for model, split in ((Chooses(), "second"), (nn.Sequential(Chooses(), nn.Linear(3, 3)), "1")):
        with pytest.raises(ConfigError) as caught:
            cut_model(model, [split])
        assert f"strategy=elastic; raised at {__file__}:{line}, in forward: return self.second(value) if value.sum() > 0" in str(caught.value)


def test_a_stage_that_draws_random_numbers_is_recognised() -> None:
    first, second = cut_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.1)), ["1"])
    assert draws(first) is None
    assert draws(second) == "2"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["strategy=pipeline", "replicas=2"], "it carries one replica", "accumulate=N"),
        (["strategy=pipeline", "strategy.nproc=3"], "with 2 stages (cut at layer3) cannot run in 3 processes", "2, or null"),
        (["strategy=pipeline", "strategy.schedule=gpip"], "no such schedule", "gpipe"),
        (["strategy=pipeline", "strategy.split=[]"], "does not name a place", "strategy.split=[layer3]"),
        (["strategy=rpc", "replicas=2"], "it carries one replica", "accumulate=N"),
        (["strategy=rpc", "strategy.nproc=1"], "cannot run in 1 process", "2, or null"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(samewise, tmp_path, overrides, message, hint) -> None:
    done = samewise("train", *TINY, f"run_root={tmp_path}", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert hint in done.stderr
    assert not list(tmp_path.glob("*/*"))


def train(samewise, run_root: Path, *overrides: str) -> tuple[str, bytes, str]:
    """The weights' digest, the trace and the fingerprint of a finished run."""
    done = samewise("train", *TINY, f"run_root={run_root}", *overrides, "--json")
    assert done.returncode == 0, done.stderr
    return result(Path(json.loads(done.stdout)["folder"]))


def result(folder: Path) -> tuple[str, bytes, str]:
    summary = json.loads((folder / "summary.json").read_text())
    return summary["weights_sha256"], (folder / "trace.jsonl").read_bytes(), summary["fingerprint"]


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.parametrize("strategy", [pytest.param(one, id=name, marks=pytest.mark.long if name == "gpipe" else ()) for name, one in STRATEGIES.items()])
def test_two_processes_give_the_weights_of_one(samewise, tmp_path, strategy) -> None:
    assert result(run(tmp_path / "two", 2, *strategy, experiment=TINY)) == train(samewise, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(one, id=name, marks=pytest.mark.long if name != "gpipe" else ()) for name, one in STRATEGIES.items()])
def test_bf16_clipping_and_a_smaller_last_batch_keep_the_bits(samewise, tmp_path, strategy) -> None:
    assert result(run(tmp_path / "two", 2, *strategy, *MORE, experiment=TINY)) == train(samewise, tmp_path / "one", *MORE)


@pytest.mark.slow
def test_three_stages_give_the_weights_of_one_process(samewise, tmp_path) -> None:
    three = ["strategy=pipeline", "strategy.split=[layer2,layer4]", "strategy.schedule=1f1b"]
    assert result(run(tmp_path / "three", 3, *three, experiment=TINY)) == train(samewise, tmp_path / "one")


DROPS = """
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Conv2d, in_channels: "${dataset.channels}", out_channels: 4, kernel_size: 3, stride: 2}
  - {_target_: torch.nn.Dropout, p: 0.2}
  - {_target_: torch.nn.Conv2d, in_channels: 4, out_channels: 6, kernel_size: 3}
  - {_target_: torch.nn.Dropout, p: 0.2}
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Dropout, p: 0.2}
  - {_target_: torch.nn.Linear, in_features: 1014, out_features: "${dataset.num_classes}"}
"""


@pytest.mark.slow
def test_three_stages_that_draw_random_numbers_give_the_weights_of_one_process_under_rpc(samewise, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "drops.yaml").write_text(DROPS)
    drops = [*DIGITS, f"--config-dir={tmp_path}", "model=drops", "param_groups.norms=null", "batch_size=16", "accumulate=2", "max_steps=4"]
    three = ["strategy=rpc", "strategy.split=['2','4']", "activation_checkpointing=['3']"]  # which draws again in the backward pass
    done = samewise("train", *drops, f"run_root={tmp_path / 'one'}", "--json")
    assert done.returncode == 0, done.stderr
    assert result(run(tmp_path / "three", 3, *three, experiment=drops)) == result(Path(json.loads(done.stdout)["folder"]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [STRATEGIES["gpipe"], pytest.param(STRATEGIES["rpc"], marks=pytest.mark.long)], ids=["pipeline", "rpc"])
def test_a_checkpoint_can_be_resumed_by_one_process(samewise, tmp_path, strategy) -> None:
    process = Forked("train", *TINY, "max_steps=20", f"run_root={tmp_path / 'moved'}", *strategy, said=tmp_path / "said")
    while sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("moved/*/*/trace.jsonl")) < 6:
        assert process.poll() is None, process.errors
        time.sleep(0.01)
    process.send(signal.SIGTERM)
    assert process.wait(200) == 3, process.errors
    assert train(samewise, tmp_path / "moved", "max_steps=20") == train(samewise, tmp_path / "alone", "max_steps=20")
