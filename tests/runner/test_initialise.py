"""Initial weights: by rules, from files, parametrised, frozen."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from samewise_runner_initialised import network, other_weights, same
from torch import nn
from torch.nn.utils import prune

from samewise.runner.data import streams
from samewise.runner.errors import ConfigError
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.initialise import METHODS, initialise
from samewise.runner.optim.parametrise import KINDS, merge

CHOICES = sorted(path for path in (Path(__file__).parents[2] / "configs" / "initialise").glob("*.yaml") if path.stem not in ("lora", "whitening"))


def rules(**given: Any) -> dict[str, Any]:
    return {"rules": given}


METHOD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "constant": {"val": 0.3},
    "normal": {"mean": 1.0, "std": 0.1},
    "uniform": {"a": -0.1, "b": 0.2},
    "trunc_normal": {"std": 0.5, "a": -0.5, "b": 0.5},
    "xavier_uniform": {"gain": 2.0},
    "kaiming_normal": {"mode": "fan_out", "nonlinearity": "relu"},
    "orthogonal": {"gain": 3.0},
}


@pytest.mark.parametrize("name", [name for name in METHODS if name != "whitening"])
def test_each_method_gives_torchs_values_and_touches_nothing_else(name: str) -> None:
    arguments = METHOD_ARGUMENTS.get(name, {})
    model, expected = network(), torch.empty(8, 3, 3, 3)
    others = {key: value.clone() for key, value in model.state_dict().items() if key != "0.weight"}
    with streams.scope(0, "init"):
        getattr(nn.init, f"{name}_")(expected, **arguments)
    with streams.scope(0, "init"):
        initialise(model, rules(a={"match": "convolution", "weight": {"method": name, **arguments}}))
    assert torch.equal(model[0].weight, expected)
    assert same({key: value for key, value in model.state_dict().items() if key != "0.weight"}, others)


def test_weight_and_bias_each_follow_the_first_rule_that_sets_them() -> None:
    model = network()
    given = {
        "head": {"match": "3.*", "weight": {"method": "constant", "val": 2.0}},
        "all": {"match": ["convolution", "linear"], "weight": "ones", "bias": {"method": "constant", "val": 7.0}},
    }
    initialise(model, rules(**given))
    assert [model[0].weight.unique().tolist(), model[3].weight.unique().tolist()] == [[1.0], [2.0]]
    assert [model[0].bias.unique().tolist(), model[3].bias.unique().tolist()] == [[7.0], [7.0]]


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_every_choice_fits_a_resnet(path: Path) -> None:
    with streams.scope(0, "init"):
        model = torchvision.models.resnet50(num_classes=10)
    before = model.conv1.weight.clone()
    initialise(model, yaml.safe_load(path.read_text()))
    assert torch.equal(model.conv1.weight, before) == (path.stem in ("default", "resnet_zero_gamma"))
    zeros = sum(int(module.weight.abs().sum() == 0) for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert zeros == (16 if path.stem == "resnet_zero_gamma" else 0)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_weights_are_parametrised_by_pattern_and_biases_left_alone(kind: str) -> None:
    model = network()
    initialise(model, {"parametrisations": {"head": {"match": "linear", "kind": kind}}})
    assert nn.utils.parametrize.is_parametrized(model[3], "weight")
    assert not nn.utils.parametrize.is_parametrized(model[3], "bias")
    assert not nn.utils.parametrize.is_parametrized(model[0])
    weight = model[3].weight
    if kind == "orthogonal":
        assert torch.allclose(weight @ weight.T, torch.eye(4), atol=1e-5)
    assert model(torch.ones(2, 3, 3, 3)).shape == (2, 4)


@pytest.mark.parametrize("settings", [{"amount": 0.3}, {"amount": 0.7, "globally": True}, {"amount": 60, "globally": True}, {"amount": 0.5, "dim": 0}])
def test_pruned_weights_are_those_of_torch_and_stay_zero(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.save(other_weights(), tmp_path / "weights.pt")
    model, expected = network(), network()
    rule = {"match": ["convolution", "linear"], "kind": "pruned", **settings}
    initialise(model, {"weights": str(tmp_path / "weights.pt"), "parametrisations": {"sparse": rule}})
    expected.load_state_dict(other_weights())
    amount, places = settings["amount"], [(expected[place], "weight") for place in (0, 3)]
    if "globally" in settings:
        prune.global_unstructured(places, prune.L1Unstructured, amount=amount)
    for layer, name in [] if "globally" in settings else places:
        prune.ln_structured(layer, name, amount, 2, 0) if "dim" in settings else prune.l1_unstructured(layer, name, amount)
    assert all(torch.equal(model[place].weight, expected[place].weight) for place in (0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    zeros = {place: model[place].weight == 0 for place in (0, 3)}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3, 3, 3)).square().sum().backward()
        optimizer.step()
    for place, mask in zeros.items():
        assert torch.equal(model[place].weight == 0, mask)
        assert 0 < mask.float().mean() < 1


@pytest.mark.parametrize("settings", [{"kind": "weight_norm"}, {"kind": "lora", "rank": 1}])
@pytest.mark.parametrize("match", ["embedding", "linear", "1.*"])
def test_a_weight_that_layers_share_is_not_parametrised_in_one_of_them(match: str, settings: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=rf"cannot make {settings['kind']} of 0\.weight: it is also 1\.weight, which would then be another weight"):
        initialise(model, {"parametrisations": {"some": {"match": match, **settings}}})


def test_a_layer_that_is_used_twice_is_parametrised_once() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    initialise(model, {"parametrisations": {"some": {"match": "2.*", "kind": "weight_norm"}}})
    assert len(layer.parametrizations.weight) == 1


def test_plain_and_parametrised_weights_both_load_into_a_parametrised_model(tmp_path: Path) -> None:
    settings = {"weights": str(tmp_path / "weights.pt"), "parametrisations": {"head": {"match": "linear", "kind": "weight_norm"}}}
    torch.save(other_weights(), tmp_path / "weights.pt")
    first, second = network(), network()
    initialise(first, settings)
    assert torch.allclose(first[3].weight, other_weights()["3.weight"], atol=1e-6)
    assert nn.utils.parametrize.is_parametrized(first[3], "weight")
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    initialise(second, settings)
    assert same(dict(first.state_dict()), dict(second.state_dict()))
    assert len(second[3].parametrizations.weight) == 1


class Recurrent(nn.Module):
    """Convolutions, a linear layer and recurrent ones, of which torch keeps a list of the weights beside the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn, self.fc = nn.Conv1d(3, 6, 2), nn.LSTM(6, 4, num_layers=2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.rnn(self.conv(x).transpose(1, 2))[0])


