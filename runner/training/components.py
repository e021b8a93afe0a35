"""Makes a run's model, data and transforms from its config, for `build` and `build_predictor`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samewise.runner.config.check import at_source
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.config.schema import splits_in
from samewise.runner.config.slots import DATASET, MAP_STYLE, MAPPED, has_methods
from samewise.runner.config.tree import plain
from samewise.runner.data import streams
from samewise.runner.data.dataset import ByShard, Joined, WithTransform, apply
from samewise.runner.data.device import map_tensors
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.data.order import Checked, InOrder, Order, shuffled
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    SamewiseError,
    first_few,
    raised_at,
    summarise_error,
)
from samewise.runner.interfaces import Batch, Recipe, class_names
from samewise.runner.optim.groups import freeze_groups
from samewise.runner.optim.initialise import initialise
from samewise.runner.optim.weights import load_weights
from samewise.runner.records.digest import tensor_kind
from samewise.runner.strategies.tree import own_elements
from samewise.runner.training.run import Split
from samewise.runner.training.same_bits import determinism
from samewise.runner.training.same_bits.workarounds import work_around

Make = Callable[..., Any]
"""A function that makes the part at a path of the config."""
LIBRARIES = ("samewise", "torch", "torchvision", "torchaudio", "timm", "transformers")
"""Packages whose models draw from seeded generators, and keep their state in their state_dict."""
_ENCODED = (
    "transforms=imagenet_on_device and imagenet_v2_on_device decode on the device; or set "
    "dataset.decode=worker"
)


def make_part(cfg: DictConfig, project: Project, path: str) -> Any:
    """Make the object at a path, such as `transforms.eval.sample.0`."""
    node: Any = cfg
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else node[part]
    try:
        return instantiate(node, path, allowed=project.packages)
    except ConfigError as error:
        # A value may refer to another key, such as ${dataset.decode}, which is the one to change
        raise type(error)(
            *[at_source(problem, cfg) for problem in error.problems]
        ) from error.__cause__


def make_model(
    cfg: DictConfig,
    make: Make,
    device: torch.device,
    *,
    channels_last: bool,
    images: Callable[[int], Tensor] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Make the model with its initial weights.

    Args:
        cfg: The resolved config.
        make: The function that makes its parts.
        device: The device to move the model to.
        channels_last: Whether to store images' channels last.
        images: A function that returns so many training images, for initialisations by data.
        prepare: A function that sets the model's buffers by the training split; None: a checkpoint
            will.

    Returns:
        The model, in training mode.
    """
    # On the CPU, in a random stream of its own: the same weights on every device
    with streams.scope(cfg.seed, "init"):
        model = make("model")
        ConfigError.raise_if(
            not isinstance(model, nn.Module),
            "model",
            "is not a torch.nn.Module",
            type(model).__name__,
        )
        _require_shapes(model)
        kinds = {
            name: f"{tensor_kind(value)} tensor" if torch.is_tensor(value) else type(value).__name__
            for name, value in model.state_dict().items()
        }
        ConfigError.raise_all(
            Problem(
                "model",
                f"{name} is a {kind}",
                expected="only dense tensors in the model's state_dict, since checkpoints hold "
                "nothing else of a model; get_extra_state may return one",
            )
            for name, kind in kinds.items()
            if kind != " tensor"
        )
        _require_own_elements(model)
        # Before freezing, since a frozen layer stays in evaluation mode
        model.train()
        if prepare is not None:
            prepare(model)
        if cfg.initialise is not None:
            initialise(
                model, cfg.initialise, made_by=str(cfg.model.get("_target_", "")), images=images
            )
        freeze_groups(model, plain(cfg.param_groups) or {})
    determinism.require_deterministic(model, device, cfg.reproducibility)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch documents it, its stubs do not)
    work_around(model, device)
    if make("precision").is_double:
        model.double()
    return model.to(device)


