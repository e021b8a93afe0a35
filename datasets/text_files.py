"""Texts in .txt files, for language models."""

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.lists import read_text
from samewise.datasets.parts.tokens import TEXTS, Objective, TokenBlocks
from samewise.runner.errors import ConfigError, DataError, Problem, did_you_mean


@final
class TextFiles(TokenBlocks):
    """Samples of `TokenBlocks` from a text file, or from the .txt files below a folder.

    Args:
        path: The file or folder; a folder's files are read in the order of their names.
        separator: Text between two files.
        split: "train" or "valid".
        held_out: Share of the characters, at the end, that only `valid` has; 0: each split has the
            whole text.
        tokenizer, vocabulary, length, objective, masked, anywhere: As in `TokenBlocks`.

    Raises:
        DataError: A file cannot be read, there is none, or the text is too short.
        ConfigError: As in `TokenBlocks`.
    """

    def __init__(
        self,
        *,
        path: str,
        separator: str = "\n",
        split: Literal["train", "valid"],
        held_out: float = 0.1,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int = 64,
        objective: Objective = "causal",
        masked: float = 0.15,
        anywhere: bool = False,
    ) -> None:
        source = Path(path).expanduser()
        ConfigError.raise_if(
            not 0 <= held_out < 1, "held_out", "is not a valid share", held_out, "0 to below 1"
        )
        names = list_files(source, TEXTS).names if source.is_dir() else []
        files = [source / name for name in names] or [source]
        try:
            text = separator.join(read_text(file) for file in files)
        except OSError as error:
            reason = "has no texts" if source.is_dir() else f"cannot be read: {error.strerror}"
            beside = {file.name for file in source.parent.glob("*")} - {source.name}
            raise DataError(
                Problem(
                    path,
                    f"{reason}; dataset.path is a text file, or a folder of .txt files",
                    hint=did_you_mean(source.name, beside),
                )
            ) from None
        # As nanoGPT cuts its data
        end = int(len(text) * (1 - held_out))
        if held_out:
            text = text[:end] if split == "train" else text[end:]
        super().__init__(
            text,
            where=path,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
            objective=objective,
            masked=masked,
            anywhere=anywhere,
        )
