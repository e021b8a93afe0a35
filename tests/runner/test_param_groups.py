"""Parameter groups by pattern."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.unfreezing import cautions, waiting


@pytest.fixture
def resnet() -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.resnet18(num_classes=10)


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {group["name"]: group for group in groups}
    assert len(found) == len(groups)
    return found


def torchvision_split(model: nn.Module) -> tuple[set[str], set[str]]:
    """As torchvision's references/classification/utils.py does for norm_weight_decay: walk the modules and check whether each is a norm."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.LocalResponseNorm)
    norms, others = set(), set()
    for place, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            (norms if isinstance(module, kinds) else others).add(f"{place}.{name}")
    return norms, others


@pytest.mark.parametrize(
    ("build", "counts"), [(torchvision.models.resnet50, (106, 55)), (torchvision.models.swin_t, None), (torchvision.models.convnext_tiny, None)]
)
def test_no_decay_on_norms_splits_as_in_torchvisions_references(build: Any, counts: tuple[int, int] | None) -> None:
    with torch.device("meta"):
        model = build()
    groups = by_name(parameter_groups(model, {"norms": {"match": "norm", "weight_decay": 0.0}}))
    norms, others = torchvision_split(model)
    assert (set(names(groups["norms"])), set(names(groups["rest"]))) == (norms, others)
    assert groups["norms"]["weight_decay"] == 0.0
    assert "weight_decay" not in groups["rest"]
    if counts:
        assert (len(norms), len(others)) == counts


def test_without_rules_there_is_one_group_in_the_models_order(resnet: nn.Module) -> None:
    (group,) = parameter_groups(resnet, {})
    assert names(group) == [name for name, _ in resnet.named_parameters()]
    assert [parameter for _, parameter in group["params"]] == list(resnet.parameters())


def test_the_first_rule_that_matches_wins(resnet: nn.Module) -> None:
    rules = {"head": {"match": "fc.*", "lr": 1.0}, "biases": {"match": "bias", "lr": 2.0}, "late": {"match": ["re:^layer[34]", "bn1.*"], "lr": 3.0}}
    groups = by_name(parameter_groups(resnet, rules))
    assert names(groups["head"]) == ["fc.weight", "fc.bias"]
    assert all(name.endswith(".bias") and name != "fc.bias" for name in names(groups["biases"]))
    assert "bn1.weight" in names(groups["late"])
    assert all(name.startswith(("layer3", "layer4", "bn1")) for name in names(groups["late"]))
    assert sum(len(group["params"]) for group in groups.values()) == len(list(resnet.parameters()))


def test_a_class_may_be_named_alone_or_with_any_module_that_exports_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    for pattern in ("type:Linear", "type:torch.nn.Linear", "type:torch.nn.modules.linear.Linear", "linear"):
        assert names(by_name(parameter_groups(model, {"found": {"match": pattern}}))["found"]) == ["2.weight", "2.bias"]
    assert names(by_name(parameter_groups(model, {"found": {"match": "type:_ConvNd"}}))["found"]) == ["0.weight", "0.bias"]


def test_biases_are_found_under_every_name_that_torch_uses() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(2, 2), "attention": nn.MultiheadAttention(2, 1), "conv": nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 1))})
    groups = by_name(parameter_groups(model, {"biases": {"match": "bias"}, "convolutions": {"match": "convolution"}}))
    assert names(groups["biases"]) == ["rnn.bias_ih_l0", "rnn.bias_hh_l0", "attention.in_proj_bias", "attention.out_proj.bias", "conv.bias"]
    assert names(groups["convolutions"]) == ["conv.parametrizations.weight.original0", "conv.parametrizations.weight.original1"]


def test_frozen_parameters_are_in_no_group_and_need_no_gradient(resnet: nn.Module) -> None:
    groups = parameter_groups(resnet, {"body": {"match": r"re:^(?!fc\.)", "frozen": True}})
    assert [names(group) for group in groups] == [["fc.weight", "fc.bias"]]
    assert {name for name, parameter in resnet.named_parameters() if parameter.requires_grad} == {"fc.weight", "fc.bias"}


def test_layer_decay_multiplies_the_learning_rate_of_each_block(resnet: nn.Module) -> None:
    groups = parameter_groups(
        resnet, {"layers": {"layer_decay": 0.5}, "norms": {"match": "norm", "weight_decay": 0.0}, "head": {"match": "fc.*", "lr_factor": 10}}
    )
    factors = {name: group["lr_factor"] for group in groups for name in names(group)}
    assert factors["fc.weight"] == 10
    assert factors["layer4.0.conv1.weight"] == factors["layer4.1.bn2.bias"] == 0.5
    assert factors["layer1.0.conv1.weight"] == 0.5**4
    assert factors["conv1.weight"] == factors["bn1.weight"] == 0.5**5
    assert {group["name"].partition(" ")[0] for group in groups if "weight_decay" in group} == {"norms"}
    assert len({group["name"] for group in groups}) == len(groups)


