"""Models of torchvision, timm, transformers and torchaudio on a CUDA device in strict mode: each gives the same gradients twice, or is refused by the name of its operator."""

from typing import Any

import pytest
import torch
import torchvision
from pretended_cuda.repeated import require_repeatable

from samewise.recipes.models.timm_models import timm_model
from samewise.recipes.models.transformers_ctc import TransformersCTC
from samewise.recipes.models.wav2vec2 import Wav2Vec2

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


TIMM = ("test_vit", "test_convnext", "test_resnet", "test_efficientnet", "test_byobnet", "test_mambaout", "mobilenetv3_small_050", "deit_tiny_patch16_224")
REFUSED = {"csatv2": "adaptive_avg_pool2d_backward_cuda", "sam2_hiera_tiny": "upsample_bicubic2d_backward_out_cuda"}
CONVOLUTIONS: dict[str, Any] = {"conv_dim": [8, 8, 8], "conv_kernel": [10, 8, 4], "conv_stride": [5, 4, 4]}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_conv_pos_embeddings": 4}


@pytest.mark.parametrize("name", TIMM)
def test_a_family_of_timms_has_only_deterministic_operators(name: str) -> None:
    require_repeatable(timm_model(name, num_classes=5, image_size=64), torch.rand(2, 3, 64, 64))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_another_operator_is_refused_naming_the_operator(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{REFUSED[name]} does not have a deterministic implementation"):
        require_repeatable(timm_model(name, num_classes=5, image_size=64), torch.rand(2, 3, 64, 64))


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("encoder", ["wav2vec2", "hubert"])
def test_transformers_encoders_have_only_deterministic_operators(encoder: Any, norm: str) -> None:
    settings = {**SMALL, **CONVOLUTIONS, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": norm, "mask_time_length": 2, "mask_time_prob": 0.5}
    require_repeatable(TransformersCTC(encoder=encoder, num_classes=5, settings=settings), torch.randn(2, 1, 900), torch.tensor([900, 500]))


@pytest.mark.parametrize("mode", ["group_norm", "layer_norm"])
def test_torchaudios_encoders_have_only_deterministic_operators(mode: Any) -> None:
    sizes: dict[str, Any] = {"encoder_embed_dim": 16, "encoder_num_layers": 2, "encoder_num_heads": 2, "encoder_ff_interm_features": 16}
    shapes = [list(one) for one in zip(*CONVOLUTIONS.values(), strict=True)]
    model = Wav2Vec2(num_classes=5, extractor_mode=mode, extractor_conv_layer_config=shapes, encoder_pos_conv_kernel=4, encoder_pos_conv_groups=2, **sizes)
    require_repeatable(model, torch.randn(2, 1, 900), torch.tensor([900, 500]))
