"""RetinaNet against the published facts, and its choices."""

import pytest
import torch
from torch import nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights, RetinaNet_ResNet50_FPN_Weights, retinanet_resnet50_fpn_v2

from samewise.recipes.models.retinanet import retinanet
from samewise.recipes.parts import dense_losses
from samewise.recipes.parts.losses import BinaryCrossEntropy, Focal


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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
