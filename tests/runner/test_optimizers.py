"""Optimizers from the config: the choices, their implementation, their groups, what is refused."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from samewise_runner_optimizers import build, network, sgd
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Phase
from samewise.runner.optim.build import describe, implementation
from samewise.runner.optim.stepping import step_of

CHOICES = sorted((Path(__file__).parents[2] / "configs" / "optimizer").glob("*.yaml"))
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
SAMEWISE_DEFAULTS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Lars": {"momentum": 0.9, "weight_decay": 0.0001}, "Lamb": {"max_grad_norm": None}}

LEFT_OUT = {"Lamb": ("bias_correction", "decoupled_decay", "corrected_weight_decay")}  # timm does not describe them


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_a_choice_lists_the_constructors_arguments_with_their_defaults(path: Path) -> None:
    node = read(path)
    target = node.pop("_target_")
    module, _, name = target.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    assert node.pop("_partial_") is True
    assert next(iter(node)) == "lr"
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kind).parameters.items() if name not in ("params", *LEFT_OUT.get(kind.__name__, ()))
    }
    defaults |= SAMEWISE_DEFAULTS.get(kind.__name__, {})
    assert {key: tuple(value) if isinstance(value, list) else value for key, value in node.items()} == defaults


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_every_choice_trains_and_describes_its_implementation(path: Path) -> None:
    model = network(matrices=path.stem.startswith("muon"))
    made = build(read(path), model)
    optimizer = made["train"]
    inputs = torch.randn(16, 6)
    before = model(inputs).square().mean().item()
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert model(inputs).square().mean().item() < before
    assert describe(made)["train"]["implementation"] == ("fused" if type(optimizer).__name__ in FUSED else "loop")
    assert read(path)["_target_"].endswith(f".{describe(made)['train']['class']}")


def test_hooks_and_profilers_are_notified_of_a_step() -> None:
    model, heard = network(), list[str]()
    (optimizer,) = build(sgd(momentum=0.9), model).values()
    model(torch.ones(4, 6)).sum().backward()
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: heard.append("a hook"))
        step_of(optimizer)()
        handle.remove()
    assert heard == ["a hook"] * 4
    with torch.profiler.profile() as profile:
        step_of(optimizer)()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_the_config_may_choose_another_implementation() -> None:
    assert implementation(build(sgd(fused=False), network())["train"]) == "loop"
    assert implementation(build(sgd(foreach=True), network())["train"]) == "foreach"
    assert implementation(build(sgd(), network())["train"]) == "fused"


def test_fused_is_not_used_if_a_parameter_does_not_support_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    assert implementation(build(sgd(), model)["train"]) == "loop"


def test_groups_carry_their_options_and_factors_multiply_the_learning_rate() -> None:
    rules = {"norms": {"match": "norm", "weight_decay": 0.0}, "head": {"match": "2.*", "lr_factor": 10}}
    optimizer = build(sgd(weight_decay=0.5), network(), rules)["train"]
    found = {group["name"]: (group["lr"], group["weight_decay"], group["param_names"]) for group in optimizer.param_groups}
    assert found == {"rest": (0.1, 0.5, ["0.weight", "0.bias"]), "norms": (0.1, 0.0, ["1.weight", "1.bias"]), "head": (1.0, 0.5, ["2.weight", "2.bias"])}
    groups = describe({"train": optimizer})["train"]["groups"]
    assert [(group["name"], group["tensors"], group["elements"]) for group in groups] == [("rest", 2, 56), ("norms", 2, 16), ("head", 2, 27)]


def test_the_optimizer_state_can_be_loaded_without_trusting_it(tmp_path: Path) -> None:
    model = network()
    optimizer = build({"_target_": "torch.optim.AdamW"}, model, {"norms": {"match": "norm", "weight_decay": 0.0}})["train"]
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    fresh = build({"_target_": "torch.optim.AdamW"}, network(), {"norms": {"match": "norm", "weight_decay": 0.0}})["train"]
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


PHASES = (Phase("generator", ("generator",)), Phase("critic", ("critic",)))


def test_each_phase_has_its_own_optimizer_or_all_have_the_same_kind() -> None:
    model = nn.ModuleDict({"critic": nn.Linear(2, 2), "generator": nn.Linear(2, 2)})
    made = build({"generator": sgd(), "critic": {"_target_": "torch.optim.Adam", "lr": 0.01, "betas": [0.5, 0.9]}}, model, phases=PHASES)
    assert [(name, type(optimizer).__name__) for name, optimizer in made.items()] == [("generator", "SGD"), ("critic", "Adam")]
    assert made["critic"].param_groups[0]["params"] == list(model["critic"].parameters())
    assert made["critic"].param_groups[0]["betas"] == (0.5, 0.9)
    both = build(sgd(), model, phases=PHASES)
    assert [optimizer.param_groups[0]["param_names"][0] for optimizer in both.values()] == ["generator.weight", "critic.weight"]


def test_unmatched_phases_and_optimizers_are_reported_together() -> None:
    model = nn.ModuleDict({"critic": nn.Linear(2, 2), "generator": nn.Linear(2, 2)})
    with pytest.raises(ConfigError) as caught:
        build({"generator": sgd(), "critik": sgd()}, model, phases=PHASES)
    assert [problem.path for problem in caught.value.problems] == ["optimizer.critik", "optimizer"]
    assert "did you mean 'critic'?" in str(caught.value)


WRONG = [
    (sgd(), {"layers": {"layer_decay": 0.5}, "norms": {"match": "norm", "momentum": -1}}, "param_groups.norms.momentum", "Invalid momentum"),
    ({"_target_": "torch.optim.Adam", "betas": [0.9, 1.5]}, {}, "optimizer.betas", "Invalid beta parameter at index 1"),
    ({"_target_": "torch.optim.LBFGS"}, {}, "optimizer", "LBFGS.step needs closure"),
    ({"_target_": "torch.optim.Muon"}, {}, "optimizer", "Muon only supports 2D parameters"),
    ({"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3}, {}, "optimizer._target_", "is not an optimizer"),
    (sgd(), {"norms": {"match": "norm", "weight_dcay": 0}}, "param_groups.norms.weight_dcay", "did you mean 'weight_decay'"),
    (sgd(fused=True, foreach=True), {}, "optimizer", "cannot be `True` together"),
    (sgd(lr="fast"), {"norms": {"match": "norm", "lr_factor": 2}}, "optimizer.lr", "is needed by lr_factor"),
]


@pytest.mark.parametrize(("node", "rules", "path", "message"), WRONG)
def test_an_invalid_setting_is_reported_at_its_key(node: dict[str, Any], rules: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(node, network(), rules)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_factor_multiplies_the_optimizers_default_learning_rate() -> None:
    made = build({"_target_": "torch.optim.Adam"}, network(), {"head": {"match": "2.*", "lr_factor": 10}})["train"]
    assert [group["lr"] for group in made.param_groups] == [0.001, 0.01]


@pytest.mark.gpu
def test_cuda_uses_fused_kernels_if_there_are_any_and_foreach_otherwise() -> None:
    found = {name: implementation(build({"_target_": f"torch.optim.{name}"}, network().cuda())["train"]) for name in ("SGD", "AdamW", "Adagrad", "Adadelta")}
    assert found == {"SGD": "fused", "AdamW": "fused", "Adagrad": "foreach", "Adadelta": "foreach"}
