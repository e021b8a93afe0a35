"""wav2vec 2.0 and HuBERT with CTC: torchaudio's encoder, with the interface of the speech recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, final

import torch
from torch import Tensor, nn
from torchaudio.models import Wav2Vec2Model, wav2vec2_model

from samewise.runner.errors import ConfigError, DataError, Problem


@final
class Wav2Vec2(Wav2Vec2Model):
    """Waveforms float32[B, 1, T] to logits float32[B, num_classes, K] (A. Baevski et al.: wav2vec
    2.0, arXiv 2006.11477; W.-N. Hsu et al., arXiv 2106.07447).

    Both are one network, trained in different ways beforehand; layers and names are torchaudio's,
    so that its published weights fit. The arguments are those of
    `torchaudio.models.wav2vec2_model`, but for `num_classes`, which is its `aux_num_out`. The
    encoder is told what is padding; the convolutions before it are not, and with
    `extractor_mode="group_norm"` an utterance's first normalisation counts the padding in, as it
    did where the weights were trained.

    Args:
        num_classes: Letters, and the blank.
        extractor_mode: "group_norm" after the first convolution (base, large), or "layer_norm"
            after each (large_lv60k, XLSR, HuBERT large and xlarge).
        extractor_conv_layer_config: (channels, kernel, stride) of each convolution; None: the
            published seven, a frame every 320 samples.
        extractor_conv_bias: Whether these convolutions have biases.
        encoder_embed_dim: The width of the transformer.
        encoder_projection_dropout: The dropout before the transformer.
        encoder_pos_conv_kernel: Frames that the convolution for positions sees.
        encoder_pos_conv_groups: Groups of the convolution for positions.
        encoder_num_layers: Layers of the transformer.
        encoder_num_heads: Attention heads of each layer.
        encoder_attention_dropout: The dropout of attention's weights.
        encoder_ff_interm_features: The width between the two linear layers of each layer.
        encoder_ff_interm_dropout: The dropout between these two linear layers.
        encoder_dropout: The dropout of what each layer gives.
        encoder_layer_norm_first: Whether each layer normalises what goes in, rather than what comes
            out.
        encoder_layer_drop: The probability that a layer is left out of a training step.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        extractor_mode: Literal["group_norm", "layer_norm"] = "group_norm",
        extractor_conv_layer_config: Sequence[Sequence[int]] | None = None,
        extractor_conv_bias: bool = False,
        encoder_embed_dim: int = 768,
        encoder_projection_dropout: float = 0.1,
        encoder_pos_conv_kernel: int = 128,
        encoder_pos_conv_groups: int = 16,
        encoder_num_layers: int = 12,
        encoder_num_heads: int = 12,
        encoder_attention_dropout: float = 0.1,
        encoder_ff_interm_features: int = 3072,
        encoder_ff_interm_dropout: float = 0.1,
        encoder_dropout: float = 0.1,
        encoder_layer_norm_first: bool = False,
        encoder_layer_drop: float = 0.1,
    ) -> None:
        shapes = (
            None
            if extractor_conv_layer_config is None
            else [cast("tuple[int, int, int]", tuple(one)) for one in extractor_conv_layer_config]
        )
        made = wav2vec2_model(
            extractor_mode=extractor_mode,
            extractor_conv_layer_config=shapes,
            extractor_conv_bias=extractor_conv_bias,
            encoder_embed_dim=encoder_embed_dim,
            encoder_projection_dropout=encoder_projection_dropout,
            encoder_pos_conv_kernel=encoder_pos_conv_kernel,
            encoder_pos_conv_groups=encoder_pos_conv_groups,
            encoder_num_layers=encoder_num_layers,
            encoder_num_heads=encoder_num_heads,
            encoder_attention_dropout=encoder_attention_dropout,
            encoder_ff_interm_features=encoder_ff_interm_features,
            encoder_ff_interm_dropout=encoder_ff_interm_dropout,
            encoder_dropout=encoder_dropout,
            encoder_layer_norm_first=encoder_layer_norm_first,
            encoder_layer_drop=encoder_layer_drop,
            aux_num_out=num_classes,
        )
        super().__init__(made.feature_extractor, made.encoder, made.aux)
        if encoder_layer_norm_first:
            put_last(made.encoder.transformer, "layer_norm")

    def forward(self, features: Tensor, length: Tensor) -> Tensor:  # type: ignore[override]
        """`length` is int64[B], the samples of each waveform without padding."""
        require_waveforms(features, int(self.shortest()))
        logits, _ = super().forward(features[:, 0], length)
        return logits.transpose(1, 2)

    def output_lengths(self, length: Tensor) -> Tensor:
        """int64[B]: the number of output frames without padding."""
        for layer in self.feature_extractor.conv_layers:
            length = (
                torch.div(length - layer.kernel_size, layer.stride, rounding_mode="floor") + 1
            ).clamp(min=0)
        return length

    def shortest(self) -> int:
        """The number of samples for one frame."""
        needed = 1
        for layer in reversed(self.feature_extractor.conv_layers):
            needed = (needed - 1) * layer.stride + layer.kernel_size
        return needed


def put_last(module: nn.Module, name: str) -> None:
    """Register a child after the others, where it is used: layer-wise learning rates follow the
    order. Norms that end a stack are created before it.
    """
    child = module.get_submodule(name)
    delattr(module, name)
    setattr(module, name, child)


def require_waveforms(features: Tensor, shortest: int) -> None:
    """Refuse anything but a batch of waveforms long enough for a frame.

    Raises:
        ConfigError: the features are not waveforms [B, 1, T].
        DataError: the longest is shorter than `shortest` samples.
    """
    if features.dim() != 3 or features.shape[1] != 1:
        words = "give features, but the model reads waveforms"
        raise ConfigError(
            Problem(
                "transforms",
                words,
                list(features.shape),
                "[batch, 1, samples]",
                "transforms=waveform",
            )
        )
    if features.shape[2] < shortest:
        raise DataError(
            Problem(
                "dataset",
                "the recordings of a batch are too short for the model",
                f"{features.shape[2]} samples",
                f"at least {shortest}",
            )
        )