@pytest.mark.parametrize("is_trained", [True, False])  # of the layers' biases
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_have_the_bits_of_the_parametrised_ones_and_plain_names(kind: str, is_trained: bool) -> None:
    torch.manual_seed(0)
    model, settings = Recurrent(), {"rank": 2} if kind == "lora" else {}
    initialise(model, {"parametrisations": {"some": {"match": ["*.weight", "rnn.weight_*"], "kind": kind, **settings}}})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained or "bias" not in name)
    model(x := torch.randn(5, 3, 7))  # a recurrent layer's list is of computed weights now
    with torch.no_grad():
        expected = model.eval()(x)
        held = {name: getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]).clone() for name in Recurrent().state_dict()}
        merge(model)
        assert torch.equal(model(x), expected)
        assert same({name: model.state_dict()[name] for name in held}, held)
        plain = Recurrent().eval()
        plain.load_state_dict(model.state_dict())
        assert torch.allclose(plain(x), expected, rtol=1e-4)  # torch has other kernels for an LSTM of which nothing is trained


def test_merging_leaves_alone_another_layer_with_the_same_original() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    before = second.weight.detach().clone()
    merge(nn.Sequential(KINDS["lora"](first, rank=1), second).eval())
    assert torch.equal(first.weight, before)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    KINDS["spectral_norm"](first)
    second.weight = first.parametrizations.weight.original
    before = second.weight.detach().clone()
    merge(nn.Sequential(first, second).eval())
    assert torch.equal(second.weight, before)
    assert not torch.equal(first.weight, before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{"kind": "weight_norm"}, {"kind": "lora", "rank": 2}, {"kind": "spectral_norm"}])
