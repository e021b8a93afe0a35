"""What users subclass: a recipe, its scores, a callback, a batch transform.

Recipes and data sets import this module and `errors` only.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.secrets import plain_cell as plain_cell  # for tables that a recipe writes

Batch = dict[str, Any]
"""A micro-batch: names to tensors, or to lists of them, all with the same first dimension B."""


@dataclass(frozen=True)
class Loss:
    """What a micro-batch contributes to a step.

    Args:
        total: float32[], the *sum* of the loss over what is counted (samples, target characters,
            ...), differentiable.
        count: How many were counted. The step's loss is the sum of totals over the sum of counts,
            over all micro-batches.
        parts: Named components to log, each a sum over the same count, detached.
        explain: Raises a SamewiseError that says why the total is not finite, where the recipe
            knows. Called only where it is not, so that nobody waits for a device to hear that all
            is well.
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
    """

    name: str = "train"
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.modules, str):
            raise ConfigError(
                Problem(
                    "recipe",
                    f"the modules of phase '{self.name}' are text",
                    self.modules,
                    f'a tuple: ("{self.modules}",)',
                )
            )


class Scores(abc.ABC):
    """Accumulates the results of `Recipe.measure` batch by batch, in order, and computes the
    metrics.
    """

    @abc.abstractmethod
    def add(self, measured: Any) -> None:
        """Add the measurements of the next batch."""

    @abc.abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics by name, without the split's prefix: `{"loss": 0.1, "accuracy": 0.98}`."""

    sometimes: Sequence[str] = ()
    """Metrics that need something not every batch has, such as large objects: `compute` may leave
    them out."""

    def doubts(self) -> list[Problem]:
        """What a person should know of the metrics last computed.

        Each is told once in a training. Default: nothing.
        """
        return []

    def save_pictures(self, folder: Path) -> None:
        """Write what a person would look at or listen to (PNG, WAV, HTML, CSV files) into `folder`.

        Default: nothing.
        """


