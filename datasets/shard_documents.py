"""Texts in shards, for language models."""

from collections.abc import Mapping
from typing import Literal, final

from samewise.datasets.parts.lists import text_of
from samewise.datasets.parts.shard_samples import ShardSamples
from samewise.datasets.parts.tokens import TEXTS, Objective, TokenBlocks


@final
class ShardDocuments(TokenBlocks):
    """Samples of `TokenBlocks` from the texts of all samples in shards, in their order.

    Args:
        text: The column of the texts, or a member's ending, as `content` in `ShardSamples`.
        separator: Text between two of them.
        root, split, shares, key: As in `ShardSamples`.
        tokenizer, vocabulary, length, objective, masked, anywhere: As in `TokenBlocks`.

    Raises:
        DataError: As in `ShardSamples`; or a text is not in UTF-8, or all are too short.
        ConfigError: As in `ShardSamples` and `TokenBlocks`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        text: str = "text",
        separator: str = "\n",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int = 64,
        objective: Objective = "causal",
        masked: float = 0.15,
        anywhere: bool = False,
    ) -> None:
        samples = ShardSamples(
            root,
            split,
            content=("text", text),
            endings=TEXTS,
            label="",
            shares=shares,
            key=key,
        )
        contents = map(samples.content, range(len(samples)))
        super().__init__(
            separator.join(text_of(raw, f"{shard}, {name}") for raw, shard, name in contents),
            where=root,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
            objective=objective,
            masked=masked,
            anywhere=anywhere,
        )
