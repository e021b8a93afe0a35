"""compile: models compiled by torch.compile repeat to the bit, from a cold and a warm cache, killed and resumed, on ranks; everything else is refused.

Whether torch's compiler computes what the model says is not tested here, except that the losses of the first steps are compared with those without it.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from samewise_runner_jobs import Job, assert_same, run
from samewise_tiny import QUIET
from torch import Tensor, nn

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.processes.variables import CACHE
from samewise.runner.strategies.elastic import Elastic
from samewise.runner.strategies.fsdp import FSDP
from samewise.runner.strategies.pipeline import Pipeline
from samewise.runner.strategies.single import Single
from samewise.runner.training.same_bits.compiled import compiler, require_possible

PACKAGE = "lab_of_compiling"
LAB = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, *, looks=False):
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(4, 10)
        self.offset, self.of_first, self.of_rest = (nn.Parameter(torch.zeros(size)) for size in (10, 1, 9))  # compiled, their gradients share memory
        self.looks = looks

    def forward(self, pixels):
        values = self.drop(self.norm(self.first(pixels)).relu()).mean((2, 3))
        if self.looks and values.sum().item() > 0:
            values = -values
        return self.last(values) + (self.offset + torch.cat([self.of_first, self.of_rest]))
"""
TINY = [
    *(*QUIET, "dataset=generated_classification", "transforms=images", "name=compiled", "max_steps=4"),
    *("~model", "+model={_target_: lab_of_compiling.Net, looks: false}", "batch_size=16", "checkpoint.every_steps=2", "evaluate.limit=2"),
    *("dataset.samples=40", "max_epochs=4", "compile=default", "clip_norm=0.1"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a model of few operators, and a cache that the tests share: compiling takes longer than everything else."""
    place, before, cache = tmp_path_factory.mktemp("lab"), Path.cwd(), os.environ.get(CACHE)
    (place / f"{PACKAGE}.py").write_text(LAB)
    (place / "pyproject.toml").write_text(f'[tool.samewise]\npackages = ["{PACKAGE}"]\n')
    os.environ[CACHE] = str(place / "cache")
    os.chdir(place)
    yield place
    os.chdir(before)
    os.environ.pop(CACHE)
    if cache is not None:
        os.environ[CACHE] = cache


def train(root: Path, *more: str, ranks: int = 1) -> Path:
    return run(root, ranks, *more, experiment=TINY)


def losses(folder: Path) -> list[float]:
    return [float.fromhex(line["loss"]) for line in map(json.loads, (folder / "trace.jsonl").read_text().splitlines()) if "loss" in line]


@pytest.fixture(scope="module")
def once(lab: Path) -> Path:
    return train(lab / "once")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_bits_are_the_same_from_a_cold_and_a_warm_cache_and_with_workers(lab: Path, once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(train(lab / "warm", "loader.num_workers=1"), once)
    monkeypatch.setenv(CACHE, str(lab / "empty"))
    assert_same(train(lab / "cold"), once)
    assert any((lab / "empty").iterdir())


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.timeout(900)
def test_a_compiled_model_computes_and_draws_what_the_model_does(lab: Path, once: Path) -> None:
    plain = train(lab / "plain", "compile=off")
    assert plain.name != once.name
    assert losses(once) == pytest.approx(losses(plain), rel=1e-4), "a dropout that drew other numbers would be far away"
    decides, without = (json.loads((folder / "environment.json").read_text())["decides"] for folder in (once, plain))
    assert decides.keys() - without.keys() == {"compile.cxx", "compile.vectors"}


class Counts(nn.Module):
    """Counts its forward passes in a buffer, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.passes: Tensor
        self.register_buffer("passes", torch.tensor(0.0))

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        return self.last(self.first(values).tanh() * (self.passes / 5).clamp(max=1))


class Views(nn.Module):
    """Computes with a view of a buffer that it changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scales: Tensor
        self.register_buffer("scales", torch.arange(1.0, 9).view(2, 4))

    def forward(self, values: Tensor) -> Tensor:
        outputs = self.first(values) * self.scales.t().reshape(8)
        self.scales.mul_(2)
        return outputs


def spectral() -> nn.Module:
    layers = [nn.utils.spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(16, 4))]  # pyright: ignore[reportDeprecated]
    return nn.Sequential(*layers)


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [pytest.param(Counts, marks=pytest.mark.long), Views, spectral])
def test_gradients_are_right_where_the_forward_pass_changes_a_buffer(lab: Path, make: Callable[[], nn.Module]) -> None:
    def gradients(prepare: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        called = prepare(model)
        values = torch.randn(6, 8)
        for _ in range(2):
            called(values).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    settings = OmegaConf.create({"mode": "default", "cuda_graphs": False, "max_graphs": 8})
    compiled, plain = gradients(compiler(settings, torch.device("cpu"), deterministic=True)), gradients(lambda model: model)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_that_is_not_one_graph_is_refused_with_its_line(lab: Path) -> None:
    job = Job(lab / "looks", 1, "model.looks=true", experiment=TINY)
    assert job.wait() == [2]
    assert "compile.mode: torch.compile cannot compile the model as one graph" in job.errors
    assert f"{PACKAGE}.py" in job.errors


MANY = ["replicas=2", "accumulate=2", "memory_format=channels_last", "precision=bf16", "clip_norm=1", "callbacks=ema", "callbacks.ema.every_steps=1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_give_the_same_bits_on_any_number_of_ranks(lab: Path) -> None:
    alone = train(lab / "alone", *MANY)
    assert_same(train(lab / "two", *MANY, "strategy=elastic", ranks=2), alone)


@pytest.mark.parametrize(
    ("overrides", "strategy", "path"),
    [
        ([], FSDP(), "compile.mode: cannot be used with FSDP"),
        ([], Pipeline(split=["layer3"]), "compile.mode: cannot be used with Pipeline"),
        (["activation_checkpointing=[BasicBlock]"], Single(), "activation_checkpointing: cannot be used together with compile"),
        (["reproducibility=portable"], Single(), "compile.mode: compiled code uses its CPU's widest vectors"),
        (["compile.cuda_graphs=true"], Single(), "compile.cuda_graphs: needs a CUDA device"),
        (["compile=off", "compile.cuda_graphs=true"], Single(), "compile.cuda_graphs: needs compiling, which is off"),
        (["compile.cuda_graphs=true", "accumulate=2"], Elastic(), "and a step has 2 of them"),
    ],
)
def test_incompatible_settings_are_refused(overrides: list[str], strategy: Any, path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_possible(compose(["compile=default", *overrides], project=Project(Path())).cfg, strategy, device=torch.device("cpu"), phases=[0])
    assert path in str(refused.value)