def make_teacher(cfg: DictConfig, make: Make, device: torch.device) -> nn.Module:
    """Make the frozen teacher of `distil` with its weights, in evaluation mode."""
    if cfg.distil.weights is None or isinstance(cfg.distil.teacher, str):
        raise ConfigError(
            Problem(
                "distil",
                "has no trained teacher",
                expected="distil.teacher=run:RUN; or a model with distil.weights",
            )
        )
    with streams.scope(cfg.seed, "teacher"):
        teacher = make("distil.teacher")
    try:
        load_weights(
            teacher,
            cfg.distil.weights,
            strict=True,
            made_by=str(cfg.distil.teacher.get("_target_", "")),
        )
    except ConfigError as error:
        raise ConfigError(
            *[
                # Its other hints are about settings of `initialise`
                replace(x, path="distil.weights", hint="" if "initialise." in x.hint else x.hint)
                for x in error.problems
            ]
        ) from error.__cause__
    return (
        teacher.eval()
        .requires_grad_(False)
        .to(device=device, dtype=torch.float64 if make("precision").is_double else None)
    )


def _require_shapes(model: nn.Module) -> None:
    """Raise a ConfigError for each lazy layer, since initial weights are needed before a step."""
    problems = list[Problem]()
    for name, layer in model.named_modules():
        if any(map(is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False)))):
            message = (
                f"{name or 'it'} ({type(layer).__name__}) gets its weights in its first forward "
                "pass, but samewise initialises weights before"
            )
            become: Any = getattr(layer, "cls_to_become", None)
            problems.append(
                Problem(
                    "model",
                    message,
                    expected=f"{become.__name__} with {next(iter(signature(become).parameters))}"
                    if become
                    else "a layer with fixed shapes",
                )
            )
    ConfigError.raise_all(problems)


def _require_own_elements(model: nn.Module) -> None:
    """Raise a ConfigError for each expanded tensor in the model's state_dict.

    `load_state_dict` cannot write to such a tensor.
    """
    ConfigError.raise_all(
        Problem(
            "model",
            f"{name} is an expanded tensor: its elements share memory, so no checkpoint could be "
            "loaded into it",
            hint="add .clone(); or, for a buffer that need not be saved, persistent=False",
        )
        for name, tensor in model.state_dict().items()
        # A module loads its extra state by code of its own
        if not name.endswith("_extra_state") and own_elements(tensor).shape != tensor.shape
    )


def make_splits(
    cfg: DictConfig, make: Make, recipe: Recipe, *, only: str | None = None
) -> dict[str, Split]:
    """Make the data set's splits, by name.

    Args:
        cfg: The resolved config.
        make: The function that makes its parts.
        recipe: The recipe, which collates samples.
        only: The only split to make; None: all.

    Raises:
        ConfigError: A split that is needed is missing, or numbers its classes in another way.
        DataError: A split has no samples.
    """
    splits: dict[str, Split] = {}
    there = splits_in(cfg.dataset)
    ConfigError.raise_if(
        only is not None and only not in there,
        f"dataset.{only}",
        "this data set does not have that split",
        hint="one of: " + ", ".join(there),
    )
    further = [name for name in there if name.startswith("train_")]
    for name in [x for x in there if x not in further] if only is None else [only]:
        stage = "train" if name == "train" else "eval"
        dataset = make_dataset(cfg, make, name)
        if stage == "train" and further:
            dataset = Joined({name: dataset, **{x: make_dataset(cfg, make, x) for x in further}})
            for part, data in dataset.parts.items():
                DataError.raise_if(not len(data), f"dataset.{part}", "has no samples")
            _require_same_numbering({x: class_names(part) for x, part in dataset.parts.items()})
        splits[name] = Split(
            name, dataset, _key_split(cfg, make, recipe, dataset, name, stage=stage)
        )
    for name in ("train", "valid") if only is None else [only]:
        ConfigError.raise_if(
            name not in splits, f"dataset.{name}", "is missing", expected="a data set"
        )
        DataError.raise_if(not len(splits[name].dataset), f"dataset.{name}", "has no samples")
    _require_same_numbering({name: class_names(split.dataset) for name, split in splits.items()})
    return splits


