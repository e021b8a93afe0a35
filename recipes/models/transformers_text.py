"""Classifiers of texts from Hugging Face's transformers, such as BERT.

They need samewise's extra `transformers`, and do not use its loading of weights.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, final

from torch import Tensor, nn

from samewise.recipes.models.transformers_ctc import make_model, setting_problems
from samewise.runner.errors import Problem

ENCODERS: Final = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "electra": "Electra",
}
"""Beginnings of the names of transformers' classes."""
_OURS: Final = frozenset({"vocab_size", "is_decoder", "add_cross_attention", "use_cache"})
_COMPUTED_WITH: Final = (
    *("hidden_act", "activation", "num_attention_heads", "n_heads", "layer_norm_eps"),
    *("pad_token_id", "embedding_size", "sinusoidal_pos_embds"),
)


@final
class TransformersClassifier(nn.Module):
    """Tokens int64[B, N], -1 after a text's end, to logits float32[B, num_classes].

    The module `model` is transformers' model for sequence classification, with its names of
    weights. Source: Devlin et al. 2018, BERT, arXiv 1810.04805.

    Args:
        encoder: A key of `ENCODERS`, as `model_type` in a checkpoint's config.json.
        vocabulary: Number of tokens.
        num_classes: Number of classes.
        settings: Settings of transformers' BertConfig, or the encoder's; the defaults are theirs,
            the base model.

    Raises:
        ConfigError: transformers is not installed, or has no such setting.
    """

    def __init__(
        self,
        *,
        encoder: Literal["bert", "roberta", "xlm-roberta", "distilbert", "electra"],
        vocabulary: int,
        num_classes: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        begin = ENCODERS[encoder]
        self.config, self.model = make_model(
            f"{begin}Config",
            f"{begin}ForSequenceClassification",
            settings,
            ours=_OURS,
            vocab_size=vocabulary,
            num_labels=num_classes,
        )
        self._encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.clamp(min=0), attention_mask=(tokens >= 0).long()).logits

    def checkpoint_problems(self, config: Mapping[str, Any]) -> list[Problem]:
        """Return a checkpoint's settings with which the same weights compute something else."""
        return setting_problems(self.config, _COMPUTED_WITH, config, encoder=self._encoder)