def test_a_parametrised_file_for_a_plain_model_is_called_so_and_loads_when_it_is_merged(tmp_path: Path, settings: dict[str, Any], bias: bool) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.Flatten(), nn.Linear(8, 4, bias=bias))

    file, model, x = tmp_path / "weights.pt", plain(), torch.randn(2, 3, 3, 3)
    initialise(model, {"parametrisations": {"some": {"match": "*.weight", **settings}}})
    torch.save(model.eval().state_dict(), file)
    expected, other = model(x), plain()
    with pytest.raises(ConfigError, match=r"the file is parametrised .* it has no '0\.weight' and 1 more.*samewise export RUN --to safetensors") as caught:
        initialise(other, {"weights": str(file)})
    assert len(caught.value.problems) == 1
    if not bias:
        with pytest.raises(ConfigError, match="the file is parametrised"):  # nothing fits by name
            initialise(other, {"weights": str(file), "strict": False})
    merge(model)
    torch.save(model.state_dict(), file)
    initialise(other, {"weights": str(file)})
    assert torch.equal(other(x), expected)


def test_merged_weights_load_into_a_model_whose_own_class_uses_weight_norm(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3), dim=2), nn.Flatten(), nn.Linear(8, 4))

    first, second, x = normed().eval(), normed(), torch.randn(2, 3, 3, 3)
    expected = first(x)
    merge(first)
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    initialise(second, {"weights": str(tmp_path / "weights.pt")})
    assert nn.utils.parametrize.is_parametrized(second[0], "weight")
    assert torch.allclose(second(x), expected, atol=1e-6)


WRONG = [
    ({"weigths": None}, "initialise.weigths", "did you mean 'weights'"),
    (rules(a={"match": "embedding", "weight": "zeros"}), "initialise.rules.a.match", "matches no parameter"),
    (rules(a={"match": "linear", "weight": {"method": "normal", "sdt": 1}}), "initialise.rules.a.weight.sdt", "did you mean 'std'"),
    (rules(a={"match": "linear", "weight": {"method": "constant"}}), "initialise.rules.a.weight.val", "missing"),
    (rules(a={"weight": "zeros"}), "initialise.rules.a", "not a rule"),
    (rules(a={"match": "*.bias", "weight": "zeros"}), "initialise.rules.a", "no weight among them"),
    (rules(a={"match": "norm", "weight": "orthogonal"}), "initialise.rules.a", r"cannot initialise 1.weight \[8\]"),
    ({"frozen": ["9.*"]}, "initialise.frozen", "matches no parameter"),
    (rules(a={"match": ["linear", "embeding"], "weight": "zeros"}), "initialise.rules.a.match", "did you mean 'embedding'"),
    ({"parametrisations": {"a": {"match": "linear", "kind": "wieght_norm"}}}, "initialise.parametrisations.a.kind", "did you mean 'weight_norm'"),
    ({"parametrisations": {"a": {"match": "norm", "kind": "orthogonal"}}}, "initialise.parametrisations.a", "cannot make orthogonal of 1.weight"),
    ({"parametrisations": {"a": 3}}, "initialise.parametrisations.a", "is not a rule"),
    ({"parametrisations": {"a": {"match": "linear", "kind": "weight_norm", "no": 1}}}, "initialise.parametrisations.a.no", "not an argument"),
    (rules(a=3), "initialise.rules.a", "not a rule"),
    (rules(a={"match": "linear", "weight": {"method": "zeross"}}), "initialise.rules.a.weight.method", "did you mean 'zeros'"),
]