def make_dataset(cfg: DictConfig, make: Make, name: str) -> Any:
    """Make the data set of a split, map-style."""
    with streams.scope(cfg.seed, "dataset"):
        dataset = _make_from_root(make, f"dataset.{name}", plain(cfg.dataset[name]).get("root"))
    ConfigError.raise_if(
        not DATASET.includes(type(dataset)),
        f"dataset.{name}",
        f"is not {DATASET.description}",
        type(dataset).__name__,
        hint=MAP_STYLE,
    )
    if has_methods(type(dataset), MAPPED):
        return dataset
    ConfigError.raise_if(
        not hasattr(dataset, "shard_sizes"),
        f"dataset.{name}",
        "has no attribute shard_sizes, the number of samples of each shard",
        type(dataset).__name__,
        hint=MAP_STYLE,
    )
    return ByShard(dataset)


def _require_same_numbering(classes: Mapping[str, Sequence[str]]) -> None:
    """Raise a ConfigError if a split numbers its classes in another way than the training split.

    A split may have more or fewer classes, or no names for them.
    """
    there = classes.get("train", ())
    for split, names in classes.items():
        if other := next(
            (
                (label, *pair)
                for label, pair in enumerate(zip(names, there, strict=False))
                if pair[0] != pair[1]
            ),
            None,
        ):
            raise ConfigError(
                Problem(
                    f"dataset.{split}",
                    (
                        "numbers its classes differently from dataset.train: label {} is "
                        "{!r} here, "
                        "and {!r} there"
                    ).format(*other),
                    first_few(names, 10),
                    first_few(there, 10),
                    "number the classes of all splits as in training; for images in folders, "
                    "dataset=image_folder does",
                )
            )


def _make_from_root(make: Make, path: str, root: Any) -> Any:
    """Make a data set; where its `root` is wrong, say so in place of its own error."""
    try:
        return make(path)
    except DataError as error:
        problem = error.problems[0]
        folder_given, missing = Path(str(root)).expanduser(), Path(problem.path)
        if (
            not isinstance(root, str)
            or "dataset.download" in problem.hint
            or "://" in problem.path
            or not missing.is_relative_to(folder_given)
        ):
            raise
        if "://" in root:
            raise DataError(
                Problem(
                    "dataset.root",
                    "is an address, but this data set reads from the local disk only",
                    root,
                    "a folder; or dataset=shards, dataset=shard_recordings",
                    "copy the data first, for example by `rclone copy` or `aws s3 sync`",
                )
            ) from error
        if not folder_given.exists():
            # The first part of the path that is missing is the one that may be misspelled
            above = next(folder for folder in folder_given.absolute().parents if folder.is_dir())
            near = get_close_matches(
                folder_given.absolute().relative_to(above).parts[0],
                [folder.name for folder in above.iterdir() if folder.is_dir()],
                n=1,
            )
            raise DataError(
                Problem(
                    "dataset.root",
                    "this folder does not exist",
                    root,
                    problem.expected or "the folder of the data",
                    f"did you mean {folder_given.parent / near[0]}?"
                    if near and above == folder_given.absolute().parent
                    else "set dataset.root=FOLDER",
                )
            ) from error
        raise


def _key_split(
    cfg: DictConfig, make: Make, recipe: Recipe, dataset: Any, split: str, *, stage: str
) -> KeyedDataset:
    """Key a split's samples to random streams, with the sample transforms of a stage."""
    path = f"transforms.{stage}.sample"
    transforms = [
        make(f"{path}.{number}") for number in range(len(cfg.transforms[stage].get("sample") or ()))
    ]
    for number, transform in enumerate(transforms):
        ConfigError.raise_if(
            mixes(transform),
            f"{path}.{number}",
            f"{type(transform).__name__} mixes images of a batch, but gets one image here",
            hint="put it into transforms.train.batch",
        )
    ConfigError.raise_if(
        transforms and getattr(dataset, "encoded", False),
        path,
        "sample transforms run before the device decodes the images they would change",
        expected="none",
        hint=_ENCODED,
    )
    keyed = KeyedDataset(
        WithTransform.of(dataset, transforms, path),
        recipe.collate,
        seed=cfg.seed,
        stream="sample" if stage == "train" else "eval",
        name=f"dataset.{split}",
        require=recipe.require,
    )
    keyed.must_repeat = cfg.reproducibility.deterministic
    return keyed


