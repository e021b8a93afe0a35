"""A task: its loss, its evaluation, its predictions."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces.batch import Batch
from samewise.runner.interfaces.results import MeanLosses, Prediction, Scores


@dataclass(frozen=True)
class Loss:
    """The contribution of a micro-batch to a step.

    Args:
        total: float32[], the *sum* of the loss over the counted items (samples, target characters,
            ...), differentiable.
        count: Number of counted items. The step's loss is the sum of totals over the sum of counts,
            over all micro-batches.
        parts: Named components to log, each a sum over the same count, detached.
        explain: Raises a SamewiseError with the reason why the total is not finite, where the
            recipe knows it. Called only for such a total, so that no step waits for the device.
    """

    total: Tensor
    count: float
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    explain: Callable[[], None] | None = None


@dataclass(frozen=True)
class Phase:
    """One optimizer's share of a step.

    A recipe with several optimizers (a GAN) lists them in the order they step.

    Args:
        name: The key of its optimizer in the config, if `optimizer` is a mapping of several.
        modules: Prefixes of the parameters it trains (`("generator",)`); empty: all. Only these
            gather gradients while it computes its loss.
        every: It trains in the first step and each `every`-th after it. In the other steps its
            parameters, their averages, and its optimizer's state stay as they are.
        times: How many times it trains in such a step, each with random numbers of its own: a
            number, or a function of the step (from 0), which may return 0.
        turn: Which of these times it is, from 0, so that `loss` can take another part of the batch
            each time: `batch["image"].chunk(5)[phase.turn]`. samewise sets it.
    """

    name: str = "train"
    modules: tuple[str, ...] = ()
    every: int = 1
    times: int | Callable[[int], int] = 1
    turn: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        # Each of its letters would be taken for a prefix
        ConfigError.raise_if(
            isinstance(self.modules, str),
            "recipe",
            f"the modules of phase '{self.name}' are text",
            self.modules,
            f'a tuple: ("{self.modules}",)',
        )

    def turns(self, step: int) -> list[Phase]:
        """Return the phase as often as it trains in a step (from 0), each with its `turn`."""
        if step % self.every:
            return []
        times = self.times(step) if callable(self.times) else self.times
        return [replace(self, turn=turn) if turn else self for turn in range(times)]


@dataclass(frozen=True)
class Form:
    """A model as a function of tensors alone, for an export.

    Args:
        call: From the model and these tensors to what it gives, by name.
        inputs: An example, by name, in the order of the call. Where all of them are entries of the
            batch, its transforms can go into the export.
        checks: Values with which a program that calls it in its own loop can compare its result.
    """

    call: Callable[..., Mapping[str, Tensor]]
    inputs: Mapping[str, Tensor]
    checks: Mapping[str, Tensor] = field(default_factory=dict)


class Recipe(abc.ABC):
    """The science of one task. It knows no device, rank, optimizer, file or logger."""

    classes: Sequence[str] = ()
    """The names of the labels, if the run's data set has them: set before `predict` is called."""

    category_ids: Sequence[int] = ()
    """The labels' numbers in the data set's own file, if it numbers them differently, -1 for a
    label that it lacks: set likewise."""

    read_size: Sequence[int] | None = None
    """[height, width] to which the run's data set resizes images as it reads them in evaluation, as
    `read` should: set likewise."""

    takes: str = "files of its own kind"
    """What `read` reads, in a word: `images`."""

    gives: str = ""
    """How to read what the model gives, for those who run it elsewhere: `a row of logits for each
    image`."""

    extensions: Sequence[str] = ()
    """How the names of such files end: those in a folder that `predict` is given. Empty: folders
    are refused."""

    export_samples: int = 2
    """The number of samples in an export's example. A size of 1 is fixed in the file; other sizes
    stay dynamic if the model allows it."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The optimizers of a step, in their order. Default: one that trains everything."""
        return (Phase(),)

    def prepare(self, model: nn.Module, dataset: Any) -> None:
        """Set buffers of the model by the training split, before any weights are read from a file.

        A checkpoint holds them from then on, for evaluation, prediction and export. Default:
        nothing.
        """

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples of the data set to one batch, on the CPU.

        Default: torch's `default_collate` of dicts.
        """
        return torch.utils.data.default_collate(list(samples))

    def require(self, batch: Batch) -> None:
        """Check a batch on the CPU that the data set has made itself (`batch(indices)`).

        `collate` checks samples; this checks such batches. Default: nothing.

        Raises:
            DataError: The batch has something that no sample may have.
        """

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """The training loss of one micro-batch, the model in training mode."""

    def measure(self, model: nn.Module, batch: Batch) -> Any:
        """Return the results of one evaluation batch, small and on the CPU, for `Scores.add`.

        The model is in eval mode, without gradients. Default: its losses.
        """
        # A loss may change its batch in place
        each = [
            batch,
            *(deepcopy(batch) for _ in self.phases[1:]),
        ]
        losses = {
            phase.name: is_loss(self, self.loss(model, items, phase))
            for items, phase in zip(each, self.phases, strict=True)
        }
        return {
            name: (
                loss.count,
                {
                    "loss": float(loss.total),
                    **{part: float(value) for part, value in loss.parts.items()},
                },
            )
            for name, loss in losses.items()
        }

    def scores(self, dataset: Any) -> Scores:
        """Return a fresh accumulator for one pass over `dataset`, the split being evaluated.

        Its `classes` name the labels, if it has them. Default: mean losses.
        """
        # MeanLosses could not add up what this `measure` returns
        ConfigError.raise_if(
            type(self).measure is not Recipe.measure and type(self).scores is Recipe.scores,
            "recipe",
            f"{type(self).__name__} has a `measure`, but no `scores` that turns its results into "
            "metrics",
            expected="both, or neither: the losses are then the metrics",
        )
        return MeanLosses()

    def distil(self, teacher: nn.Module, *, temperature: float, alpha: float) -> None:
        """Learn from a teacher too: called before training, if the config has one.

        Args:
            teacher: A trained model, frozen, in eval mode, on the device.
            temperature: The config's `distil.temperature`.
            alpha: The config's `distil.alpha`.

        Raises:
            ConfigError: The recipe cannot; the default.
        """
        raise ConfigError(
            Problem(
                "distil.teacher",
                f"{type(self).__name__} has no `distil`",
                expected="null, or recipe=classification",
            )
        )

    def read(self, file: Path) -> Any:
        """A user's file as a sample for `collate`, without what is to be predicted.

        Raises:
            DataError: It is not the kind of file that the recipe predicts from; the default
                predicts from none.
        """
        raise ConfigError(
            Problem(
                "recipe",
                f"{type(self).__name__} cannot predict from files",
                str(file),
                "a recipe with `read` and `predict`",
            )
        )

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        """One prediction for each sample of a batch of what `read` gave, collated and transformed.

        The model is in eval mode, without gradients.
        """
        raise ConfigError(
            Problem(
                "recipe",
                f"{type(self).__name__} reads files, but has no `predict`",
                expected="a recipe with `read` and `predict`",
            )
        )

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """Return the modules to export besides the model as `predict` calls it, by name.

        An empty name stands for the model itself. Default: nothing else.

        Args:
            model: In eval mode, on the CPU.
            batch: `export_samples` samples, after the batch transforms.
        """
        return {}


def is_loss(recipe: Recipe, loss: object) -> Loss:
    """Return the result of a recipe's `loss`.

    Raises:
        ConfigError: It is no `Loss`.
    """
    if isinstance(loss, Loss):
        return loss
    raise ConfigError(
        Problem(
            "recipe",
            f"{type(recipe).__name__}.loss returns {type(loss).__name__}",
            expected="samewise's Loss(total, count): samewise.runner.interfaces.Loss",
            hint="return Loss(total, count), total being the sum of the loss over count samples",
        )
    )
