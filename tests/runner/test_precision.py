"""The number format is the config's, whatever was set before, and a format that is not available is reported."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import samewise_runner_jobs as jobs
import torch
from samewise_tiny import DIGITS
from torch import Tensor, nn
from torch.nn.functional import conv2d

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError
from samewise.runner.precision import Precision
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.same_bits.determinism import refused_recurrence, require_deterministic
from samewise.runner.training.same_bits.workarounds import work_around

BACKENDS: Any = torch.backends
CPU = torch.device("cpu")
BEFORE: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "everything tf32": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "everything ieee": lambda: setattr(BACKENDS, "fp32_precision", "ieee"),
    "cuDNN tf32": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "the older switches": lambda: (setattr(BACKENDS.cuda.matmul, "allow_tf32", True), setattr(BACKENDS.cudnn, "allow_tf32", False)),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),  # bfloat16 in oneDNN's matrix products
    "oneDNN bf16": lambda: setattr(BACKENDS.mkldnn, "fp32_precision", "bf16"),
}


def switches() -> dict[str, str]:
    """The settings that torch uses, with inherited values resolved for each operator."""
    cuda = {"matmul": BACKENDS.cuda.matmul, "conv": BACKENDS.cudnn.conv, "rnn": BACKENDS.cudnn.rnn}
    cpu = {name: getattr(BACKENDS.mkldnn, name) for name in ("matmul", "conv", "rnn")}
    return {f"{kind}.{name}": one.fp32_precision for kind, some in (("cuda", cuda), ("cpu", cpu)) for name, one in some.items()}


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    for one in (BACKENDS, BACKENDS.cudnn):
        one.fp32_precision = "none"
    Precision().begin(CPU)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_every_operator_uses_the_configs_format_whatever_was_set_before(before: str, tf32: bool, restored: None) -> None:
    BEFORE[before]()
    Precision(tf32=tf32).begin(CPU)
    wanted = "tf32" if tf32 else "ieee"
    assert switches() == {**{f"cuda.{name}": wanted for name in ("matmul", "conv", "rnn")}, **{f"cpu.{name}": "ieee" for name in ("matmul", "conv", "rnn")}}
    for later in (lambda: setattr(BACKENDS, "fp32_precision", "none"), lambda: setattr(BACKENDS, "fp32_precision", "ieee" if tf32 else "tf32")):
        later()  # nothing is inherited
        assert {value for name, value in switches().items() if name.startswith("cuda")} == {wanted}
    # the older switches give the same values, and reading them is not an error
    assert (BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (tf32, tf32, "high" if tf32 else "highest")


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
def test_products_and_convolutions_on_cuda_round_as_the_format_requires(tf32: bool, restored: None) -> None:
    BACKENDS.fp32_precision = "ieee" if tf32 else "tf32"
    Precision(tf32=tf32).begin(torch.device("cuda"))
    torch.manual_seed(0)
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    images, kernels = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3)

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found.double().cpu() - exact).abs().max() / exact.abs().max())

    products = error(left.cuda() @ right.cuda(), left.double() @ right.double())
    convolved = error(torch.conv2d(images.cuda(), kernels.cuda()), torch.conv2d(images.double(), kernels.double()))
    for found in (products, convolved):  # a significand of ten bits, or of 23
        assert (1e-5 < found < 1e-2) if tf32 else found < 3e-6


@pytest.mark.parametrize(("tf32", "value"), [(True, "0"), (False, "1"), (True, "no")])
def test_a_variable_that_overrides_the_config_is_refused(tf32: bool, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    with pytest.raises(ConfigError, match=f"NVIDIA_TF32_OVERRIDE={value}") as error:
        Precision(tf32=tf32).begin(torch.device("cuda"))
    assert error.value.problems[0].path == "precision.tf32"
    Precision(tf32=tf32).begin(CPU)  # these libraries do not compute on the CPU


@pytest.mark.parametrize(("scale", "words"), [("1e30", "warning: precision: the optimizer skipped 2 updates since this start"), ("256", "")])
def test_skipped_updates_of_float16_are_counted_at_the_end(scale: str, words: str, samewise: Callable[..., Any], tmp_path: Path, restored: None) -> None:
    settings = [*DIGITS, "precision=fp16", f"precision.initial_scale={scale}", "max_steps=2", "device=cpu", "model.width=1", "dataset.samples=32"]
    done = samewise("train", *settings, f"run_root={tmp_path}", code=0)
    assert words in done.stderr
    assert ("the optimizer skipped" in done.stderr) == bool(words)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": ""}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": "4096"}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, "several sizes"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cuBLAS's own choice"),
    ],
)
def test_settings_that_let_cublas_choose_are_refused(variables, words):
    refused = refused_recurrence(variables)
    assert refused is not None
    assert words in refused[0]


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.body = nn.ModuleDict({"rnn1": nn.GRU(4, 8), "cell": nn.GRUCell(4, 8), "rnn2": nn.LSTM(4, 8)})


def test_each_refused_layer_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    strict, cuda = SimpleNamespace(deterministic=True), torch.device("cuda")
    require_deterministic(nn.Conv1d(4, 4, 3), cuda, strict)
    with pytest.raises(ConfigError) as refused:
        require_deterministic(Speaker(), cuda, strict)
    assert [problem.path for problem in refused.value.problems] == ["model.body.rnn1", "model.body.rnn2"]
    assert "cuDNN's GRU does not repeat" in refused.value.problems[0].message
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in refused.value.problems[0].expected
    with pytest.raises(ConfigError) as refused:
        require_deterministic(nn.RNN(2, 2), cuda, strict)
    assert refused.value.problems[0].path == "model"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_cudnn_repeats_forward_and_backward_passes_with_dropout(kind):
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.manual_seed(0)
    layer = kind(128, 512, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True).cuda()
    heard = torch.randn(32, 200, 128, device="cuda")
    first = None
    for _ in range(5):
        with streams.scope(0, "step", 7):
            layer.zero_grad()
            spoken, _ = layer(heard)
            spoken.square().sum().backward()
        found = [spoken, *(parameter.grad.clone() for parameter in layer.parameters())]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))


RECIPES = {"classification": "resnet18_digits", "detection": "retinanet_bccd", "adversarial": "gan_digits"}
TINY = ["debug=tiny", "tracking=none", "evaluate.pictures=false", "replicas=4", "max_steps=2"]


def updates(memory_format: str, experiment: str) -> dict[str, torch.Tensor]:
    """What one step adds to each parameter."""
    project = Project(Path.cwd())
    even = ["optimizer.eps=0.01"] if experiment == "retinanet_bccd" else []  # AdamW would scale up a gradient that is only rounding like any other
    composed = compose([f"experiment={experiment}", *TINY, f"memory_format={memory_format}", *even], project=project)
    run = build(composed, project, composed.folder)
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    train_step(run, next(TrainingBatches(run)))
    return {name: value.detach() - before[name] for name, value in run.model.named_parameters()}


@pytest.mark.parametrize("experiment", [pytest.param(of, id=name, marks=[pytest.mark.slow] * (name == "detection")) for name, of in RECIPES.items()])
def test_a_channels_last_step_with_replicas_is_close_to_a_contiguous_one(experiment: str) -> None:
    expected, found = (updates(memory_format, experiment) for memory_format in ("contiguous", "channels_last"))
    error = sum((found[name] - update).square().sum() for name, update in expected.items())
    assert (error / sum(update.square().sum() for update in expected.values())).sqrt() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classification", "adversarial"])  # detection is among the recipes that are tried on ranks
def test_four_processes_give_the_bits_of_one(tmp_path: Path, recipe: str) -> None:
    overrides = [f"experiment={RECIPES[recipe]}", *TINY, "memory_format=channels_last", "strategy=elastic"]
    alone = jobs.run(tmp_path / "alone", 1, experiment=overrides)
    jobs.assert_same(jobs.run(tmp_path / "four", 4, experiment=overrides), alone)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "groups", "stride"), [(3, 1, 2), (8, 1, 2), (15, 1, (3, 2)), (16, 1, 2), (24, 3, 2)])
def test_a_strided_pointwise_convolution_agrees_with_float64(channels: int, groups: int, stride: int | tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(channels, 24, 1, stride=stride, groups=groups, bias=bias).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    work_around(module, torch.device("cpu"))
    image = torch.randn(3, channels, 32, 31).contiguous(memory_format=torch.channels_last).requires_grad_()
    output = module(image)
    weight = torch.randn_like(output)
    (output * weight).sum().backward()
    given = [None if one is None else one.detach().double().requires_grad_() for one in (image, module.weight, module.bias)]
    expected = conv2d(given[0], given[1], given[2], stride=stride, groups=groups)
    (expected * weight.double()).sum().backward()
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    for found, right in zip((image, module.weight, module.bias), given, strict=True):
        if right is not None:
            torch.testing.assert_close(found.grad.double(), right.grad, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(16, 16, 3, stride=2, padding=1), (2, 16, 1, 1)),
        (nn.Conv2d(16, 5, (2, 3), stride=4, padding=1), (1, 16, 8, 3)),
        (nn.Conv2d(10, 48, 2, stride=4, padding=1, groups=2), (2, 10, 7, 3)),
        (nn.Conv2d(48, 96, 4, stride=(1, 2), padding=(3, 0), groups=48), (1, 48, 7, 4)),
        (nn.Conv1d(40, 12, 2, stride=4, padding=1), (1, 40, 3)),
        (nn.Conv3d(12, 12, 3, padding=(2, 1, 1)), (1, 12, 2, 4, 5)),
        (nn.Conv3d(4, 8, 3, stride=2, padding=(2, 0, 2), groups=4), (2, 4, 1, 5, 5)),
        (nn.Conv2d(8, 16, 1, stride=2), (2, 8, 1, 1)),
    ],
)
def test_a_convolution_of_a_small_input_in_bfloat16_agrees_with_float64(module: nn.Module, shape: tuple[int, ...], autocast: bool) -> None:
    """Without the workaround results are wrong at random on a CPU with AVX-512, depending on what was in memory."""
    torch.manual_seed(0)
    module = copy.deepcopy(module)
    expected, module = copy.deepcopy(module).double(), module if autocast else module.bfloat16()
    work_around(module, torch.device("cpu"))
    for _ in range(5):
        image = torch.randn(shape).bfloat16()
        one, right = (image.detach().to(dtype).requires_grad_() for dtype in (torch.float32 if autocast else torch.bfloat16, torch.float64))
        for waste in [torch.full((size,), torch.nan) for size in (64, 256, 1024, 4096, 16384) * 4]:
            del waste
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(one)
        assert output.dtype is torch.bfloat16
        weight = torch.randn(output.shape).bfloat16()
        module.zero_grad()
        expected.zero_grad()
        output.backward(weight)
        expected(right).backward(weight.double())
        torch.testing.assert_close(output.double(), expected(right), atol=0.05, rtol=0.02)
        for found, wanted in zip((one, *module.parameters()), (right, *expected.parameters()), strict=True):
            torch.testing.assert_close(found.grad.double(), wanted.grad, atol=0.02 * float(wanted.grad.abs().max()), rtol=0.02)


def test_contiguous_tensors_keep_their_bits() -> None:
    module, plain = nn.Conv2d(8, 16, 1, stride=2), nn.Conv2d(8, 16, 1, stride=2)
    plain.load_state_dict(module.state_dict())
    work_around(module, torch.device("cpu"))
    image = torch.randn(3, 8, 32, 32)
    for one in (module, plain):
        one(image).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert torch.equal(module(image), plain(image))


@pytest.mark.slow
def test_a_narrow_resnet_trains_in_channels_last_on_two_threads(samewise, tmp_path) -> None:
    """Without the workaround the heap of the process is damaged within a few steps, and a signal ends it."""
    tiny = ["experiment=resnet18_digits", "model.width=3", "debug=tiny", "batch_size=3", "max_steps=5", "tracking=none", "evaluate.pictures=false"]
    losses = []
    for memory_format in ("contiguous", "channels_last"):
        ended = samewise("train", *tiny, "reproducibility.threads=2", f"memory_format={memory_format}", f"run_root={tmp_path}", "--json", code=0)
        losses.append(json.loads(ended.stdout)["metrics"]["final"]["valid/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