class MeanLosses(Scores):
    """The losses and their parts, each the mean over what all batches count.

    With several phases `PHASE/loss`, as in training.
    """

    def __init__(self) -> None:
        self._counts, self._sums = dict[str, float](), dict[str, dict[str, float]]()

    def add(self, measured: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
        """Add a batch's counts and sums, by phase."""
        for phase, (count, sums) in measured.items():
            self._counts[phase] = self._counts.get(phase, 0.0) + count
            held = self._sums.setdefault(phase, {})
            held |= {name: held.get(name, 0.0) + value for name, value in sums.items()}

    def compute(self) -> dict[str, float]:
        """The means by name."""
        several = len(self._sums) > 1
        # The mean over nothing is no number
        counts = {phase: count or math.nan for phase, count in self._counts.items()}
        return {
            f"{phase}/{name}" if several else name: value / counts[phase]
            for phase, sums in self._sums.items()
            for name, value in sums.items()
        }


class Prediction(abc.ABC):
    """What a model makes of one file."""

    @abc.abstractmethod
    def values(self) -> dict[str, Any]:
        """The outcome in plain values (numbers, strings, lists and dicts of them), for the terminal
        and for programs.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values()})"

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write what a person would look at or listen to into `folder`, each file's name beginning
        with `name`. Default: nothing.
        """
        return []

    def rows(self) -> list[dict[str, Any]]:
        """The outcome as rows of a table, by column: one for each thing found.

        Default: one row of the values that are neither lists nor dicts.
        """
        return [
            {
                key: value
                for key, value in self.values().items()
                if not isinstance(value, list | dict)
            }
        ]

    def at_least(self, score: float) -> Prediction:
        """What of it has at least this score, and is drawn. Default: it has no scores."""
        raise ConfigError(
            Problem(
                "--threshold",
                f"what this model predicts ({type(self).__name__}) has no score",
                score,
            )
        )

    def coco(self, image: int | str) -> list[dict[str, Any]]:
        """COCO's results for an image of this number or name: `image_id`, `category_id`, `bbox`,
        `score` of each box. Default: it has no boxes.
        """
        raise ConfigError(
            Problem(
                "--format",
                f"coco is for boxes, and what this model predicts ({type(self).__name__}) has none",
                expected="json or csv",
            )
        )


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

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples of the data set to one batch, on the CPU.

        Default: torch's `default_collate` of dicts.
        """
        return torch.utils.data.default_collate(list(samples))

    def require(self, batch: Batch) -> None:
        """Look at a batch on the CPU that the data set has made itself (`batch(indices)`), as
        `collate` looks at samples. Default: nothing.

        Raises:
            DataError: it has something that no sample may have.
        """

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """The training loss of one micro-batch, the model in training mode."""

    def measure(self, model: nn.Module, batch: Batch) -> Any:
        """What one evaluation batch gives, small and on the CPU, for `Scores.add`.

        The model is in eval mode, without gradients. Default: its losses.
        """
        # A loss may change its batch in place
        each = [
            batch,
            *(deepcopy(batch) for _ in self.phases[1:]),
        ]
        found = {
            phase.name: is_loss(self, self.loss(model, one, phase))
            for one, phase in zip(each, self.phases, strict=True)
        }
        return {
            name: (
                loss.count,
                {
                    "loss": float(loss.total),
                    **{part: float(value) for part, value in loss.parts.items()},
                },
            )
            for name, loss in found.items()
        }

    def scores(self, dataset: Any) -> Scores:
        """A fresh accumulator for one pass over `dataset` (the split being evaluated; its `classes`
        name the labels, if it has them). Default: mean losses.
        """
        if type(self).measure is not Recipe.measure and type(self).scores is Recipe.scores:
            words = (
                f"{type(self).__name__} has a `measure`, but no `scores` that turns its "
                "results into metrics"
            )
            raise ConfigError(
                Problem(
                    "recipe", words, expected="both, or neither: the losses are then the metrics"
                )
            )
        return MeanLosses()

    def read(self, file: Path) -> Any:
        """A user's file as a sample for `collate`, without what is to be predicted.

        Raises: DataError: it is not the kind of file that the recipe predicts from; the default
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
        words = f"{type(self).__name__} reads files, but has no `predict`"
        raise ConfigError(Problem("recipe", words, expected="a recipe with `read` and `predict`"))

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """What is exported, where it is not the model as `predict` calls it: by name, empty for one
        that stands for the model itself. Default: nothing else.

        Args:
            model: In eval mode, on the CPU.
            batch: `export_samples` samples, after the batch transforms.
        """
        return {}


def is_loss(recipe: Recipe, loss: object) -> Loss:
    """What a recipe's `loss` returns; ConfigError unless it is a `Loss`."""
    if isinstance(loss, Loss):
        return loss
    message, expected = (
        f"{type(recipe).__name__}.loss returns {type(loss).__name__}",
        "samewise's Loss(total, count): samewise.runner.interfaces.Loss",
    )
    raise ConfigError(
        Problem(
            "recipe",
            message,
            expected=expected,
            hint="return Loss(total, count), total being the sum of the loss over count samples",
        )
    )


class BatchTransform(nn.Module, abc.ABC):
    """A transform of a whole batch on its device, with random choices of its own for each sample.

    Drawing and applying are apart so that a batch gives what its samples give one by one: `draw`
    uses the CPU's default generator (which the step's stream has seeded; so CPU and CUDA choose
    alike), `apply` is a pure function of the batch and the choices.
    """

    takes_encoded = False
    """Whether it decodes the images of a data set whose attribute `encoded` is true; it must then
    be the first."""

    needs_places = False
    """Whether in training it needs the entry `place`, int64[B, 2], on the batch's device: each
    sample's epoch, from 0, and its index in the data set."""

    mixes = False
    """Whether it mixes each sample with the one before, in its micro-batch: training warns if that
    is the same image."""

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        """Random choices for `size` samples: names to CPU tensors whose first dimension is `size`.

        Default: none.
        """
        return {}

    @abc.abstractmethod
    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride] (Module.apply is for submodules: it has none)
        """A new batch (its own dict; tensors not changed in place).

        `choices` as drawn, still on the CPU.
        """

    def forward(self, batch: Batch) -> Batch:
        return self.apply(batch, self.draw(batch, batch_size(batch)))


@dataclass(frozen=True)
class Outcome:
    """What an optimizer step came to.

    Args:
        step: Counts from 1.
        losses: By name, the loss and its parts (an accuracy among them), each the mean over what
            the recipe counts.
        count: How much that was.
        gradient_norms: The 2-norm of each phase's gradient before clipping, by name, in the order
            of the phases: `gradient_norm`, `generator/gradient_norm`.
        batch: A digest of the batch as it was loaded; 0 if the step is not traced.
        inputs: A digest of it as the model got it.
        samples: Of the batch, over all replicas: with `loader.drop_last=false` the last of an epoch
            has fewer.
    """

    step: int
    losses: Mapping[str, float]
    count: float
    gradient_norms: Mapping[str, float]
    batch: int
    inputs: int
    samples: int

    @property
    def gradient_norm(self) -> float:
        """The last phase's."""
        return list(self.gradient_norms.values())[-1]


