"""The state of an optimizer: how it begins, and another's checkpoint."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_optimizers import build, sgd
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.optim.build import implementation
from samewise.runner.optim.groups import freeze_groups
from samewise.runner.optim.muon import COEFFICIENTS, Muon, orthogonalise
from samewise.runner.optim.states import load_state
from samewise.runner.records.checkpoint import load_tensors


def test_a_state_that_is_loaded_keeps_no_file_in_memory(tmp_path: Path) -> None:
    layer, file = nn.Linear(3, 3), tmp_path / "state.pt"
    made = build(sgd(momentum=0.9), layer)["train"]
    layer(torch.ones(1, 3)).sum().backward()
    made.step()
    expected = {name: value.clone() for name, value in made.state[layer.weight].items()}
    torch.save(made.state_dict(), file)
    state = load_tensors(file)
    load_state(made, state)
    assert str(file) in Path("/proc/self/maps").read_text()
    del state
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert [torch.equal(value, made.state[layer.weight][name]) for name, value in expected.items()] == [True]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_late_first_gradient_starts_the_momentum_as_in_torch(nesterov: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    made = build(sgd(**options), layers[0])["train"]
    torchs = torch.optim.SGD(layers[1].parameters(), lr=made.param_groups[0]["lr"], foreach=False, fused=False, **options)
    assert implementation(made) == "fused"
    for step in range(4):
        images = torch.randn(5, 3)
        for each, optimizer in zip(layers, (made, torchs), strict=True):
            optimizer.zero_grad()
            output = each[0](images)
            (each[1](output) if step in (1, 3) else output).square().sum().backward()
            optimizer.step()
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_momentum_starts_after_steps_that_overflow_as_in_torch() -> None:
    """torch's fused kernel skips such a step, and leaves the momentum that it was to begin unwritten; its loop is not called."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    options = {"momentum": 0.9, "weight_decay": 0.1}
    made = build(sgd(**options), layers[0])["train"]
    torchs = torch.optim.SGD(layers[1].parameters(), lr=made.param_groups[0]["lr"], foreach=False, fused=False, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in layers]
    for step in range(4):
        images = torch.randn(5, 3)
        for layer, optimizer, scaler in zip(layers, (made, torchs), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(layer(images).square().sum() * (math.inf if step < 2 else 1.0)).backward()
            torch.empty(1 << 12).fill_(math.nan)  # what memory that is used next may hold
            scaler.step(optimizer)
            scaler.update()
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_late_first_gradient_with_dampening_is_refused_with_a_way_out() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    made = build(sgd(momentum=0.9, dampening=0.5), layers)["train"]
    layers[0](torch.ones(1, 3)).sum().backward()
    made.step()
    layers[1](torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigError, match=r"optimizer\.fused=false"):
        made.step()


def test_a_state_with_the_same_parameters_in_another_order_is_refused() -> None:
    """torch gives each state to the parameter in its place: a norm's moments to another norm, without an error."""
    model = nn.ModuleDict({"first": nn.LayerNorm(4), "second": nn.LayerNorm(4)})
    turned = nn.ModuleDict({"second": model["second"], "first": model["first"]})
    one, again, other = (build(sgd(), of)["train"] for of in (model, model, turned))
    sum(parameter.sum() for parameter in model.parameters()).backward()
    one.step()
    load_state(again, one.state_dict())
    with pytest.raises(ConfigError, match=r"optimizer: has the checkpoint's parameters in another order, from second\.weight on"):
        load_state(other, one.state_dict())


FREEZES = {"match": "0.*", "frozen": True}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"f": FREEZES}, {}, r"param_groups: other parameters are trained than in the checkpoint: only here: 0\.weight, 0\.bias; hint"),
        ({}, {"f": FREEZES}, r"only there: 0\.weight, 0\.bias; hint"),
        ({"f": FREEZES}, {"f": {**FREEZES, "match": "1.*"}}, r"only here: 0\.weight, 0\.bias; only there: 1\.weight, 1\.bias; hint"),
        ({}, {"b": {"match": "1.*"}}, r"param_groups: sorts .* than in the checkpoint: 1\.weight is in 'b' here, and in 'rest' there"),
        ({"a": {"match": "0.*"}}, {"a": {"match": ["0.*", "1.weight"]}}, r"1\.weight is in 'a' here, and in 'rest' there"),
        ({"f": FREEZES, "a": {"match": "1.*"}}, {"f": FREEZES, "b": {"match": "1.*", "lr_factor": 0.5}}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_a_state_of_other_parameters_or_groups_is_refused_with_their_names(kind: str, before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    """torch matches them by their places, also where shapes differ: fused kernels then read beyond the end of an average."""

    def made(rules: dict[str, Any]) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        freeze_groups(model, rules)
        model(torch.ones(4, 6)).square().sum().backward()
        return build({"_target_": f"torch.optim.{kind}", "lr": 0.1}, model, rules)["train"]

    first, other = made(before), made(after)
    first.step()
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        load_state(other, first.state_dict())


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.5}, {"maximize": True}])
def test_options_that_differ_from_the_checkpoints_hold_from_the_first_step_on(options: dict[str, Any]) -> None:
    model, first = nn.Linear(3, 1, bias=False), torch.tensor([[1.0, 2, 3]])
    before = build(sgd(momentum=0.9), model)["train"]
    model(first).sum().backward()
    before.step()
    start = model.weight.detach().double().clone()
    after = build(sgd(momentum=0.9, **options), model)["train"]
    load_state(after, before.state_dict())
    after.step()  # with the same gradient
    sign = -1 if options.get("maximize") else 1
    buffer = 0.9 * first.double() + sign * first.double() * (1 - options.get("dampening", 0))
    step = sign * first.double() + 0.9 * buffer if options.get("nesterov") else buffer
    assert (after.param_groups[0]["lr"] * step + model.weight.detach() - start).abs().max() < 1e-6


