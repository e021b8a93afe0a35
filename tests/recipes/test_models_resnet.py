"""The ResNets for small images, against the paper and against torchvision."""

import pytest
import torch
import torchvision
from torch import nn

from samewise.recipes.models.resnet import PaddedShortcut, resnet18_small, resnet34_small, resnet_cifar, small_image_stem


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "count", "millions"), [(20, 269722, 0.27), (32, 464154, 0.46), (44, 658586, 0.66), (56, 853018, 0.85), (110, 1727962, 1.7)])
def test_the_cifar_networks_have_the_papers_parameters_and_layers(depth: int, count: int, millions: float):
    model = resnet_cifar(depth=depth)
    assert parameters(model) == count
    assert round(count / 1e6, 1 if depth == 110 else 2) == millions
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("resnet18", 11689512), ("resnet34", 21797672), ("resnet50", 25557032), ("resnet101", 44549160)),
        *(("resnet152", 60192808), ("resnext50_32x4d", 25028904), ("resnext101_32x8d", 88791336)),
        *(("resnext101_64x4d", 83455272), ("wide_resnet50_2", 68883240), ("wide_resnet101_2", 126886696)),
    ],
)
def test_torchvisions_networks_have_the_documented_number_of_parameters(name: str, count: int):
    with torch.device("meta"):
        assert parameters(getattr(torchvision.models, name)(weights=None)) == count


def test_the_padded_shortcut_subsamples_and_adds_zeros_on_either_side():
    features = torch.randn(2, 3, 5, 4)
    output = PaddedShortcut(3, 6, stride=2)(features)
    assert output.shape == (2, 6, 3, 2)
    assert torch.equal(output[:, 1:4], features[:, :, ::2, ::2])
    assert not output[:, 0].any()
    assert not output[:, 4:].any()


@pytest.mark.parametrize(("ours", "theirs"), [(resnet18_small, torchvision.models.resnet18), (resnet34_small, torchvision.models.resnet34)])
def test_except_for_the_stem_the_network_equals_torchvisions(ours, theirs):
    small, big = ours(num_classes=10), small_image_stem(theirs(weights=None, num_classes=10))
    small.load_state_dict(big.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(small.eval()(images), big.eval()(images))


def test_convolutions_start_with_kaiming_deviation_by_fan_out():
    torch.manual_seed(0)
    ours = resnet18_small(width=64, num_classes=10)
    for module in ours.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
