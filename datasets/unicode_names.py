"""The names and categories of Unicode's characters, texts in Python's standard library."""

from typing import Literal, final
from unicodedata import ucd_3_2_0 as unicode

from samewise.datasets.parts.tokens import LabelledTexts, Objective, TokenBlocks

_LEFT_OUT = ("CJK ", "HANGUL SYLLABLE")
"""Beginnings of names that mostly repeat the characters' numbers or sounds."""


def named_characters(split: str) -> list[tuple[str, str]]:
    """List names and categories of a split's characters: every tenth is held out.

    They are the 12,771 characters of Unicode 3.2 that are neither CJK nor Hangul syllables. Python
    keeps this version for internationalised domain names, so they are the same everywhere: the
    SHA-256 of all names, sorted and in a line each, is 31ebcca3f406320ee425dbe85e80b166....
    """
    characters = map(chr, range(0xE0080))
    names = {name: x for x in characters if (name := unicode.name(x, ""))}
    listed = [
        (name, unicode.category(x)) for name, x in names.items() if not name.startswith(_LEFT_OUT)
    ]
    return [x for number, x in enumerate(listed) if (number % 10 == 9) == (split == "valid")]


@final
class UnicodeNames(TokenBlocks):
    """Samples of `TokenBlocks` from the names of Unicode's characters, each in a line.

    Args:
        split: "train" or "valid", as `named_characters` divides them.
        tokenizer, vocabulary, length, objective, masked, anywhere: As in `TokenBlocks`.

    Raises:
        ConfigError: As in `TokenBlocks`.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "valid"],
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int = 64,
        objective: Objective = "causal",
        masked: float = 0.15,
        anywhere: bool = False,
    ) -> None:
        super().__init__(
            "\n".join(name for name, _ in named_characters(split)),
            where="the names of Unicode's characters",
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
            objective=objective,
            masked=masked,
            anywhere=anywhere,
        )


@final
class UnicodeCategories(LabelledTexts):
    """Samples of `LabelledTexts`: names of Unicode's characters with their general categories.

    Args:
        split: "train" or "valid", as `named_characters` divides them.
        tokenizer, vocabulary, length: As in `LabelledTexts`.

    Raises:
        ConfigError: As in `LabelledTexts`.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "valid"],
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int | None = None,
    ) -> None:
        names, categories = zip(*named_characters(split), strict=True)
        classes = sorted({category for _, category in named_characters("train")})
        super().__init__(
            names,
            [classes.index(category) for category in categories],
            classes=classes,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
        )
