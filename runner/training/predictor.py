"""Applies a trained model to a user's files, without its training data."""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import OURS
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.device import mover
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    SamewiseError,
    first_line,
    raised_at,
)
from samewise.runner.interfaces import Batch, Prediction, Recipe
from samewise.runner.precision import Precision
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.base import choose_device
from samewise.runner.training.components import Make, make_batch_transforms, make_model, make_part
from samewise.runner.training.evaluation import require_weights
from samewise.runner.training.prediction_files import expand, names
from samewise.runner.training.same_bits import determinism
from samewise.runner.training.state import load_weights


@dataclass(frozen=True)
class Predictor:
    """A recipe and its trained model in evaluation mode, with the evaluation's transforms."""

    recipe: Recipe
    model: nn.Module
    precision: Precision
    samples: Sequence[Callable[[Any], Any]]
    transform: Callable[[Batch], Batch]
    to_device: Callable[[Batch], Batch]
    seed: int

    def predict(self, files: Sequence[Path]) -> list[Prediction]:
        """Predict files as one batch.

        A single file always gives the same bits; in a batch the last bits may differ.

        Raises:
            DataError: A file cannot be read, is not of a kind that the recipe predicts from, or
                the model's output has NaN.
        """
        with streams.scope(self.seed, "predict"), torch.no_grad():
            batch = self.batch_of(files)
            with self.precision.autocast(), _refuse_nan(self.model, files):
                return self.recipe.predict(self.model, batch)

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Expand folders and patterns into files, or raise a ConfigError if there are none."""
        return expand(paths, self.recipe)

    def predict_files(
        self,
        paths: Sequence[Path],
        output: Path | None,
        *,
        threshold: float | None = None,
        batch: int = 1,
    ) -> Iterator[tuple[Path, Prediction, list[Path]]]:
        """Yield each file with its prediction, and the pictures or sounds written for it.

        Args:
            paths: Files, as `files` returns them.
            output: A folder for pictures and sounds; None: none are written.
            threshold: The lowest score to predict; None: all.
            batch: The number of files that the model takes at once. Files of different shapes are
                predicted one by one.

        Raises:
            ConfigError: A prediction has no score; or, at the end, files could not be read.
        """
        ConfigError.raise_if(
            threshold is not None and not 0 <= threshold <= 1,
            "--threshold",
            "is not a valid score",
            threshold,
            "a number from 0 to 1",
        )
        ConfigError.raise_if(
            batch < 1, "--batch", "is not a valid number of files", batch, "a whole number from 1"
        )
        problems: list[Problem] = []
        named_paths = zip(paths, names(paths), strict=True)
        for start in range(0, len(paths), batch):
            for prediction, (file, name) in zip(
                self._try_predict(paths[start : start + batch]), named_paths, strict=False
            ):
                if isinstance(prediction, SamewiseError):
                    problems += prediction.problems
                    continue
                chosen = prediction if threshold is None else prediction.at_least(threshold)
                yield file, chosen, _save(chosen, file, output, name)
        ConfigError.raise_all(problems)

    def batch_of(self, samples: Sequence[Any]) -> Batch:
        """Make a batch from files or samples, transformed as in evaluation, on the device.

        Raises:
            DataError: A file cannot be read.
        """
        read = [self._read(Path(x)) if isinstance(x, str | Path) else x for x in samples]
        transformed = WithTransform.of(read, self.samples, "transforms.eval.sample")
        try:
            # Samples are taken apart for transforms, where anything else would fail less clearly
            for x in read if self.samples else ():
                DataError.raise_if(
                    not isinstance(x, Mapping | tuple | list),
                    "dataset",
                    "a sample is not a dict or a pair",
                    f"a {type(x).__name__}",
                    "a sample as the data set has it",
                )
            collated = self.recipe.collate([transformed[number] for number in range(len(read))])
        except DataError as error:
            # A data set's errors are about the user's files here
            hint = (
                "pass the name of a file, or a sample as the data set has it; if you do not "
                "know the label, pass any: transforms((image, 0))"
            )
            raise DataError(
                *(
                    replace(x, path="transforms", hint=x.hint or hint) if x.path == "dataset" else x
                    for x in error.problems
                )
            ) from None
        return self.transform(self.to_device(collated))

    def _read(self, file: Path) -> Any:
        """Read a file as a sample; errors refer to the model, not to a data set."""
        try:
            return self.recipe.read(file)
        except OSError as error:
            raise DataError(
                Problem(
                    str(file),
                    f"cannot be read: {error.strerror}",
                    hint=f"predict takes the names of files: {self.recipe.takes}",
                )
            ) from None
        except DataError as error:
            if not file.exists():
                raise
            takes = f"the model takes {self.recipe.takes}"
            damaged = f"the file cannot be decoded: save it again, or download it again; {takes}"
            raise DataError(
                *(
                    replace(x, hint=damaged if "remove" in x.hint else x.hint or takes)
                    for x in error.problems
                )
            ) from None

    def _try_predict(self, files: Sequence[Path]) -> Iterator[Prediction | SamewiseError]:
        """Yield each file's prediction, or the error."""
        if len(files) > 1:
            try:
                yield from self.predict(files)
                return
            except SamewiseError:
                pass  # predict them one by one, to find the file
        for file in files:
            try:
                yield self.predict([file])[0]
            except SamewiseError as error:
                yield error


