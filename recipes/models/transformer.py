"""A transformer encoder for texts, as a language model or a classifier.

Source: Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762; as in Radford et al. 2019,
Language Models are Unsupervised Multitask Learners (GPT-2), norms come first in each residual
branch, positions are learned, and logits of tokens use the weights of the tokens' embedding.
"""

import math
from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn

from samewise.recipes.models.activations import activation_function
from samewise.runner.errors import ConfigError, Problem


@final
class Transformer(nn.Module):
    """Tokens int64[B, N], -1 after a text's end, to logits.

    Weights begin as GPT-2's: normal with a standard deviation of 0.02, divided by sqrt(2 depth) for
    the last layer of each residual branch, and biases of zero.

    Args:
        objective: "causal": logits float32[B, N, vocabulary] depend on each token and those before
            it; "masked": they depend on all tokens; "classes": logits float32[B, num_classes] are
            linear in the mean over a text's tokens.
        vocabulary: Number of tokens.
        length: Most tokens of a text.
        num_classes: Number of classes, for the objective "classes".
        width: Size of the vector of each token.
        depth: Number of layers.
        heads: Number of attention heads.
        hidden: Width of the feed-forward layers; None: four times `width`.
        dropout: Probability.
        activation: The name of a function in torch.nn.functional, such as silu.
        bias: Whether layers have biases.

    Raises:
        ConfigError: `width` is no multiple of `heads`.
    """

    def __init__(
        self,
        *,
        objective: Literal["causal", "masked", "classes"],
        vocabulary: int,
        length: int,
        num_classes: int = 2,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.0,
        activation: str = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        ConfigError.raise_if(
            width % heads, "model.width", "is no multiple of model.heads", width, f"N * {heads}"
        )
        self.objective = objective
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        # Not nn.TransformerEncoder, whose layers begin as copies of one layer
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                hidden or 4 * width,
                dropout,
                activation_function(activation),
                batch_first=True,
                norm_first=True,
                bias=bias,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        if objective == "classes":
            self.head = nn.Linear(width, num_classes)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * depth) if is_last else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        size, longest = tokens.shape[1], self.positions.num_embeddings
        if size > longest:
            raise ConfigError(
                Problem("model.length", f"is less than the {size} tokens of a text", longest)
            )
        is_causal, mask, outside = self.objective == "causal", None, None
        if is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(size, tokens.device)
        if self.objective == "classes":
            outside = tokens < 0
        vectors = self.tokens(tokens.clamp(min=0)) + self.positions.weight[:size]
        vectors = self.dropout(vectors)
        for layer in self.layers:
            vectors = layer(vectors, mask, outside, is_causal)
        vectors = self.norm(vectors)
        if outside is None:
            return F.linear(vectors, self.tokens.weight)
        inside = ~outside[..., None]
        return self.head((vectors * inside).sum(1) / inside.sum(1))
