"""wav2vec 2.0 and HuBERT from Hugging Face's transformers, with CTC.

It needs samewise's extra `transformers`, and does not use its loading of weights.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from samewise.recipes.models.wav2letter import length_after_all
from samewise.recipes.models.wav2vec2 import put_last, require_waveforms
from samewise.runner.errors import ConfigError, Problem, nearest

ENCODERS: Final = {
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC"),
    "hubert": ("HubertConfig", "HubertForCTC"),
}
OURS: Final = frozenset(
    {
        "vocab_size",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "ctc_loss_reduction",
        "ctc_zero_infinity",
    }
)
"""Settings of transformers that have no effect here, or are `num_classes`."""
COMPUTED_WITH: Final = (
    *(
        "hidden_act",
        "num_attention_heads",
        "layer_norm_eps",
        "feat_extract_norm",
        "feat_extract_activation",
        "conv_stride",
        "conv_bias",
        "do_stable_layer_norm",
    ),
    *(
        "num_conv_pos_embedding_groups",
        "feat_proj_layer_norm",
        "conv_pos_batch_norm",
        "add_adapter",
        "adapter_stride",
    ),
)
"""Settings that change what is computed with the same weights."""


def make_model(
    config_class: str,
    model_class: str,
    settings: Mapping[str, Any] | None,
    *,
    ours: Collection[str],
    **fixed: Any,
) -> tuple[Any, nn.Module]:
    """Make a model of transformers, and its config.

    Args:
        config_class: Its class's name.
        model_class: The model's.
        settings: Settings of the config.
        ours: Those that have no effect here.
        fixed: Settings in their place.

    Raises:
        ConfigError: transformers is not installed, or has no such setting.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            Problem(
                "",
                "needs the package transformers, which is not installed",
                model_class,
                hint="pip install '.[transformers]' in samewise's folder",
            )
        ) from None
    config: Any = getattr(transformers, config_class)
    allowed = [
        name
        for name in config.__annotations__
        if not name.startswith("_") and name not in ours and name != "model_type"
    ]
    options = dict(settings or {})
    # transformers also accepts other settings, such as a kernel to download
    ConfigError.raise_all(
        Problem(
            f"settings.{name}",
            f"is not a setting of {config_class}",
            options[name],
            hint=nearest(name, allowed),
        )
        for name in options
        if name not in allowed
    )
    made_config = config(attn_implementation="sdpa", **fixed, **options)
    return made_config, getattr(transformers, model_class)(made_config)


def setting_problems(
    config: Any, names: Iterable[str], checkpoint: Mapping[str, Any], *, encoder: str
) -> list[Problem]:
    """Return the settings of a checkpoint with which the same weights compute something else.

    Args:
        config: The model's config.
        names: Settings that change what is computed.
        checkpoint: The checkpoint's config.json.
        encoder: The kind of model.
    """
    if checkpoint.get("model_type", encoder) != encoder:
        return [
            Problem(
                "model.encoder",
                "differs from the checkpoint's",
                encoder,
                str(checkpoint["model_type"]),
            )
        ]
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name in names
        if (value := getattr(config, name, None)) is not None
    }
    return [
        Problem(
            f"model.settings.{name}",
            "differs from the checkpoint's",
            value,
            str(checkpoint[name]),
            f"++model.settings.{name}={checkpoint[name]}",
        )
        for name, value in plain.items()
        if checkpoint.get(name, value) != value
    ]


@final
class TransformersCTC(nn.Module):
    """An encoder of transformers with CTC: float32[B, 1, T] to logits float32[B, num_classes, K].

    Layers and names are those of transformers' Wav2Vec2ForCTC or HubertForCTC. Sources: Baevski et
    al. 2020, wav2vec 2.0, arXiv 2006.11477; Hsu et al. 2021, HuBERT, arXiv 2106.07447.

    As with transformers' own processors, the encoder masks padding only with `feat_extract_norm:
    layer`: models with `group` were trained on zeros after each utterance, and take them for
    silence. Its SpecAugment, masks over features in training, draws from the run's streams.

    Args:
        encoder: "wav2vec2" or "hubert".
        num_classes: Number of letters, plus the blank.
        settings: Settings of transformers' Wav2Vec2Config or HubertConfig; the defaults are theirs,
            the base model.

    Raises:
        ConfigError: transformers is not installed, or has no such setting.
    """

    def __init__(
        self,
        *,
        encoder: Literal["wav2vec2", "hubert"],
        num_classes: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        config_class, model_class = ENCODERS[encoder]
        self.config, model = make_model(
            config_class, model_class, settings, ours=OURS, vocab_size=num_classes
        )
        self._encoder = encoder
        # Under the model's own names, so that its published weights fit
        for name, part in model.named_children():
            self.add_module(name, part)
        if self.config.do_stable_layer_norm:
            put_last(self.get_submodule(f"{encoder}.encoder"), "layer_norm")

    def forward(self, features: Tensor, length: Tensor) -> Tensor:
        """Return logits float32[B, num_classes, K].

        Args:
            features: float32[B, 1, T], waveforms.
            length: int64[B], samples of each waveform without padding.
        """
        require_waveforms(features, self.convolutions())
        waveforms, inside = features[:, 0], None
        if self.config.feat_extract_norm == "layer":
            inside = (
                torch.arange(features.shape[2], device=length.device) < length[:, None]
            ).long()
        if (
            self.training
            and self.config.apply_spec_augment
            and self.config.mask_time_prob > 0
            and (frames := int(self.output_lengths(torch.tensor(features.shape[2]))))
            <= self.config.mask_time_length
        ):
            raise ConfigError(
                Problem(
                    "model.settings.mask_time_length",
                    f"is too long: the longest recording of a batch gives only {frames} frames",
                    self.config.mask_time_length,
                    f"less than {frames}",
                    "++model.settings.mask_time_prob=0.0 for recordings as short as that",
                )
            )
        hidden = self.get_submodule(self._encoder)(
            waveforms, attention_mask=inside
        ).last_hidden_state
        return self.lm_head(self.dropout(hidden)).transpose(1, 2)

    def output_lengths(self, length: Tensor) -> Tensor:
        """Return the number of output frames without padding, int64[B]."""
        return length_after_all(self.convolutions(), length)

    def convolutions(self) -> list[nn.Conv1d]:
        """Return the layers that turn samples into frames, in order."""
        extractor: Any = self.get_submodule(f"{self._encoder}.feature_extractor")
        return [layer.conv for layer in extractor.conv_layers]

    def checkpoint_problems(self, config: Mapping[str, Any]) -> list[Problem]:
        """Return a checkpoint's settings with which the same weights compute something else."""
        return setting_problems(self.config, COMPUTED_WITH, config, encoder=self._encoder)