class RunView(Protocol):
    """What a callback sees of a run.

    What it is given is its own: nothing that it does with it reaches what trains.
    """

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it ends sooner."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def max_epochs(self) -> int: ...

    @property
    def batch_size(self) -> int:
        """Samples that an optimizer step sees, over all replicas."""
        ...

    @property
    def samples(self) -> int:
        """Of the training split."""
        ...

    @property
    def parameters(self) -> int:
        """How many numbers the model has to learn."""
        ...

    @property
    def label(self) -> str:
        """The experiment's name, and what was overridden."""
        ...

    @property
    def evaluation_interval(self) -> int:
        """Steps between two evaluations; 0: only at the end."""
        ...

    @property
    def left_out(self) -> str:
        """What an evaluation takes of the validation split, in words, if `evaluate.limit` leaves
        something out; otherwise empty.
        """
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last evaluation; names carry their split."""
        ...

    @property
    def best(self) -> Mapping[str, float]:
        """Of the best evaluation by `evaluate.monitor`, with its `step`; empty before the first."""
        ...

    @property
    def folder(self) -> Path:
        """The run's."""
        ...

    @property
    def device(self) -> str:
        """The kind of device it computes on: cpu or cuda."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs, draws and writes."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the current step."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or a callback ends training."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether this process was asked to stop, by a signal or by `interrupt`."""
        ...

    @property
    def traced(self) -> Mapping[str, Any]:
        """The last line of the trace."""
        ...

    def learning_rates(self) -> Mapping[str, Sequence[float]]:
        """Of each phase's parameter groups, without repeats, in order."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and copies of the model's parameters and buffers, made one by one.

        A tied one once, under its first name.
        """
        ...

    def copy_model(self) -> nn.Module:
        """A copy of the model with the same layout, sharded if the model is: for an average of its
        weights.
        """
        ...

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step.

        Those of a step's callbacks are sent together, at its end.

        What samewise logs itself is refused: the metrics of its evaluations from the first one on.
        `samewise verify` compares them, except those whose names begin with `speed/`, `time/`,
        `memory/` or `system/`: these may depend on the machine.
        """
        ...

    def warn(self, caution: Problem) -> None:
        """Add a warning to those that `check` and `train` print before the first step.

        For `on_build`.
        """
        ...

    def interrupt(self, reason: str) -> None:
        """Have the run save and stop after this step, in all its processes, to be resumed by the
        same command. `stop_reason` ends it for good.
        """
        ...


class Callback(abc.ABC):
    """Reads what happens and may ask to stop.

    It cannot change a number. Every method is optional.
    """

    def on_build(self, run: RunView) -> None:
        """Once, when every part of the run has been made, before a checkpoint is restored."""

    def on_start(self, run: RunView) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        """After an optimizer step."""

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """After an evaluation; names carry their split (`valid/accuracy`)."""

    def on_end(self, run: RunView) -> None:
        """After the last step, however training ended."""

    def stop_reason(self) -> str | None:
        """A sentence when training should stop, else None. Asked after each evaluation and step."""
        return None

    def watched_metrics(self) -> Mapping[str, str]:
        """By argument: the metrics of evaluations by which it decides during training (`{"monitor":
        "valid/loss"}`).

        If one is not computed, `check` and the start of a training report it.
        """
        return {}

    def models(self) -> Mapping[str, nn.Module]:
        """Further models to evaluate in addition to the trained one, by prefix (`{"ema": averaged}`
        gives `ema/valid/accuracy`).

        `on_build` makes them: `samewise eval` and others call this, and `load_state_dict`, without
        `on_start`.
        """
        return {}

    def weights(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of `models`, by the same names, out of what `state_dict` gave: for `samewise
        predict`, which makes no run.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def forget_evaluations(self) -> None:
        """Forget what evaluations gave: the run continues one that measured something else
        (`resume_from`).
        """


def batch_size(batch: Batch) -> int:
    """B: the length of the first tensor or list in the batch."""
    first = next(iter(batch.values()))
    # Torch.export leaves a shape free; len fixes it
    return first.shape[0] if isinstance(first, Tensor) else len(first)


def class_names(dataset: Any) -> list[str]:
    """`classes` of a data set, or of the one that it wraps (`torch.utils.data.Subset` and the
    like); empty if there are none.
    """
    return [str(name) for name in of_labels(dataset, "classes")]


def of_labels(dataset: Any, attribute: str) -> Sequence[Any]:
    """The same for any attribute that has an entry for each label."""
    while dataset is not None:
        if found := getattr(dataset, attribute, None):
            return found
        dataset = getattr(dataset, "dataset", None)
    return ()
