"""Tokens of texts: by a tokenizer file, or a token for each byte."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.runner.errors import ConfigError, DataError, Problem, first_line, require_at_least

TEXTS = (".txt",)
"""Endings of text files."""
Objective = Literal["causal", "masked"]
_MASKS = ("[MASK]", "<mask>")
"""Names of the token that hides another, in the tokenizers of BERT and of RoBERTa."""


@final
class Tokenizer:
    """Texts as tokens and back.

    Without a file, tokens 0 to 255 are the bytes of UTF-8, and 256 is [MASK].

    Args:
        tokenizer: A tokenizer.json of Hugging Face's tokenizers; None: bytes.
        vocabulary: The expected number of tokens; None allows any.
        length: Most tokens of a text: what follows is cut off. None: no limit.

    Raises:
        ConfigError: The package tokenizers is not installed, the file is no tokenizer, or the
            number of tokens differs.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        *,
        vocabulary: int | None = None,
        length: int | None = None,
    ) -> None:
        self._inner, self._length, self.vocabulary, self.mask = None, length, 257, 256
        if tokenizer is not None:
            self._inner = _read(Path(tokenizer).expanduser(), length)
            self.vocabulary = self._inner.get_vocab_size()
            masks = [x for name in _MASKS if (x := self._inner.token_to_id(name)) is not None]
            self.mask = masks[0] if masks else None
        ConfigError.raise_if(
            vocabulary is not None and vocabulary != self.vocabulary,
            "vocabulary",
            f"differs from that of {tokenizer or 'the bytes'}, which has {self.vocabulary}",
            vocabulary,
            hint=f"dataset.vocabulary={self.vocabulary}",
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return a text's tokens.

        Args:
            text: The text.
            special: Whether to add the tokens that the tokenizer puts around a text, such as [CLS]
                and [SEP].
        """
        if self._inner is not None:
            return self._inner.encode(text, add_special_tokens=special).ids
        first, *parts = (list(part.encode()) for part in text.split("[MASK]"))
        for part in parts:
            first += [256, *part]
        return first[: self._length]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""
        if self._inner is not None:
            return self._inner.decode(list(tokens), skip_special_tokens=False)
        parts = (b"[MASK]" if token == self.mask else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")


def _read(file: Path, length: int | None) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ConfigError(
            Problem(
                "tokenizer",
                "a tokenizer file needs the package tokenizers, which is not installed",
                str(file),
                hint="pip install tokenizers",
            )
        ) from None
    try:
        inner = Inner.from_file(str(file))
    # The package raises nothing narrower
    except Exception as error:
        raise ConfigError(
            Problem(
                "tokenizer",
                f"cannot be read: {first_line(error)}",
                str(file),
                "a tokenizer.json of Hugging Face's tokenizers",
            )
        ) from None
    # Batches are padded by the recipe
    inner.no_padding()
    if length is None:
        inner.no_truncation()
    else:
        inner.enable_truncation(length)
    return inner


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Samples of consecutive tokens of a text, with those to predict.

    For the objective "causal" a sample is `{"tokens": int64[length], "target": int64[length]}`:
    each target is the token after the one in its place. For "masked" it is `{"tokens":
    int64[length], "places": int64[M], "target": int64[M]}`: of M tokens, at random places, 80 % are
    replaced by the tokenizer's mask, 10 % by a random token, and 10 % stay (Devlin et al. 2018,
    BERT, arXiv 1810.04805).

    Args:
        text: The text; a rest that fills no block is left out.
        where: Its place, for messages.
        tokenizer, vocabulary: As in `Tokenizer`.
        length: Number of tokens of a sample.
        objective: "causal" or "masked".
        masked: Share of the tokens to predict for "masked".
        anywhere: Whether a block begins at a random token, instead of where the last one ends.

    Raises:
        ConfigError: A number is out of range, or the tokenizer has no mask.
        DataError: The text is shorter than a block.
    """

    def __init__(
        self,
        text: str,
        *,
        where: str,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int = 64,
        objective: Objective = "causal",
        masked: float = 0.15,
        anywhere: bool = False,
    ) -> None:
        require_at_least({"length": length})
        tokens = Tokenizer(tokenizer, vocabulary=vocabulary)
        ConfigError.raise_if(
            objective == "masked" and tokens.mask is None,
            "tokenizer",
            f"has no token named {' or '.join(_MASKS)}",
            tokenizer,
        )
        ConfigError.raise_if(
            not 0 < masked <= 1, "masked", "is not a valid share", masked, "above 0, at most 1"
        )
        # int32 takes half the memory of a long text
        self._tokens = torch.tensor(tokens.encode(text), dtype=torch.int32)
        self._length, self._anywhere = length, anywhere
        self._masked = max(1, round(masked * length)) if objective == "masked" else 0
        self._vocabulary, self._mask = tokens.vocabulary, tokens.mask
        DataError.raise_if(
            not len(self),
            where,
            "is too short for a sample of the model",
            f"{len(self._tokens)} tokens",
            f"more than {length}",
            "lower dataset.length",
        )

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = (
            int(torch.randint(len(self._tokens) - self._length, ()))
            if self._anywhere
            else index * self._length
        )
        tokens = self._tokens[start : start + self._length + 1].long()
        if not self._masked:
            return {"tokens": tokens[:-1], "target": tokens[1:]}
        tokens = tokens[:-1]
        places = torch.randperm(self._length)[: self._masked].sort().values
        target, choice = tokens[places], torch.rand(self._masked)
        replaced = torch.randint(self._vocabulary, (self._masked,))
        replaced = replaced.where(choice < 0.9, target).masked_fill(choice < 0.8, self._mask or 0)
        return {
            "tokens": tokens.index_copy(0, places, replaced),
            "places": places,
            "target": target,
        }


class LabelledTexts(Dataset[dict[str, Any]]):
    """Samples `{"tokens": int64[N], "label": int}` of texts.

    Args:
        texts: The texts.
        labels: Their classes' numbers.
        classes: The classes' names.
        tokenizer, vocabulary, length: As in `Tokenizer`.

    Raises:
        DataError: A text is empty.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[int],
        *,
        classes: Sequence[str],
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int | None = None,
    ) -> None:
        self.texts, self.labels, self.classes = list(texts), list(labels), list(classes)
        if empty := [number for number, text in enumerate(texts) if not text]:
            raise DataError(Problem("dataset", f"sample {empty[0]} is an empty text"))
        self._tokenizer = Tokenizer(tokenizer, vocabulary=vocabulary, length=length)

    def __len__(self) -> int:
        return len(self.texts)

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        return f"{index:08}.txt", {
            "text": self.texts[index],
            "label": self.classes[self.labels[index]],
        }

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {
            "tokens": torch.tensor(self._tokenizer.encode(self.texts[index], special=True)),
            "label": self.labels[index],
        }
