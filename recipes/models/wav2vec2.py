"""wav2vec 2.0 and HuBERT with CTC: torchaudio's encoder with the speech recipe's interface."""

from collections.abc import Sequence
from typing import Literal, cast, final

from torch import Tensor, nn
from torchaudio.models import Wav2Vec2Model, wav2vec2_model

from samewise.recipes.models.wav2letter import length_after_all, shortest_input
from samewise.runner.errors import ConfigError, DataError, Problem


@final
class Wav2Vec2(Wav2Vec2Model):
    """An encoder of torchaudio with CTC: float32[B, 1, T] to logits float32[B, num_classes, K].

    Sources: Baevski et al. 2020, wav2vec 2.0, arXiv 2006.11477; Hsu et al. 2021, HuBERT, arXiv
    2106.07447. Both are one network, pretrained in different ways; layers and names are
    torchaudio's, so that its published weights fit. The arguments are those of
    `torchaudio.models.wav2vec2_model`, except for `num_classes`, its `aux_num_out`.

    The encoder masks padding; the convolutions before it do not. With
    `extractor_mode="group_norm"`, an utterance's first normalisation includes the padding, as it
    did when the weights were trained.

    Args:
        num_classes: Number of letters, plus the blank.
        extractor_mode: "group_norm" after the first convolution (base, large), or "layer_norm"
            after each (large_lv60k, XLSR, HuBERT large and xlarge).
        extractor_conv_layer_config: (channels, kernel, stride) of each convolution; None: the
            published seven, a frame for every 320 samples.
        extractor_conv_bias: Whether these convolutions have biases.
        encoder_embed_dim: Width of the transformer.
        encoder_projection_dropout: Dropout before the transformer.
        encoder_pos_conv_kernel: Frames in the kernel of the convolution for positions.
        encoder_pos_conv_groups: Groups of the convolution for positions.
        encoder_num_layers: Number of layers of the transformer.
        encoder_num_heads: Attention heads of each layer.
        encoder_attention_dropout: Dropout of attention's weights.
        encoder_ff_interm_features: Width between the two linear layers of each layer.
        encoder_ff_interm_dropout: Dropout between these two linear layers.
        encoder_dropout: Dropout of each layer's output.
        encoder_layer_norm_first: Whether each layer normalises its input rather than its output.
        encoder_layer_drop: Probability that a layer is left out of a training step.
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
            else [
                cast("tuple[int, int, int]", tuple(layer)) for layer in extractor_conv_layer_config
            ]
        )
        model = wav2vec2_model(
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
        super().__init__(model.feature_extractor, model.encoder, model.aux)
        if encoder_layer_norm_first:
            put_last(model.encoder.transformer, "layer_norm")

    def forward(self, features: Tensor, length: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits float32[B, num_classes, K].

        Args:
            features: float32[B, 1, T], waveforms.
            length: int64[B], samples of each waveform without padding.

        Raises:
            ConfigError: The features are not waveforms.
            DataError: All waveforms are shorter than a frame.
        """
        require_waveforms(features, self.convolutions())
        logits, _ = super().forward(features[:, 0], length)
        return logits.transpose(1, 2)

    def output_lengths(self, length: Tensor) -> Tensor:
        """Return the number of output frames without padding, int64[B]."""
        return length_after_all(self.convolutions(), length)

    def convolutions(self) -> list[nn.Conv1d]:
        """Return the layers that turn samples into frames, in order."""
        return [layer.conv for layer in self.feature_extractor.conv_layers]


def put_last(module: nn.Module, name: str) -> None:
    """Register a child after other children, where it is used."""
    # Layer-wise learning rates follow the order; norms that end a stack are created before it
    child = module.get_submodule(name)
    delattr(module, name)
    setattr(module, name, child)


def require_waveforms(features: Tensor, convolutions: Sequence[nn.Conv1d]) -> None:
    """Raise an error unless a batch has waveforms from which convolutions make a frame.

    Raises:
        ConfigError: The features are not waveforms [B, 1, T].
        DataError: The longest waveform is too short.
    """
    shortest = shortest_input(convolutions)
    if features.dim() != 3 or features.shape[1] != 1:
        raise ConfigError(
            Problem(
                "transforms",
                "give features, but the model reads waveforms",
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
