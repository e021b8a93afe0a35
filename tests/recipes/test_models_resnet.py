"""The ResNets, airbench's network and RetinaNet, against their papers and against torchvision."""

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights, RetinaNet_ResNet50_FPN_Weights, retinanet_resnet50_fpn_v2

from samewise.recipes.models.airbench import Airbench
from samewise.recipes.models.resnet import PaddedShortcut, resnet18_small, resnet34_small, resnet_cifar, small_image_stem
from samewise.recipes.models.retinanet import retinanet
from samewise.recipes.parts import dense_losses
from samewise.recipes.parts.losses import BinaryCrossEntropy, Focal


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "count", "millions"), [(20, 269722, 0.27), (32, 464154, 0.46), (44, 658586, 0.66), (56, 853018, 0.85), (110, 1727962, 1.7)])
def test_the_cifar_networks_have_the_papers_parameters_and_layers(depth: int, count: int, millions: float):
    model = resnet_cifar(depth=depth)
    assert parameters(model) == count
    assert round(count / 1e6, 1 if depth == 110 else 2) == millions
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth


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


@pytest.mark.parametrize(
    ("settings", "published"),
    # the source's tables: operations of a whole training, forwards and backwards, over the number of images in it
    [({}, 0.29e15 / (8 * 50_000)), ({"widths": [128, 384, 384]}, 1.4e15 / (15 * 50_000))],
)
def test_it_takes_the_published_number_of_operations(settings: dict[str, list[int]], published: float):
    with torch.device("meta"):
        model = Airbench(**settings)
        counter = FlopCounterMode(display=False)
        with counter:
            model(torch.empty(1, 3, 32, 32)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(published, rel=0.05)


def test_it_has_the_documented_number_of_parameters():
    assert sum(parameter.numel() for parameter in Airbench().parameters()) == 1_972_792


def test_convolutions_initially_pass_on_inputs_and_the_head_has_deviation_one():
    torch.manual_seed(0)
    model = Airbench()
    image = torch.randn(1, 24, 5, 5)
    convolution = model.get_submodule("blocks.0.conv1")
    assert isinstance(convolution, nn.Conv2d)
    assert torch.equal(convolution(image)[:, :24], image)
    assert model.head.weight.std().item() == pytest.approx(1.0, rel=1e-6)


def test_version_1_has_the_published_number_of_parameters():
    assert parameters(retinanet(norm="frozen_batch", trainable_layers=3)) == 34_014_999 == RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["num_params"]


def test_version_2_has_the_published_number_of_parameters_and_torchvisions_names():
    ours = retinanet(version=2, norm="batch", trainable_layers=3)
    assert parameters(ours) == 38_198_935 == RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["num_params"]
    theirs = retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None).state_dict()
    assert {name: value.shape for name, value in ours.state_dict().items()} == {name: value.shape for name, value in theirs.items()}
    assert ours.head.regression_head._loss_type == "giou"


@pytest.mark.parametrize(
    "options", [{"box_loss": kind} for kind in ("l1", "smooth_l1", "giou", "diou", "ciou")] + [{"resize_in_training": True}, {"class_loss": Focal()}]
)
def test_the_losses_without_device_waits_equal_torchvisions(options: dict[str, object]):
    torch.manual_seed(0)
    given = {"resize_in_training": False, "min_size": 48, "max_size": 80, "channels": 32, "num_classes": 4, "stages": (3, 4), **options}
    model = retinanet(backbone="resnet18", anchor_sizes=[(16, 24)] * 4, **given).double().train()
    images = [torch.rand(3, 64, 48).double(), torch.rand(3, 40, 64).double(), torch.rand(3, 64, 64).double()]
    boxes = [torch.tensor([[2.0, 3, 30, 28], [5, 5, 20, 44], [1, 1, 2, 2]]), torch.zeros(0, 4), torch.tensor([[10.0, 12, 60, 62]])]
    targets = [{"boxes": one.double(), "labels": torch.tensor([1, 3, 2][: len(one)], dtype=torch.int64)} for one in boxes]
    found = []
    for losses in (lambda: TorchvisionRetinaNet.forward(model, images, targets), lambda: dense_losses.losses(model, images, targets)):
        model.zero_grad()
        given_losses = losses()
        sum(given_losses.values()).backward()
        found.append((given_losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)
    if chosen := model.eval().class_loss:
        ours, _ = model.losses_and_detections(images, targets)
        model.class_loss = None
        torch.testing.assert_close(ours, model.losses_and_detections(images, targets)[0], rtol=1e-9, atol=1e-11)
        model.class_loss = BinaryCrossEntropy(positive_weight=[2.0] * 4)
        assert model.losses_and_detections(images, targets)[0]["classification"] > ours["classification"]
        model.class_loss = chosen
    targets[0]["boxes"][2, 2:] = 1
    assert all(loss.isnan() for loss in dense_losses.losses(model, images, targets).values())
