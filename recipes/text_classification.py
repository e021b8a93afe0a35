"""Text classification: one label for each text, or any number of labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from samewise.datasets.parts.folders import TABLES
from samewise.datasets.parts.lists import read_rows, read_text
from samewise.datasets.parts.tokens import TEXTS, Tokenizer
from samewise.recipes.classification import Classification
from samewise.recipes.parts.classification_scores import ClassificationScores
from samewise.recipes.parts.classified import ClassifiedRows
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import require_at_least
from samewise.runner.interfaces import Batch, Prediction, class_names


@final
class TextClassification(Classification):
    """Text classification; batches are `{"tokens": int64[B, N], "label": int64[B]}`.

    A shorter text is followed by -1. N is the longest text's number of tokens, rounded up to a
    multiple of 8: it depends on the samples of a micro-batch alone.

    Args:
        tokenizer, vocabulary: As in `Tokenizer`.
        length: Most tokens of a text; what follows is cut off.
        pad: Whether N is always `length`.
        reads: How `predict` reads tables: `text` is the column of the texts.
        num_classes, label_smoothing, top_k, loss, metrics: As in `Classification`.

    Raises:
        ConfigError: As in `Classification` and `Tokenizer`.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int,
        pad: bool = False,
        reads: Mapping[str, Any] | None = None,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        top_k: Sequence[int] = (1, 5),
        loss: nn.Module | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            label_smoothing=label_smoothing,
            top_k=top_k,
            loss=loss,
            metrics=metrics,
        )
        require_at_least({"recipe.length": length})
        self.takes, self.extensions = "texts", TEXTS
        self.tokenizer = Tokenizer(tokenizer, vocabulary=vocabulary, length=length)
        self._length, self._pad = length, pad
        self._column = (reads or {}).get("text") or "text"

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples with `tokens` int64[N] and `label`.

        The texts of a table, `tokens` int64[R, N], become R texts of the batch, whose `rows` has
        the R of each sample, and 0 for a sample that is no table.

        Raises:
            DataError: A label is out of range.
        """
        tokens = [row for sample in samples for row in torch.atleast_2d(sample["tokens"])]
        rows = [len(x["tokens"]) if x["tokens"].dim() == 2 else 0 for x in samples]
        longest = self._length if self._pad else -8 * (-max(map(len, tokens)) // 8)
        width = min(longest, self._length)
        return {
            "tokens": torch.stack([pad(row, (0, width - len(row)), value=-1) for row in tokens]),
            "label": self.labels([sample["label"] for sample in samples]),
            **({"rows": rows} if any(rows) else {}),
        }

    def inputs(self, batch: Batch) -> Tensor:
        return batch["tokens"]

    def thumbnails(self, batch: Batch, shown: Tensor) -> Tensor:
        """Return the texts' tokens."""
        return batch["tokens"][shown]

    def scores(self, dataset: Any) -> ClassificationScores:
        return TextScores(
            self.tokenizer, classes=class_names(dataset), top_k=self.top_k, metrics=self.metrics
        )

    def read(self, file: Path) -> dict[str, Any]:
        """Read a text, or all texts of a table, with a placeholder label."""
        if file.suffix.lower() not in TABLES:
            tokens = self.tokenizer.encode(read_text(file), special=True)
            return {"tokens": torch.tensor(tokens), "label": 0}
        rows = read_rows(file, [self._column], item="text", setting="FILE", tab_quotes=False)
        tokens = [
            torch.tensor(
                self.tokenizer.encode(row.text(self._column, setting="text"), special=True)
            )
            for row in rows
        ]
        return {"tokens": pad_sequence(tokens, batch_first=True, padding_value=-1), "label": 0}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        if "rows" not in batch:
            return super().predict(model, batch)
        # One after the other: a text's result does not depend on the table's other texts
        texts = ([{"tokens": row[row >= 0], "label": 0}] for row in batch["tokens"])
        each = (Classification.predict(self, model, self.collate(text))[0] for text in texts)
        return [
            ClassifiedRows([next(each) for _ in range(count)]) if count else next(each)
            for count in batch["rows"]
        ]


@final
class TextScores(ClassificationScores):
    """Scores of a text classification.

    Args:
        tokenizer: Makes texts of tokens.
        options: The arguments of `ClassificationScores`.
    """

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(**options)
        self._tokenizer = tokenizer

    def save_sheet(self, folder: Path) -> None:
        """Write some predictions into `predictions.csv`: wrong ones first, by falling loss."""
        names = self.names()
        rows = [
            (
                self._tokenizer.decode([token for token in item.image.tolist() if token >= 0]),
                names[item.label],
                names[item.prediction],
                f"{item.confidence:.4f}",
                f"{item.loss:.4f}",
            )
            for item in self.sheet.shown()
        ]
        write_csv(
            folder / "predictions.csv", ("text", "label", "prediction", "probability", "loss"), rows
        )
