"""Language modelling: the next token of a text, or those that are masked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samewise.datasets.parts.lists import read_text
from samewise.datasets.parts.tokens import TEXTS, Objective, Tokenizer
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint, require_at_least
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe, Scores


@dataclass(frozen=True)
class MeasuredTokens:
    """Measurements of M tokens of each of B texts, on the CPU.

    Args:
        loss: float32[B, M], the cross-entropy in nats.
        target: int64[B, M], the true tokens.
        hits: bool[B, M], whether the likeliest token is the true one.
    """

    loss: Tensor
    target: Tensor
    hits: Tensor


@final
class LanguageModelling(Recipe):
    """Language modelling; batches are `{"tokens": int64[B, N], "target": int64[B, M]}`.

    The targets belong to all tokens, or to those at `places` int64[B, M], as `TokenBlocks` makes
    them. The model gives logits float32[B, N, vocabulary]; the loss is their cross-entropy in nats
    for a token.

    Args:
        objective: "causal": `predict` continues a text; "masked": it fills in the masks of a text.
        tokenizer, vocabulary: As in `Tokenizer`.
        length: Most tokens that the model reads.
        label_smoothing: Share of the target that is spread evenly over all tokens, in training.
        continuation: Number of tokens by which `predict` continues a text.
        temperature: Divides the logits from which a continuation is drawn; 0: always the likeliest
            token.

    Raises:
        ConfigError: An argument is not valid.
    """

    takes, extensions = "texts", TEXTS
    gives = (
        "a row of scores of all tokens for each token: of the token after it, or of itself if the "
        "model was trained with masks; softmax turns them into probabilities"
    )

    def __init__(
        self,
        *,
        objective: Objective,
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int,
        label_smoothing: float = 0.0,
        continuation: int = 200,
        temperature: float = 0.8,
    ) -> None:
        require_at_least({"recipe.length": length})
        require_at_least(
            {"recipe.continuation": continuation, "recipe.temperature": temperature}, least=0
        )
        self.tokenizer = Tokenizer(tokenizer, vocabulary=vocabulary)
        self.objective, self.length, self.label_smoothing = objective, length, label_smoothing
        self.continuation, self.temperature = continuation, temperature

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the cross-entropy summed over the targets, in float32 for any precision."""
        logits, target = self._logits(model, batch).flatten(0, 1), batch["target"].flatten()
        total = F.cross_entropy(
            logits, target, reduction="sum", label_smoothing=self.label_smoothing
        )
        return Loss(
            total,
            count=target.numel(),
            parts={"accuracy": (logits.detach().argmax(1) == target).sum()},
        )

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredTokens:
        logits, target = self._logits(model, batch), batch["target"]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return MeasuredTokens(
            loss.view(target.shape).cpu(), target.cpu(), (logits.argmax(2) == target).cpu()
        )

    def scores(self, dataset: Any) -> Scores:
        return TokenScores(self.tokenizer)

    def read(self, file: Path) -> dict[str, Any]:
        """Read a text: its end, for a causal model, else its beginning."""
        # Editors end the last line of a file
        tokens = self.tokenizer.encode(read_text(file).removesuffix("\n"))
        if not tokens:
            raise DataError(Problem(str(file), "is empty", expected="a text"))
        part = slice(-self.length, None) if self.objective == "causal" else slice(self.length)
        return {"tokens": torch.tensor(tokens[part])}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        tokens = batch["tokens"]
        logits = self._outputs(model, tokens)
        if self.objective == "masked":
            masked = tokens == self.tokenizer.mask
            filled = torch.where(masked, logits.argmax(2), tokens)
            probabilities = logits.softmax(2)
            return [
                WrittenText(
                    self.tokenizer.decode(row.tolist()),
                    [
                        [
                            {
                                "text": self.tokenizer.decode([token]),
                                "probability": float(likely[token]),
                            }
                            for token in likely.topk(5).indices.tolist()
                        ]
                        for likely in probabilities[place][masked[place]].cpu()
                    ],
                )
                for place, row in enumerate(filled)
            ]
        # Each text has the same random numbers, so the batch's other texts do not matter
        uniform = torch.rand(self.continuation, generator=torch.Generator().manual_seed(0)).tolist()
        for number in uniform:
            last = logits[:, -1].cpu().double()
            if self.temperature:
                shares = (last / self.temperature).softmax(1).cumsum(1)
                chosen = (shares < number).sum(1).clamp(max=shares.shape[1] - 1)
            else:
                chosen = last.argmax(1)
            tokens = torch.cat([tokens, chosen[:, None].to(tokens)], 1)
            logits = self._outputs(model, tokens[:, -self.length :])
        texts = tokens[:, batch["tokens"].shape[1] :].tolist()
        return [WrittenText(self.tokenizer.decode(text)) for text in texts]

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits of the targets, float32[B, M, vocabulary]."""
        logits = self._outputs(model, batch["tokens"])
        if "places" in batch:
            logits = logits.gather(1, batch["places"][..., None].expand(-1, -1, logits.shape[2]))
        return logits

    def _outputs(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the model's output, float32[B, N, vocabulary], checked."""
        output, expected = model(tokens), [*tokens.shape, self.tokenizer.vocabulary]
        if not isinstance(output, Tensor) or list(output.shape) != expected:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return one row of logits for each token",
                    form_of(output),
                    f"a tensor {expected}",
                    none_hint(output) or "set model.vocabulary=${dataset.vocabulary}",
                )
            )
        # float64 stays
        return output.to(torch.promote_types(output.dtype, torch.float32))