def make_order(cfg: DictConfig, make: Make, dataset: Any) -> Order:
    """Make the training split's order: `loader.order`, or else by `loader.shuffle`."""
    if cfg.loader.order is not None:
        create = make("loader.order")
        ConfigError.raise_if(
            isinstance(create, str),
            "loader.order",
            "is not a component",
            create,
            hint=f"order={create}",
        )
        try:
            with streams.scope(cfg.seed, "order"):
                order = create(dataset, seed=cfg.seed)
        except SamewiseError:
            raise
        except Exception as error:  # also the data set's errors: an order may read samples
            raise ConfigError(
                Problem(
                    "loader.order",
                    f"cannot be created: {type(error).__name__}: {summarise_error(error)}",
                    hint=raised_at(error),
                )
            ) from error
        return (
            order
            if type(order).__module__.startswith("samewise.")
            else Checked(order, samples=len(dataset))
        )
    return (shuffled if cfg.loader.shuffle else InOrder)(dataset, seed=cfg.seed)


def training_images(
    cfg: DictConfig,
    make: Make,
    recipe: Recipe,
    dataset: Any,
    transform: Callable[[Batch], Batch],
    samples: int,
) -> Tensor:
    """Return evenly spaced training images, transformed as in evaluation, [samples, ...]."""
    length, taken = len(dataset), min(samples, len(dataset))
    key = Key(0, 0, tuple(number * length // taken for number in range(taken)))
    with streams.preserve_generators():
        (batch,) = Loader(
            _key_split(cfg, make, recipe, dataset, "train", stage="eval"), lambda: iter([key])
        )
        images: Any = transform(batch).get("image")
    ConfigError.raise_if(
        not isinstance(images, Tensor),
        "initialise",
        "needs training images, but a batch of this recipe has none",
        sorted(batch),
        "an entry `image`",
    )
    return images


class _BatchTransforms:
    """Applies the transforms at a path of the config, in order."""

    def __init__(
        self, transforms: Sequence[Callable[[Batch], Batch]], path: str, *, is_double: bool
    ) -> None:
        self._transforms, self._path, self._is_double = transforms, path, is_double
        self.decodes = bool(transforms) and getattr(transforms[0], "takes_encoded", False)
        self.mixing = [type(x).__name__ for x in transforms if mixes(x)]
        self.need_places = any(getattr(x, "needs_places", False) for x in transforms)

    def __call__(self, batch: Batch) -> Batch:
        transformed = apply(self._transforms, batch, self._path)
        return map_tensors(_double, transformed) if self._is_double else transformed


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def mixes(transform: Any) -> bool:
    """Whether a transform mixes images of a batch, as MixUp does, or contains one that does."""
    # Torchvision's base class of both is private; compared by name, torchvision is not imported
    if any(kind.__name__ == "_BaseMixUpCutMix" for kind in type(transform).__mro__):
        return True
    if type(transform).__module__.startswith("torchvision."):
        return any(map(mixes, getattr(transform, "transforms", ())))
    return bool(getattr(transform, "mixes", False))


def make_batch_transforms(make: Make, stage: str) -> Callable[[Batch], Batch]:
    """Make the batch transforms of a stage, as one function.

    Args:
        make: The function that makes parts of the config.
        stage: `train` or `eval`.

    Raises:
        ConfigError: Evaluation would mix images.
    """
    path = f"transforms.{stage}.batch"
    combined = _BatchTransforms(
        make(f"transforms.{stage}").get("batch") or [],
        path,
        is_double=make("precision").is_double,
    )
    ConfigError.raise_if(
        stage == "eval" and combined.mixing,
        path,
        f"{' and '.join(combined.mixing)} would mix the images to evaluate, and their labels",
        hint="put it into transforms.train.batch",
    )
    return combined


def require_decoded(
    splits: Mapping[str, Split], transforms: Mapping[str, Callable[[Batch], Batch]]
) -> None:
    """Raise a ConfigError if no batch transform decodes images that a data set leaves encoded."""
    for name, split in splits.items():
        stage = "train" if name == "train" else "eval"
        ConfigError.raise_if(
            getattr(split.dataset, "encoded", False)
            and not getattr(transforms[stage], "decodes", False),
            f"transforms.{stage}.batch",
            f"dataset.{name} leaves its images encoded, and no transform decodes them",
            expected="a transform that decodes, as the first",
            hint=_ENCODED,
        )