def test_a_second_layer_decay_is_refused(resnet: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"param_groups\.more: is a second layer-wise decay: 'layers' is one(.|\n)*~param_groups\.layers removes"):
        parameter_groups(resnet, {"layers": {"layer_decay": 0.5}, "more": {"layer_decay": 0.9}})


def test_layer_decay_multiplies_the_rate_and_factor_of_a_rule_too() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    rules = {"layers": {"layer_decay": 0.5}, "first": {"match": "0.*", "lr_factor": 10}, "second": {"match": "1.*", "lr": 0.3}}
    groups = parameter_groups(model, rules)
    assert [(group["name"], group.get("lr"), group.get("lr_factor")) for group in groups] == [
        ("first x 0.25", None, 2.5),
        ("second x 0.5", 0.15, None),
        ("rest x 1", None, 1.0),
    ]


def test_blocks_may_be_nested_and_norms_and_embeddings_belong_to_the_blocks_beside_them() -> None:
    """In a ViT, each layer of the encoder is a block; the embeddings are one together, and the last norm is the last layer's."""
    with torch.device("meta"):
        model = torchvision.models.VisionTransformer(image_size=8, patch_size=4, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3)
    groups = parameter_groups(model, {"layers": {"layer_decay": 0.5, "blocks": ["encoder.layers"]}})
    factors = {name: group["lr_factor"] for group in groups for name in names(group)}
    assert [factors[name] for name in ("heads.head.weight", "encoder.ln.weight")] == [1, 0.5]
    layers = [{factors[name] for name in factors if name.startswith(f"encoder.layers.encoder_layer_{number}.")} for number in range(3)]
    assert layers == [{0.5**3}, {0.5**2}, {0.5}]
    assert {factors[name] for name in ("encoder.pos_embedding", "conv_proj.weight", "class_token")} == {0.5**4}


def test_blocks_that_unfreeze_in_turn_equal_rules_by_name(resnet: nn.Module) -> None:
    def summarise(rules: dict[str, Any]) -> list[Any]:
        return [(one.until, list(map(id, one.parameters)), list(map(id, one.layers))) for one in waiting(resnet, rules, steps_per_epoch=5)]

    order = [["conv1.*", "bn1.*"], "layer1.*", "layer2.*", "layer3.*", "layer4.*"]
    by_name = {f"{place}": {"match": match, "frozen_until": 2 * (5 - place)} for place, match in enumerate(order)}
    assert summarise({"a": {"layer_decay": 1.0, "unfreeze_every": 2}}) == summarise(by_name)
    assert [until for until, *_ in summarise(by_name)] == [10, 20, 30, 40, 50]
    first = {"stem": {"match": ["conv1.*", "bn1.*"], "frozen_until": 1}}
    mixed = summarise(first | {"a": {"layer_decay": 0.5, "unfreeze_every": 2}})
    assert [until for until, *_ in mixed] == [5, 10, 20, 30, 40]
    rules = {"a": {"layer_decay": 1.0, "unfreeze_every": 1}}
    later = waiting(resnet, rules, steps_per_epoch=5)
    found = [cautions(rules, later, steps_per_epoch=5, total_steps=steps) for steps in (25, 26)]
    assert [[problem.path for problem in some] for some in found] == [["param_groups.a.unfreeze_every"], []]


def test_a_part_with_nothing_left_to_train_is_named() -> None:
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    rules = {"a": {"match": "critic.*", "frozen": True}}
    with pytest.raises(ConfigError, match="no parameter below critic is left to train"):
        parameter_groups(model, rules, prefixes=("critic",))
    with pytest.raises(ConfigError, match="no parameter is left to train"):
        parameter_groups(model, {"a": {"match": "*", "frozen": True}})


def tied(*, bias: bool) -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "body": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "out": nn.Linear(3, 4, bias=bias)})
    model["out"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("out.*", ["embed.weight", "out.bias"]),
        ("re:^out", ["embed.weight", "out.bias"]),
        ("linear", ["embed.weight", "body.weight", "body.bias", "out.bias"]),
        ("type:Linear", ["embed.weight", "body.weight", "body.bias", "out.bias"]),
        ("head", ["embed.weight", "out.bias"]),
    ],
)
def test_a_tied_weight_matches_by_each_of_its_names_and_layers(pattern: str, expected: list[str]) -> None:
    groups = by_name(parameter_groups(tied(bias=True), {"some": {"match": pattern}}))
    assert names(groups["some"]) == expected


def test_a_tied_output_layer_without_a_bias_is_the_head() -> None:
    model = tied(bias=False)
    groups = by_name(parameter_groups(model, {"head": {"match": "head"}, "body": {"match": "*", "frozen": True}}))
    assert {name: names(group) for name, group in groups.items()} == {"head": ["embed.weight"]}


