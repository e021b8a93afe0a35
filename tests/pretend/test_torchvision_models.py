"""Torchvision's classification models on a CUDA device in strict mode: each gives the same gradients twice, or is refused by the name of its operator."""

from typing import Any

import pytest
import torch
import torchvision
from pretended_cuda.repeated import require_repeatable

pytestmark = [pytest.mark.slow, pytest.mark.any_cuda, pytest.mark.usefixtures("cuda")]
SIZES = {"inception_v3": 75, "maxvit_t": 224}
STRICT = (
    *("convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2"),
    *("mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vit_b_16"),
)


def step(name: str, size: int) -> None:
    function: Any = getattr(torchvision.models, name)
    settings = {"aux_logits": False, "init_weights": False} if name in ("inception_v3", "googlenet") else {"image_size": size} if name == "vit_b_16" else {}
    require_repeatable(function(num_classes=5, **settings), torch.rand(2, 3, size, size))


@pytest.mark.parametrize("name", STRICT)
def test_a_family_has_only_deterministic_operators(name: str) -> None:
    step(name, SIZES.get(name, 32))


@pytest.mark.parametrize("name", ["alexnet", "vgg11"])
def test_a_family_with_adaptive_pooling_is_refused_naming_the_operator(name: str) -> None:
    with pytest.raises(RuntimeError, match="adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation"):
        step(name, 64)
