"""Generated sentences, to try a recipe without its data."""

from typing import Literal, final

import torch

from samewise.datasets.parts.generated import generator_of
from samewise.datasets.parts.tokens import LabelledTexts, Objective, TokenBlocks
from samewise.runner.errors import require_at_least

_NOUNS = ("cat", "dog", "bird", "child", "farmer", "teacher", "river", "mountain", "house", "tree")
_VERBS = ("sees", "hears", "likes", "follows", "remembers", "forgets", "draws", "knows")
_ADVERBS = ("today", "again", "at night", "in the morning", "every day")


def _sentence(draw: torch.Generator, subject: str | None = None) -> str:
    """Make "a SUBJECT VERB the OBJECT ADVERB.", drawing each word."""
    noun, verb, other, adverb = (
        choices[int(torch.randint(len(choices), (), generator=draw))]
        for choices in (_NOUNS, _VERBS, _NOUNS, _ADVERBS)
    )
    return f"a {subject or noun} {verb} the {other} {adverb}."


@final
class GeneratedText(TokenBlocks):
    """Samples of `TokenBlocks` from generated sentences.

    Args:
        samples: Number of samples.
        split: The split's name; splits differ in their sentences.
        seed: The seed of the sentences, independent of the experiment's.
        length, objective, masked: As in `TokenBlocks`; tokens are bytes.

    Raises:
        ConfigError: As in `TokenBlocks`.
    """

    def __init__(
        self,
        *,
        samples: int = 256,
        split: str = "train",
        seed: int = 0,
        length: int = 64,
        objective: Objective = "causal",
        masked: float = 0.15,
    ) -> None:
        require_at_least({"dataset.samples": samples})
        draw, size = generator_of(f"{seed} text {split}"), samples * length + 1
        # A sentence has more than 20 letters
        super().__init__(
            "\n".join(_sentence(draw) for _ in range(size // 20 + 1))[:size],
            where="the generated text",
            length=length,
            objective=objective,
            masked=masked,
        )


@final
class GeneratedTopics(LabelledTexts):
    """Samples of `LabelledTexts`: generated sentences, labelled by their subjects.

    Args:
        num_classes: Number of subjects, at most 10.
        samples, split, seed: As in `GeneratedText`.

    Raises:
        ConfigError: A number is less than 1.
    """

    def __init__(
        self,
        *,
        num_classes: Literal[2, 3, 4, 5, 6, 7, 8, 9, 10] = 10,
        samples: int = 256,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        require_at_least({"dataset.samples": samples, "dataset.num_classes": num_classes})
        draw, classes = generator_of(f"{seed} topics {split}"), _NOUNS[:num_classes]
        labels = [number % num_classes for number in range(samples)]
        super().__init__(
            [_sentence(draw, classes[label]) for label in labels], labels, classes=classes
        )
