"""The choices for torchvision's classification models, each torchvision's own; and activations by name, in place of those of any model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
import yaml
from torch import nn
from torchvision.models import get_model_weights, list_models

from samewise.recipes.models.activations import with_activation
from samewise.recipes.models.airbench import Airbench
from samewise.recipes.models.dcgan import DCGAN
from samewise.recipes.models.mlp import MLP
from samewise.recipes.models.resnet import resnet18_small
from samewise.recipes.models.retinanet import retinanet
from samewise.recipes.models.wav2letter import Wav2Letter
from samewise.runner.config import project
from samewise.runner.config.compose import compose
from samewise.runner.config.instantiate import instantiate
from samewise.runner.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
SMALL = (
    "convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 "
    "swin_t swin_v2_t vgg11 vgg11_bn vit_b_16"
)
FAMILIES = dict.fromkeys(SMALL.split(), 32) | {"alexnet": 63, "inception_v3": 75, "maxvit_t": 224}
"""One model of each family, with the smallest image size that it accepts, or one that is small enough."""
QUICK = ("mobilenet_v3_small", "squeezenet1_1")
AUXILIARY = {"inception_v3": 3_326_696, "googlenet": 0}
"""Parameters in the published number that exist only with auxiliary outputs."""


def make(name: str, size: int) -> torch.nn.Module:
    cfg = compose([f"model={name}", "dataset=generated_classification", f"dataset.image_size={size}"], project=project.Project(CONFIGS)).cfg
    return instantiate(cfg.model, "model", allowed=())


def theirs(name: str, size: int) -> torch.nn.Module:
    function: Any = getattr(torchvision.models, name)
    arguments = {"aux_logits": False, "init_weights": False} if name in AUXILIARY else {"image_size": size} if name.startswith("vit") else {}
    return function(num_classes=10, **arguments)


def test_every_torchvision_model_is_a_choice_with_its_number_of_parameters() -> None:
    told, published = {}, {}
    for name in list_models(module=torchvision.models):
        text = (CONFIGS / f"{name}.yaml").read_text()
        assert yaml.safe_load(text)["_target_"] == f"torchvision.models.{name}"
        number = re.search(r"([\d,]+) parameters with 1,000 classes", text.splitlines()[0])
        told[name] = int(number[1].replace(",", "")) if number else 0
        published[name] = {weights.meta["num_params"] - AUXILIARY.get(name, 0) for weights in get_model_weights(name)}  # larger images have larger embeddings
    assert {name: count for name, count in told.items() if count not in published[name]} == {}
    assert len(told) > 75


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow] + [pytest.mark.long] * bool(number % 2)) for number, name in enumerate(FAMILIES)],
)
def test_a_choice_makes_torchvisions_model_and_its_step_repeats_exactly(name: str) -> None:
    """The whole model has gradients, and only from deterministic operators."""
    size = FAMILIES[name]
    model, images = make(name, size), torch.rand(2, 3, size, size)
    own = theirs(name, size)
    own.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images), own.eval()(images))
    torch.use_deterministic_algorithms(True)
    try:
        gradients: list[list[torch.Tensor | None]] = []
        for _ in range(2):
            torch.manual_seed(0)  # for dropout and stochastic depth
            model.train().zero_grad()
            model(images).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(one is not None and other is not None and torch.equal(one, other) for one, other in zip(*gradients, strict=True))


IMAGES, SOUNDS = (torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),), (torch.rand(2, 4, 90), torch.tensor([90, 60]))
MODELS = {
    "airbench": (Airbench, {"widths": (8,)}, IMAGES, F.gelu),
    "resnet": (resnet18_small, {"width": 4}, IMAGES, F.relu),
    "wav2letter": (Wav2Letter, {"num_classes": 3, "num_features": 4, "width": 8, "top_width": 8, "depth": 1, "top_kernel": 4}, SOUNDS, F.relu),
    "mlp": (MLP, {"inputs": 16, "outputs": 2}, IMAGES, F.relu),
    "dcgan": (DCGAN, {"noise": 16, "width": 4}, (IMAGES[0][:, 0, 0],), F.relu),
    "torchvision": (torchvision.models.resnet18, {}, IMAGES, F.relu),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_another_activation_computes_as_if_its_own_were_that_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, settings, inputs, own = MODELS[name]

    def output(**more: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = cls(**settings, **more if name != "torchvision" else {})
        model = with_activation(model, **more) if more and name == "torchvision" else model
        assert not isinstance(model, DCGAN) or isinstance(model.discriminator[1], nn.Tanh if more else nn.LeakyReLU)
        return model.generator(*inputs) if isinstance(model, DCGAN) else model.eval()(*inputs)

    chosen, before = output(activation="tanh"), output()
    assert not torch.equal(chosen, before)
    # Every call of the model's own activation becomes one of tanh
    monkeypatch.setattr(own, "__code__", (lambda input, *args, **named: input.tanh()).__code__) if own is F.relu else None
    if own is F.relu:
        torch.testing.assert_close(chosen, output())


def test_a_detectors_backbone_and_heads_change_but_gates_of_others_stay() -> None:
    detector = retinanet(backbone="resnet18", channels=32, activation="silu")
    kinds = [type(layer) for layer in detector.modules()]
    assert nn.ReLU not in kinds
    assert kinds.count(nn.SiLU) == 9 + 8
    gated = with_activation(torchvision.models.efficientnet_b0(), activation="mish")
    assert {type(layer) for layer in gated.modules()} & {nn.Sigmoid, nn.SiLU, nn.Mish} == {nn.Sigmoid, nn.Mish}


def test_an_unknown_name_and_a_model_without_such_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.activation: is not an activation(.|\n)*did you mean 'silu'"):
        resnet18_small(activation="sillu")
    with pytest.raises(ConfigError, match="Linear has no activation that is a module"):
        with_activation(nn.Linear(2, 2), activation="silu")