@pytest.mark.parametrize(("settings", "path", "message"), WRONG)
def test_an_invalid_setting_is_reported_at_its_key(settings: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        initialise(network(), settings)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_all_unknown_arguments_of_a_rule_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        initialise(network(), {"parametrisations": {"a": {"match": "linear", "kind": "weight_norm", "no": 1, "nor": 2}}})
    assert [problem.path.rpartition(".")[2] for problem in caught.value.problems] == ["no", "nor"]


def photographs(samples: int, channels: int = 3) -> torch.Tensor:
    """float32[samples, channels, 16, 16]: noise that is correlated between neighbours and channels, with a mean of 0."""
    noise = torch.randn(samples, channels + 1, 18, 18, generator=torch.Generator().manual_seed(0))
    return nn.functional.avg_pool2d(noise, 3, 1)[:, :-1] * 4 + noise[:, -1:, 1:-1, 1:-1]


@pytest.mark.parametrize(("channels", "outputs"), [(3, 24), (3, 12), (1, 8)])
def test_whitened_outputs_are_uncorrelated_with_a_variance_of_one(channels: int, outputs: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, outputs, 2, bias=False))
    rule = {"match": "convolution", "weight": {"method": "whitening", "samples": 64, "eps": 0.0}}
    initialise(model, rules(a=rule), images=lambda samples: photographs(samples, channels))
    seen = model.double()(photographs(64, channels).double()).transpose(0, 1).flatten(1)
    half = channels * 4
    covariance = seen[:half] @ seen[:half].T / seen.shape[1]
    assert torch.allclose(covariance, torch.eye(half, dtype=torch.float64), atol=1e-5)  # to the precision of float32 weights
    assert torch.equal(seen[half:], -seen[:half][: outputs - half])
    matrix = model[0].weight[:half].flatten(1)
    norms = matrix.norm(dim=1)
    assert (norms.diff() > 0).all()  # the direction in which patches differ most comes first, and is scaled down most
    assert (matrix.gather(1, matrix.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize(
    ("layer", "settings", "told"),
    [
        (nn.Conv2d(3, 13, 2), {}, r"a convolution \[n or 2 n, C, h, w\] with n = C h w"),
        (nn.Conv2d(1, 4, 2), {}, r"needs images \[B, 1, H, W\], not \[64, 3, 16, 16\]"),
        (nn.Conv2d(3, 12, 2), {"samples": 0}, "samples must be at least 1"),
        (nn.Conv2d(3, 12, 2), {"sample": 5}, "did you mean 'samples'"),
    ],
)
def test_an_impossible_whitening_is_reported(layer: nn.Module, settings: dict[str, Any], told: str) -> None:
    given = {"match": "convolution", "weight": {"method": "whitening", **settings}}
    with pytest.raises(ConfigError, match=told):
        initialise(nn.Sequential(layer), rules(a=given), images=lambda samples: photographs(64))


def lora(match: str, **settings: Any) -> dict[str, Any]:
    return {"parametrisations": {"lora": {"match": match, "kind": "lora", **settings}}}


def test_steps_match_the_two_small_matrices_written_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)).double()
    images, before = torch.randn(5, 2, 3, 3, dtype=torch.float64), copy.deepcopy(model)
    initialise(model, lora("*.weight", rank=2, alpha=6))
    assert torch.equal(model(images), before(images))
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora" in name}
    weights = {place: before[place].weight.detach() for place in (0, 2)}
    by_hand = {name: value.detach().clone().requires_grad_() for name, value in trained.items()}

    def written_out() -> torch.Tensor:
        made = {
            place: weight
            + 3.0 * (by_hand[f"{place}.parametrizations.weight.0.lora_up"] @ by_hand[f"{place}.parametrizations.weight.0.lora_down"]).reshape(weight.shape)
            for place, weight in weights.items()
        }
        return nn.functional.linear(nn.functional.conv2d(images, made[0], before[0].bias).flatten(1), made[2], before[2].bias)

    groups = parameter_groups(model, {"rest": {"match": ["*.bias"], "frozen": True}})
    optimizer = torch.optim.SGD([parameter for group in groups for _, parameter in group["params"]], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        gradients = torch.autograd.grad(written_out().square().sum(), list(by_hand.values()))
        with torch.no_grad():
            for value, gradient in zip(by_hand.values(), gradients, strict=True):
                value -= 0.1 * gradient
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(trained)
    assert all(torch.allclose(trained[name], by_hand[name], rtol=1e-9, atol=0) for name in trained)
    assert not torch.allclose(model(images), before(images))


@pytest.mark.parametrize(
    ("match", "rank", "message"), [("0.weight", 9, "rank of 9 is not valid: it must be from 1 to 4"), ("1.weight", 2, "it is not a matrix")]
)
def test_a_weight_that_lora_cannot_change_is_reported(match: str, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialise(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), lora(match, rank=rank))