def test_a_weight_that_two_phases_share_is_trained_by_both() -> None:
    model = tied(bias=True)
    assert [names(group) for group in parameter_groups(model, {}, prefixes=("embed", "body"))] == [["embed.weight", "body.weight", "body.bias"]]
    assert [names(group) for group in parameter_groups(model, {}, prefixes=("norm", "out"))] == [["embed.weight", "norm.weight", "norm.bias", "out.bias"]]


def test_a_phase_gets_its_share_while_rules_see_the_whole_model() -> None:
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "generator2": nn.Linear(2, 2), "critic": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))})
    rules = {"norms": {"match": "norm", "weight_decay": 0.0}}
    assert [names(group) for group in parameter_groups(model, rules, prefixes=("generator",))] == [["generator.weight", "generator.bias"]]
    assert set(by_name(parameter_groups(model, rules, prefixes=("critic",)))) == {"rest", "norms"}
    with pytest.raises(ConfigError, match=r"no part 'critc'(.|\n)*did you mean 'critic'"):
        parameter_groups(model, rules, prefixes=("critc",))


WRONG = [
    ({"a": {"match": "layer4", "lr": 1}}, "param_groups.a.match", r"did you mean 'layer4\.\*'"),
    ({"a": {"match": "embedding"}}, "param_groups.a.match", "the model has none"),
    ({"a": {"match": "re:("}}, "param_groups.a.match", "not a valid regular expression"),
    ({"a": {"match": 3}}, "param_groups.a.match", "not a pattern"),
    ({"a": "norm"}, "param_groups.a", "not a rule"),
    ({"a": {"match": "norm", "frozen": "yes"}}, "param_groups.a.frozen", "true or false"),
    ({"a": {"match": "norm", "lr_factor": 1, "lr": 1}}, "param_groups.a", "both lr and lr_factor"),
    ({"a": {"match": "re:.", "frozen": True}}, "param_groups", "no parameter is left to train"),
    ({"a": {"match": ["layer5.*", "embedding"]}}, "param_groups.a.match", r"did you mean 'layer\d\.\*'"),
    ({"a": {"match": ["fc.*", "type:Conv3d"]}}, "param_groups.a.match", "did you mean 'type:Conv2d'"),
    ({"a": {"match": "type:torch.optim.Linear"}}, "param_groups.a.match", "did you mean 'type:Linear'"),
    ({"a": {"match": "norm", "lr_factor": True}}, "param_groups.a.lr_factor", "at least 0"),
    ({"a": {"layer_decay": -0.5}}, "param_groups.a", "layer-wise decay"),
    ({"a": {"layer_decay": 0.5, "unfreeze_every": 0}}, "param_groups.a.unfreeze_every", "a whole number of at least 1"),
    ({"a": {"layer_decay": 0.5, "blocks": ["layer5"]}}, "param_groups.a.blocks", r"did you mean 'layer\d'"),
    ({"a": {"match": "norm", "frozen_statistics": "train"}}, "param_groups.a.frozen_statistics", "does not freeze anything"),
]


def test_in_a_list_a_kind_or_an_expression_may_match_nothing(resnet: nn.Module) -> None:
    groups = by_name(parameter_groups(resnet, {"a": {"match": ["embedding", "re:^heads", "fc.*"]}}))
    assert names(groups["a"]) == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(("rules", "path", "message"), WRONG)
def test_an_invalid_rule_is_reported_with_the_nearest_name(resnet: nn.Module, rules: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parameter_groups(resnet, rules)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_rule_that_cannot_freeze_all_it_matches_is_refused(resnet: nn.Module) -> None:
    norms, layer = {"match": "norm", "weight_decay": 0.0}, {"match": "layer1.*", "frozen": True}
    with pytest.raises(ConfigError, match=r"would not freeze all that it matches: 'norms' comes first and matches layer1\.0\.bn1\.weight"):
        parameter_groups(resnet, {"norms": norms, "first": layer})
    parameter_groups(resnet, {"first": layer, "norms": norms})
    assert not any(parameter.requires_grad for name, parameter in resnet.named_parameters() if name.startswith("layer1."))


@pytest.mark.parametrize(("name", "head"), [("vgg11", "classifier.6"), ("mobilenet_v3_small", "classifier.3"), ("vit_b_16", "heads.head")])
def test_the_head_is_the_last_layer_of_a_model_whatever_its_name(name: str, head: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=7)
    (group,) = parameter_groups(model, yaml.safe_load((Path(__file__).parents[2] / "configs" / "param_groups" / "head_only.yaml").read_text()))
    assert (group["name"], names(group)) == ("head", [f"{head}.weight", f"{head}.bias"])


CHOICES = sorted(path for path in (Path(__file__).parents[2] / "configs" / "param_groups").glob("*.yaml") if path.stem != "lora")


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_every_choice_fits_a_resnet(path: Path, resnet: nn.Module) -> None:
    groups = parameter_groups(resnet, yaml.safe_load(path.read_text()))
    trained = sum(len(group["params"]) for group in groups)
    assert trained == (2 if path.stem == "head_only" else len(list(resnet.parameters())))
    assert (len(groups) > 1) == (path.stem not in ("none", "head_only"))
