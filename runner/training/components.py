"""The model, the data and the transforms of a run, made from its config; for `build`, and in part for `build_predictor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.config.schema import SPLITS
from samewise.runner.config.tree import plain
from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.loading import Key, KeyedDataset, Loader
from samewise.runner.data.order import InOrder, Order, Shuffled
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.interfaces import Batch, Recipe
from samewise.runner.optim.groups import freeze_groups
from samewise.runner.optim.initialise import initialise
from samewise.runner.training import determinism
from samewise.runner.training.run import Split
from samewise.runner.training.workarounds import work_around

Make = Callable[..., Any]
"""Makes the part at a path of the config."""


def make_part(cfg: DictConfig, project: Project, path: str) -> Any:
    """The object that stands at a path, such as `transforms.eval.sample.0`."""
    node: Any = cfg
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else node[part]
    return instantiate(node, path, allowed=project.packages)


def make_model(cfg: DictConfig, make: Make, device: torch.device, *, channels_last: bool, images: Callable[[int], Tensor] | None = None) -> nn.Module:
    """The model with its initial weights: made on the CPU in a stream of its own, so that they are the same on every device."""
    with streams.scope(cfg.seed, "init"):
        model = make("model")
        if not isinstance(model, nn.Module):
            raise ConfigError(Problem("model", "is not a torch.nn.Module", type(model).__name__))
        model.train()  # before anything is frozen: a layer that is held stays in evaluation
        if cfg.initialise is not None:
            initialise(model, cfg.initialise, made_by=str(cfg.model.get("_target_", "")), images=images)
        freeze_groups(model, plain(cfg.param_groups) or {})
    determinism.require_deterministic(model, device, cfg.reproducibility)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch documents it, its stubs do not)
    work_around(model, device)
    return model.to(device)


def make_splits(cfg: DictConfig, make: Make, recipe: Recipe) -> dict[str, Split]:
    """The data set's splits by name; a ConfigError where one is missing that training needs."""
    splits: dict[str, Split] = {}
    for name in SPLITS:
        if cfg.dataset.get(name) is None:
            continue
        stage = "train" if name == "train" else "eval"
        with streams.scope(cfg.seed, "dataset"):
            dataset = _made_of_root(make, f"dataset.{name}", plain(cfg.dataset[name]).get("root"))
        splits[name] = Split(name, dataset, _keyed(cfg, make, recipe, dataset, name, stage=stage))
    for name in ("train", "valid"):
        if name not in splits:
            raise ConfigError(Problem(f"dataset.{name}", "is missing", expected="a data set"))
        if not len(splits[name].dataset):
            raise DataError(Problem(f"dataset.{name}", "has no samples"))
    return splits


def _made_of_root(make: Make, path: str, root: Any) -> Any:
    """A data set; where it finds nothing because `root` leads elsewhere, the problem is that of `dataset.root`."""
    try:
        return make(path)
    except DataError as error:
        told = error.problems[0]
        given, missing = Path(str(root)).expanduser(), Path(told.path)
        if not isinstance(root, str) or "dataset.download" in told.hint or not missing.is_relative_to(given):
            raise
        if not given.exists():
            above = next(folder for folder in given.absolute().parents if folder.is_dir())
            first = given.absolute().relative_to(above).parts[0]
            near = get_close_matches(first, [folder.name for folder in above.iterdir() if folder.is_dir()], n=1)
            hint = f"did you mean {given.parent / near[0]}?" if near and above == given.absolute().parent else "set dataset.root=FOLDER"
            raise DataError(Problem("dataset.root", "this folder does not exist", root, told.expected or "the folder of the data", hint)) from error
        if not missing.exists() and (given.absolute().parent / missing.relative_to(given)).exists():
            up = given.parent if given.name not in ("", "..") else given / ".."
            words = f"holds no {missing.relative_to(given)}; the folder above it does"
            raise DataError(Problem("dataset.root", words, root, "the folder of the data", f"dataset.root={up}")) from error
        raise


def _keyed(cfg: DictConfig, make: Make, recipe: Recipe, dataset: Any, split: str, *, stage: str) -> KeyedDataset:
    """A split's data set with the sample transforms of a stage."""
    transforms = [make(f"transforms.{stage}.sample.{number}") for number in range(len(cfg.transforms[stage].get("sample") or ()))]
    return KeyedDataset(
        WithTransform.of(dataset, transforms),
        recipe.collate,
        seed=cfg.seed,
        stream="sample" if stage == "train" else "eval",
        name=f"dataset.{split}",
        require=recipe.require,
    )


def make_order(cfg: DictConfig, make: Make, dataset: Any) -> Order:
    """The order of the training split: `loader.order`, else shuffled or not."""
    if cfg.loader.order is not None:
        return make("loader.order")(dataset, seed=cfg.seed)
    return (Shuffled if cfg.loader.shuffle else InOrder)(dataset, seed=cfg.seed)


def training_images(cfg: DictConfig, make: Make, recipe: Recipe, dataset: Any, transform: Callable[[Batch], Batch], samples: int) -> Tensor:
    """So many of the training images, evenly spaced, as images are evaluated."""
    length, taken = len(dataset), min(samples, len(dataset))
    key = Key(0, 0, tuple(number * length // taken for number in range(taken)))
    with streams.preserve_generators():
        (batch,) = Loader(_keyed(cfg, make, recipe, dataset, "train", stage="eval"), lambda: iter([key]))
        images = transform(batch).get("image")
    if not isinstance(images, Tensor):
        raise ConfigError(Problem("initialise", "needs training images, but a batch of this recipe has none", sorted(batch), "an entry `image`"))
    return images


class _BatchTransforms:
    """One after the other."""

    def __init__(self, transforms: Sequence[Callable[[Batch], Batch]]) -> None:
        self._transforms = transforms
        self.need_places = any(getattr(one, "needs_places", False) for one in transforms)

    def __call__(self, batch: Batch) -> Batch:
        for transform in self._transforms:
            batch = transform(batch)
        return batch


def make_batch_transforms(make: Make, stage: str) -> Callable[[Batch], Batch]:
    """The batch transforms of `train` or `eval`, as one."""
    return _BatchTransforms(make(f"transforms.{stage}").get("batch") or [])
