"""Texts with labels: in tables, or in folders by class."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.folders import find_classes, list_by_class
from samewise.datasets.parts.lists import Row, read_rows, read_text
from samewise.datasets.parts.tokens import TEXTS, LabelledTexts


@final
class TextTable(LabelledTexts):
    """Samples of `LabelledTexts` from a table: CSV, TSV, JSON, JSON lines or Parquet.

    Labels number the classes in sorted order: by number if all are numbers. In a .tsv quotes are
    characters, as in GLUE.

    Args:
        file: The split's table.
        train_file: The table that names the classes.
        text: The column of the texts.
        label: The column of their classes.
        classes: Class names in the order of their numbers; None: all in `train_file`.
        num_classes: The expected number of classes; None allows any number.
        tokenizer, vocabulary, length: As in `Tokenizer`.

    Raises:
        DataError: A table cannot be read or lacks a column, or a class is unknown.
        ConfigError: As in `Tokenizer`.
    """

    def __init__(
        self,
        *,
        file: str,
        train_file: str,
        text: str = "text",
        label: str = "label",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int | None = None,
    ) -> None:
        def read(path: str) -> list[Row]:
            return read_rows(
                Path(path).expanduser(),
                (text, label),
                item="text",
                setting="dataset.train_file and dataset.valid_file",
                tab_quotes=False,
            )

        rows = read(file)
        labels = [row.text(label, setting="label") for row in rows]
        if classes is None:
            classes = sort_classes(row.text(label, setting="label") for row in read(train_file))
        names = list(map(str, classes))
        require_count(train_file, names, num_classes)
        require_known(file, zip((row.where for row in rows), labels, strict=True), names)
        super().__init__(
            [row.text(text, setting="text") for row in rows],
            [names.index(name) for name in labels],
            classes=names,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
        )


@final
class TextFolder(LabelledTexts):
    """Samples of `LabelledTexts` from folders by class: `ROOT/SPLIT/CLASS/*.txt`, as in IMDb.

    Args:
        root: The folder of the splits' folders.
        folder: This split's folder.
        classes_from: The folder that names the classes.
        classes: The class folders' names in the order of the labels; None: sorted.
        num_classes: The expected number of classes; None allows any number.
        tokenizer, vocabulary, length: As in `Tokenizer`.

    Raises:
        DataError: A folder is missing, its classes are not the expected ones, or a text cannot be
            read.
        ConfigError: As in `Tokenizer`.
    """

    def __init__(
        self,
        *,
        root: str,
        folder: str,
        classes_from: str | None = None,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int | None = None,
    ) -> None:
        base = Path(root).expanduser()
        names = find_classes(
            base,
            folder,
            classes_from=classes_from,
            classes=classes,
            num_classes=num_classes,
            content="texts",
        )
        labels = list_by_class(base / folder, names, endings=TEXTS).labels
        super().__init__(
            [read_text(base / folder / name) for name in labels],
            list(labels.values()),
            classes=names,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
        )