@final
class TokenScores(Scores):
    """Scores of a language model: the same bits however the split is cut into batches.

    Args:
        tokenizer: Names the tokens in the table.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Of each token
        self._losses = torch.zeros(tokenizer.vocabulary, dtype=torch.float64)
        self._counts, self._hits = (
            torch.zeros(tokenizer.vocabulary, dtype=torch.int64) for _ in range(2)
        )
        self._loss = 0.0

    def add(self, measured: MeasuredTokens) -> None:
        # One text after the other, so that the sum does not depend on the batches
        for loss in measured.loss.double().sum(1).tolist():
            self._loss += loss
        target = measured.target.flatten()
        self._losses.index_add_(0, target, measured.loss.double().flatten())
        self._counts.index_add_(0, target, torch.ones_like(target))
        self._hits.index_add_(0, target, measured.hits.long().flatten())

    def compute(self) -> dict[str, float]:
        """Return `loss` in nats for a token, `perplexity`, its exponential, and `accuracy`."""
        count = int(self._counts.sum())
        loss = self._loss / count
        # exp of a larger number is not a float
        perplexity = math.exp(min(loss, 700.0))
        return {"loss": loss, "perplexity": perplexity, "accuracy": int(self._hits.sum()) / count}

    def save_pictures(self, folder: Path) -> None:
        """Write `tokens.csv`: how often each token is a target, is predicted, and its loss."""
        frequent = self._counts.argsort(descending=True, stable=True).tolist()
        rows = [
            (
                self._tokenizer.decode([token]),
                token,
                count,
                f"{int(self._hits[token]) / count:.4f}",
                f"{float(self._losses[token]) / count:.4f}",
            )
            for token in frequent
            if (count := int(self._counts[token]))
        ]
        write_csv(folder / "tokens.csv", ("text", "token", "times", "accuracy", "loss"), rows)


@final
class WrittenText(Prediction):
    """A model's text for a file.

    Args:
        text: The continuation of the file's text, or the text with its masks filled in.
        masks: For each mask the likeliest tokens, with `text` and `probability`.
    """

    def __init__(self, text: str, masks: Sequence[Sequence[dict[str, Any]]] = ()) -> None:
        self.text, self.masks = text, list(masks)

    def values(self) -> dict[str, Any]:
        return {"text": self.text, **({"masks": self.masks} if self.masks else {})}

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write the text as `NAME.txt`."""
        (folder / f"{name}.txt").write_text(self.text + "\n", encoding="utf-8")
        return [folder / f"{name}.txt"]
