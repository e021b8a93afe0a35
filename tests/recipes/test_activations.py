"""Activations by name: in samewise's models, and in place of those of any other."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from samewise.recipes.models.activations import with_activation
from samewise.recipes.models.airbench import Airbench
from samewise.recipes.models.dcgan import DCGAN
from samewise.recipes.models.mlp import MLP
from samewise.recipes.models.resnet import resnet18_small
from samewise.recipes.models.retinanet import retinanet
from samewise.recipes.models.wav2letter import Wav2Letter
from samewise.runner.errors import ConfigError

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