class Annealed(torch.optim.SGD):
    """Changes an option of its constructor in each step."""

    def __init__(self, params: Any, lr: float, damp: float = 1.0, cut: float = 0.0) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(damp=damp, cut=cut)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["damp"] *= 0.5
        return super().step(closure)


@pytest.mark.parametrize(("changed", "damp", "cut"), [((), 0.5, 0.0), ({"cut"}, 0.5, 0.25), ({"damp", "other"}, 1.0, 0.0), (None, 1.0, 0.25)])
def test_options_that_an_optimizer_of_ones_own_has_changed_are_kept_unless_the_config_has_others(changed: Any, damp: float, cut: float) -> None:
    model = nn.Linear(3, 1)
    before, after = Annealed(model.parameters(), lr=0.1), Annealed(model.parameters(), lr=0.1, cut=0.25)
    model(torch.ones(1, 3)).sum().backward()
    before.step()
    load_state(after, before.state_dict(), changed)
    assert (after.param_groups[0]["damp"], after.param_groups[0]["cut"]) == (damp, cut)


def test_an_option_that_is_new_in_the_code_gets_its_own_value() -> None:
    model = nn.Linear(3, 1)
    after = Annealed(model.parameters(), lr=0.1)
    load_state(after, torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    assert after.param_groups[0]["damp"] == 1.0


def test_an_option_that_needs_averages_which_the_checkpoint_lacks_is_refused() -> None:
    model = nn.Linear(3, 1)
    before, after = (build({"_target_": "torch.optim.Adam", "lr": 0.1, "amsgrad": on}, model)["train"] for on in (False, True))
    with pytest.raises(ConfigError, match=r"optimizer\.amsgrad: needs averages that the checkpoint does not have"):
        load_state(after, before.state_dict())


def random_weights(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def take_steps(optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """Take steps with the same gradients for every optimizer."""
    for step in range(steps):
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                parameter.grad = random_weights(*parameter.shape, seed=100 * step + place).detach() + parameter.detach()
        optimizer.step()


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (8, 8)])
def test_the_iteration_only_changes_singular_values_by_its_polynomial(shape: tuple[int, int]) -> None:
    matrix = random_weights(*shape).detach()
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(3):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    assert torch.allclose(orthogonalise(matrix, steps=3).double(), expected, atol=0.03)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (64, 576)])
def test_the_iteration_has_the_bits_of_torchs(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = random_weights(*shape).detach()
    assert torch.equal(orthogonalise(matrix, steps=5, eps=0.0), _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_wide_matrix_is_trained_like_torchs_muon(nesterov: bool) -> None:
    mine, torchs = random_weights(6, 20), random_weights(6, 20)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "ns_steps": 5}
    take_steps(Muon([mine], **options))
    take_steps(torch.optim.Muon([torchs], **options))
    moved = (torchs - random_weights(6, 20)).abs().max()
    assert (mine - torchs).abs().max() < 0.05 * moved  # the iteration is in bfloat16


def test_a_convolution_is_trained_as_a_matrix() -> None:
    convolution, matrix = random_weights(6, 3, 3, 3), nn.Parameter(random_weights(6, 3, 3, 3).detach().view(6, 27))
    for one in (convolution, matrix):
        optimizer = Muon([one], normalize_weights=True)
        one.grad = random_weights(6, 3, 3, 3, seed=9).detach().view(one.shape)
        optimizer.step()
    assert torch.equal(convolution.view(6, 27), matrix)


@pytest.mark.parametrize("momentum", [0.0, 0.85])
def test_a_group_without_muon_has_the_bits_of_torchs_sgd(momentum: float) -> None:
    mine, torchs = [random_weights(7), random_weights(4, 3)], [random_weights(7), random_weights(4, 3)]
    options: dict[str, Any] = {"lr": 0.3, "momentum": momentum, "nesterov": momentum > 0, "weight_decay": 0.02}
    take_steps(Muon([{"params": mine, "use_muon": False, **options}]))
    take_steps(torch.optim.SGD(torchs, **options, foreach=False))
    assert all(torch.equal(one, other) for one, other in zip(mine, torchs, strict=True))


def test_muon_resumes_from_its_state() -> None:
    weights = [[random_weights(6, 20), random_weights(7)], [random_weights(6, 20), random_weights(7)]]
    whole, half = (Muon([{"params": pair[:1]}, {"params": pair[1:], "use_muon": False}]) for pair in weights)
    take_steps(whole, 6)
    take_steps(half, 3)
    rest = Muon([{"params": weights[1][:1]}, {"params": weights[1][1:], "use_muon": False}])
    rest.load_state_dict(half.state_dict())
    for step in range(3, 6):
        for group in rest.param_groups:
            for place, parameter in enumerate(group["params"]):
                parameter.grad = random_weights(*parameter.shape, seed=100 * step + place).detach() + parameter.detach()
        rest.step()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": 0.0}, {"weight_decay": -0.1}, {"ns_steps": 0}, {"ns_coefficients": [1.0]}])
def test_an_option_out_of_its_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Muon([random_weights(3, 2)], **wrong)