@contextmanager
def _refuse_nan(model: nn.Module, files: Sequence[Any]) -> Generator[None]:
    """Raise a DataError if the model's output has NaN."""

    # Every comparison with NaN is false, so a recipe would just predict nothing
    def refuse(module: nn.Module, inputs: Any, output: Any) -> None:
        DataError.raise_if(
            any(bool(x.isnan().any()) for x in tensors_in(output)),
            ", ".join(map(str, files)),
            "the model's output is not a number (NaN)",
            hint="its values are too large or too small for the model, or the model's "
            "weights are NaN",
        )

    with model.register_forward_hook(refuse):
        yield


def _save(prediction: Prediction, file: Path, output: Path | None, name: str) -> list[Path]:
    if output is None:
        return []
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    try:
        written = prediction.save(output, name)
        if not written and is_new:
            output.rmdir()
        return written
    except Exception as error:  # the prediction is reported without its picture
        message = f"its picture could not be drawn: {first_line(error)}"
        print(f"warning: {Problem(str(file), message, hint=raised_at(error))}", file=sys.stderr)
        return []


def build_predictor(
    composed: Composed,
    project: Project,
    state: Mapping[str, Any],
    *,
    labels: Mapping[str, Any] | None = None,
    weights: str | None = None,
) -> Predictor:
    """Build the parts that apply a trained model to files, without the data set.

    Args:
        composed: The run's config.
        project: The packages that the config may name.
        state: A checkpoint's state.
        labels: `classes` and `category_ids`, as the run's data set has them.
        weights: The name of weights that a callback keeps, such as `ema`; None: the trained ones.

    Raises:
        ConfigError: A part cannot be made, or no callback keeps such weights.
    """
    cfg = composed.cfg
    make: Make = partial(make_part, cfg, project)
    determinism.apply(cfg.reproducibility)
    device = choose_device(str(cfg.device))
    precision = make("precision")
    precision.begin(device)
    if cfg.initialise is not None:
        # The checkpoint's weights replace these, whose file may not exist here
        cfg.initialise.weights = None
    channels_last = str(cfg.memory_format) == "channels_last"
    model = make_model(cfg, make, device, channels_last=channels_last)
    load_weights(
        model, state["model"] if weights is None else _kept_weights(cfg, make, state, weights)
    )
    recipe: Recipe = make("recipe")
    recipe.classes, recipe.category_ids = (
        (labels or {}).get(name, ()) for name in ("classes", "category_ids")
    )
    if (size := _read_size(cfg)) is not None:
        recipe.read_size = size
    return Predictor(
        recipe=recipe,
        model=model.eval(),
        precision=precision,
        samples=[
            make(f"transforms.eval.sample.{number}")
            for number in range(len(cfg.transforms.eval.get("sample") or ()))
        ],
        transform=make_batch_transforms(make, "eval"),
        to_device=mover(device, channels_last=channels_last),
        seed=cfg.seed,
    )


def _read_size(cfg: DictConfig) -> list[int] | None:
    """Return [height, width] to which samewise's data set resizes images as it reads them.

    None if it keeps their size.
    """
    node: dict[str, Any] = plain(cfg.dataset.get("valid")) or {}
    size: Any = node.get("size")
    # In a user's own data set, `size` may have another meaning
    is_size = (
        str(node.get("_target_")).startswith(OURS) and isinstance(size, list) and len(size) == 2
    )
    return [int(side) for side in size] if is_size else None


def _kept_weights(
    cfg: DictConfig, make: Make, state: Mapping[str, Any], name: str
) -> Mapping[str, Any]:
    """Return the weights that a callback keeps in addition to the trained ones."""
    weights: dict[str, Mapping[str, Any]] = {}
    for callback, saved in state["callbacks"].items():
        if saved and cfg.callbacks.get(callback) is not None:
            weights |= make(f"callbacks.{callback}").weights(saved)
    require_weights(name, weights)
    return weights[name]
