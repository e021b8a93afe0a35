"""strategy=pipeline and strategy=rpc: a ResNet cut in two on two processes gives the weights of one process, exactly.

There is no tolerance: the stages compute what the whole model computes, with the same kernels on the same samples, and gradients are added in the same order.
"""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samewise_forked import Forked
from samewise_runner_jobs import Job, run, weights
from samewise_tiny import DIGITS, work_in_project
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from samewise.recipes.models.resnet import resnet18_small
from samewise.runner.errors import ConfigError
from samewise.runner.records import checkpoint
from samewise.runner.strategies.base import Tally
from samewise.runner.strategies.cutting import cut_model
from samewise.runner.strategies.pipeline import Pipeline, StageModule
from samewise.runner.strategies.stages import ModelCall, StageParts
from samewise.runner.strategies.surroundings import Surroundings

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


class Scales(nn.Module):
    """Draws a number that is not a tensor, which a graph would keep."""

    def forward(self, value: Tensor) -> Tensor:
        return value * random.random()


class Switches(nn.Module):
    """Computes its second layer in another mode."""

    def __init__(self, mode: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.first, self.second, self.mode = nn.Linear(3, 3), nn.Linear(3, 3), mode

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        with self.mode():
            return value + self.second(value)


class Returns(nn.Module):
    """A dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value: Tensor) -> dict[str, Any]:
        hidden = self.second(self.first(value))
        return {"logits": (self.third(hidden),), "hidden": hidden}


def hooked(model: nn.Module) -> nn.Module:
    """With hooks that scale the output and the gradient of the input."""
    model.register_forward_hook(lambda module, inputs, output: output * 3)
    model.register_full_backward_hook(lambda module, given, taken: tuple(None if one is None else one * 5 for one in given))
    return model


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
        (nn.Sequential(nn.Linear(3, 3), Scales()), ["1"], "draws random numbers where torch.fx sees no operator"),
        (Switches(torch.inference_mode), ["second"], "computes second without gradients, which torch.fx does not record"),
        (hooked(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), ["1"], "has hooks on the model itself"),
        (nn.Sequential(hooked(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))), ["0.1"], "lies within 0, which has hooks and so is called as a whole"),
        (Returns(), ["third"], "the model returns a value that the last stage does not compute"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, split: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut_model(model, split)
    assert message in str(caught.value)


class Calls(nn.Module):
    """Computes a function of its layer's output; without a layer, of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, value: Tensor) -> Tensor:
        return self.function(value if self.layer is None else self.layer(value))


@torch.fx.wrap
def hidden(value: Tensor) -> Tensor:
    """Not traced into, so what it calls is not known before it is called."""
    return value + torch.randn(len(value), 1)


@torch.fx.wrap
def hidden_numpy(value: Tensor) -> Tensor:
    return value * float(np.random.rand())


def attend(dropout: float) -> Callable[[Tensor], Tensor]:
    return lambda value: F.scaled_dot_product_attention(value, value, value, dropout_p=dropout)


DRAW = {
    "dropout": nn.Dropout(0.1),
    "stochastic depth": StochasticDepth(0.1, "row"),
    "noise": Calls(lambda value: value + torch.randn_like(value)),
    "recurrent": Calls(lambda pair: pair[0], nn.LSTM(4, 4, 2, dropout=0.5)),
    "attention as a function": Calls(attend(0.5)),
    "a function that is not traced": Calls(lambda value: hidden(value)),
    "one that draws from NumPy": Calls(lambda value: hidden_numpy(value)),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_stage_that_draws_random_numbers_notices_it(name: str) -> None:
    device = torch.device("cpu")
    first, second = cut_model(nn.Sequential(nn.Linear(4, 4), DRAW[name]), ["1"])
    for part, drew in ((first, False), (second, True)):
        stage = StageModule(part, device, first=True, last=True)
        stage.calls = iter([ModelCall((torch.ones(1, 4, 4),), Surroundings.now(device))])
        stage()
        assert stage.drew is drew


@pytest.mark.parametrize(
    ("drew", "recipe_drew", "message"), [([False, True], False, "stage 1 draws"), ([True, False], True, "the recipe draws"), ([True, False], False, "")]
)
def test_a_pipeline_whose_random_numbers_would_be_others_than_in_one_process_is_refused(drew: list[bool], recipe_drew: bool, message: str) -> None:
    for rank_invariant in (True, False):
        pipeline: Any = Pipeline(split=["1"], rank_invariant=rank_invariant)
        pipeline._stage, pipeline._parts = SimpleNamespace(drew=drew[0]), SimpleNamespace(have_gradients=list, share=lambda touched: None)
        pipeline.gather = lambda tallies, facts: ([Tally()], [([], drew[0], False), ([], drew[1], recipe_drew)])
        with pytest.raises(ConfigError, match=message) if message and rank_invariant else nullcontext():
            pipeline.reduce([])


def test_a_gradient_of_another_stages_weight_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = StageParts(list(model), SimpleNamespace(rank=1))  # type: ignore[arg-type]
    model[1](torch.ones(2)).sum().backward()
    assert parts.have_gradients() == [True, True]
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ConfigError, match="uses the model's weights in its loss"):
        parts.have_gradients()


def train(samewise, run_root: Path, *overrides: str) -> tuple[str, bytes, str]:
    """The weights' digest, the trace and the fingerprint of a finished run."""
    done = samewise("train", *TINY, f"run_root={run_root}", *overrides, "--json", code=0)
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
    done = samewise("train", *drops, f"run_root={tmp_path / 'one'}", "--json", code=0)
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


HEADER = """
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule

from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Batch, Loss, Phase

"""
NOT_HERE = """
if os.environ["RANK"] == "0":
    import sys; sys.path.insert(0, os.getcwd()); import far
    del far.Brightness.forward
"""


@pytest.mark.slow
def test_a_recipe_computes_a_part_in_another_process(tmp_path, monkeypatch):
    """The recipe of docs/distributed.md, with the bits of one process."""
    code = re.search(r"```python\n(class Brightness.*?)```", Path("docs/distributed.md").read_text(), re.DOTALL)
    assert code
    work_in_project(tmp_path, monkeypatch, "far", HEADER + code[1])
    settings = [*TINY, "max_steps=2", "recipe._target_=far.Bright"]
    job = Job(tmp_path / "two", 2, "strategy=rpc", experiment=settings, before=NOT_HERE)
    assert job.wait() == [0, 0], job.errors
    folder = run(tmp_path / "alone", 1, "strategy=single", experiment=settings)
    assert json.loads((tmp_path / "two" / folder.relative_to(tmp_path / "alone") / "summary.json").read_text())["weights_sha256"] == weights(folder)


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


def assert_close(folder, reference):
    states = [checkpoint.load(path / "checkpoints" / "latest") for path in (folder, reference)]
    for one, other in (states, [state["callbacks"]["ema"]["averaged"] for state in states]):
        torch.testing.assert_close(one.get("model", one), other.get("model", other), rtol=1e-4, atol=1e-5)
    losses = [json.loads((path / "summary.json").read_text())["metrics"]["final"]["valid/loss"] for path in (folder, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_agree_with_one_resume_with_the_same_bits_and_one_process_goes_on(tmp_path, monkeypatch):
    work_in_project(tmp_path, monkeypatch, "own", MODEL, {"model/own": "# A model\n_target_: own.Divided\n"})
    two = run(tmp_path / "two", 2, "strategy=tensor_parallel", experiment=SETTINGS)
    alone = run(tmp_path / "alone", 1, "strategy=single", experiment=SETTINGS)
    assert_close(two, alone)
    assert json.loads((two / "summary.json").read_text())["level"] == "R1"
    job = Job(tmp_path / "killed", 2, "strategy=tensor_parallel", experiment=SETTINGS)
    job.wait_for_step(3)
    job.ranks[1].kill()
    job.wait()
    assert weights(run(tmp_path / "killed", 2, "strategy=tensor_parallel", experiment=SETTINGS)) == weights(two)
    moved = run(tmp_path / "moved", 1, "strategy=single", f"resume_from={two / 'checkpoints' / 'step-00000004'}", experiment=SETTINGS)
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
