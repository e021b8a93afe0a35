"""Places of a config and the kind of component that each accepts, from certain packages.

Nothing else is ever called. A place is known by its path. A component may have further components
among its arguments; they are of the kinds that its place names as `parts`. A target is a public
class of that kind, or a function annotated to return one (`def net(width: int) -> nn.Module`);
never a method. tests/security/reachable.txt lists all of them.
"""

import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.config.annotations import evaluate


@dataclass(frozen=True)
class Kind:
    """One kind of component.

    Args:
        description: For messages.
        packages: Where it is found, besides the user's own packages.
        base: The class that it inherits from; empty: `methods` decide.
        methods: The methods that it must have, if there is no common base class, or other ones that
            do as well; those of torch's `Dataset`, which only raise an error, do not count.
        functions: Whether functions that return one count as well.
    """

    description: str
    packages: tuple[str, ...]
    base: str = ""
    methods: tuple[tuple[str, ...], ...] = ()
    functions: bool = False

    def includes(self, cls: type) -> bool:
        """Return whether a class is of this kind."""
        if not self.base:
            return any(has_methods(cls, names) for names in self.methods)
        module, _, name = self.base.rpartition(".")
        return issubclass(cls, getattr(importlib.import_module(module), name))


def has_methods(cls: type, names: Sequence[str]) -> bool:
    """Return whether a class has all these methods, without those of torch's `Dataset`."""
    own = [base for base in cls.__mro__ if not _is_torch_dataset(base)]
    return all(any(name in vars(base) for base in own) for name in names)


INTERFACES = "samewise.runner.interfaces"
MAPPED = ("__getitem__", "__len__")
MODULE = Kind(
    "a torch.nn.Module",
    ("torch.nn", "torchvision.models", "torchvision.ops", "torchaudio.models", "samewise.recipes"),
    "torch.nn.Module",
    functions=True,
)
METRIC = Kind(
    "a metric", ("torchmetrics.classification", "torchmetrics.regression"), "torchmetrics.Metric"
)
DATASET = Kind(
    "a data set",
    ("torchvision.datasets", "torchaudio.datasets", "samewise.datasets"),
    methods=(MAPPED, ("read_shard",)),
)
MAP_STYLE = (
    "a data set must be map-style, with __len__ and __getitem__: any sample must be loadable "
    "by its index, so that a run can be resumed at any step; a stream does as well if it has "
    "shard_sizes and read_shard(number): docs/shards.md has an example"
)
TRANSFORM = Kind(
    "a transform",
    ("torchvision.transforms", "torchaudio.transforms", "samewise.datasets.transforms", "torch.nn"),
    methods=(("__call__",),),
)
OPTIMIZER = Kind(
    "an optimizer",
    ("torch.optim", "samewise.runner.optim.muon", "timm.optim.lamb", "timm.optim.lars"),
    "torch.optim.Optimizer",
)
SCHEDULE = Kind(
    "a schedule", ("samewise.runner.optim",), "samewise.runner.optim.schedules.base.Schedule"
)
OBSERVER = Kind(
    "a function of yours whose first parameter is annotated as RunView",
    (),
    f"{INTERFACES}.RunView",
    functions=True,
)
KINDS = {
    "recipe": Kind("a recipe", ("samewise.recipes",), f"{INTERFACES}.Recipe"),
    "model": MODULE,
    "distil.teacher": MODULE,
    "dataset.*": DATASET,
    "transforms.*.*.*": TRANSFORM,
    "optimizer": OPTIMIZER,
    "optimizer.*": OPTIMIZER,
    "scheduler": SCHEDULE,
    "precision": Kind(
        "a precision", ("samewise.runner.precision",), "samewise.runner.precision.Precision"
    ),
    "strategy": Kind(
        "a strategy", ("samewise.runner.strategies",), "samewise.runner.strategies.base.Strategy"
    ),
    "callbacks.*": Kind("a callback", ("samewise.runner.callbacks",), f"{INTERFACES}.Callback"),
    "loader.order": Kind(
        "an order of samples", ("samewise.runner.data",), "samewise.runner.data.order.Order"
    ),
    "launcher": Kind(
        "a launcher", ("samewise.runner.launchers",), "samewise.runner.launchers.base.Launcher"
    ),
    "sweeper": Kind(
        "a sweeper", ("samewise.runner.sweepers",), "samewise.runner.sweepers.base.Sweeper"
    ),
    # Not in a config: the variable by which a sweeper gives its jobs a callback
    "SAMEWISE_REPORTER": Kind(
        "a callback", ("samewise.runner.sweepers",), f"{INTERFACES}.Callback"
    ),
}
"""The places that components are built for; `*` is any one key."""

PARTS = {
    "recipe": (MODULE, TRANSFORM, METRIC),
    "model": (MODULE,),
    "distil.teacher": (MODULE,),
    "dataset.*": (DATASET, TRANSFORM),
    "transforms.*.*.*": (TRANSFORM,),
    "callbacks.*": (OBSERVER,),
    "scheduler": (
        SCHEDULE,
        Kind(
            "a torch scheduler",
            ("torch.optim.lr_scheduler",),
            "torch.optim.lr_scheduler.LRScheduler",
        ),
    ),
}
"""What may be among the arguments of a place's component. In the others, none but classes of the
user's own packages."""

REFUSED = {
    "torch.nn.parallel": "wraps a model for several devices: `strategy` does",
    "torchvision.datasets.kinetics": "downloads from the addresses that a file in its folder lists",
    "torchvision.datasets.lsun": "reads a pickle from the current folder",
    "torchvision.datasets.utils": "downloads and unpacks",
    "torchaudio.datasets.utils": "unpacks",
    "torchaudio.models.wav2vec2.utils": "takes apart another library's object",
    "torchvision.datasets.video_utils": "unpickles what it is given",
    "torchvision.models.feature_extraction": "generates and compiles source code "
    "from the names of layers",
}
"""Parts of these packages that hold no component that a config may name, and why."""


def kinds_at(path: str) -> tuple[Kind, ...]:
    """The kinds allowed at a path.

    All kinds if the path is not the place of a component, such as a part that others refer to.
    """
    if (pattern := place_at(path)) is not None:
        return (KINDS[pattern],)
    pattern = next((slot for slot in KINDS if re.match(_expression(slot) + r"\.", path)), None)
    return (
        PARTS.get(pattern, ())
        if pattern is not None
        else (*KINDS.values(), *(kind for parts in PARTS.values() for kind in parts))
    )


def place_at(path: str) -> str | None:
    """Return the place, as written in `KINDS`, whose own component is at this path."""
    return next((slot for slot in KINDS if re.fullmatch(_expression(slot), path)), None)


def packages_at(path: str) -> tuple[str, ...]:
    """The packages whose components are allowed at a path."""
    return tuple(dict.fromkeys(package for kind in kinds_at(path) for package in kind.packages))


def place_of(target: str) -> tuple[Kind, str] | None:
    """Return the kind and the place of one of samewise's own targets."""
    return next(
        (
            (kind, place)
            for place, kind in KINDS.items()
            if within(
                target, [package for package in kind.packages if package.startswith("samewise.")]
            )
        ),
        None,
    )


def takes(path: str, located: Any, own: Sequence[str]) -> bool:
    """Return whether the mapping at a path accepts a class or function as its `_target_`."""
    if (
        isinstance(located, type)
        and within(located.__module__, own)
        and not located.__name__.startswith("_")
        and place_at(path) is None
    ):
        return True  # an argument of any class, from one of the user's packages
    return any(_is(kind, located, own) for kind in kinds_at(path))


def _is(kind: Kind, located: Any, own: Sequence[str] = ()) -> bool:
    """Return whether a class or function is of a kind and from an allowed package."""
    if not isinstance(located, type | types.FunctionType) or located.__name__.startswith("_"):
        return False
    home = str(located.__module__)
    is_own = within(home, own)
    if within(home, tuple(REFUSED)) or not (is_own or within(home, kind.packages)):
        return False
    if kind is OBSERVER:
        return isinstance(located, types.FunctionType) and _observes(located)
    product = (
        located
        if isinstance(located, type)
        else return_class(located)
        if is_own or kind.functions
        else None
    )
    if (
        kind is DATASET
        and product is not located
        and product is not None
        and _is_torch_dataset(product)
    ):
        # Says too little of a class, but enough of what a user's function returns, which is looked
        # at when the split is made
        return True
    return product is not None and kind.includes(product)


def _observes(function: Callable[..., Any]) -> bool:
    """Return whether a module's function has a first parameter annotated as `RunView`."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    annotation = evaluate(first.annotation, function) if first else None
    return getattr(annotation, "__name__", "") == "RunView" and "." not in function.__qualname__


def _is_torch_dataset(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("torch.utils.data.dataset", "Dataset")


def return_class(function: Callable[..., Any]) -> type | None:
    """The class in the return annotation of a module's own function."""
    # Methods and inner functions do not count
    if "." in getattr(function, "__qualname__", "."):
        return None
    returned = evaluate(inspect.signature(function).return_annotation, function)
    if isinstance(origin := typing.get_origin(returned), type) and _is_torch_dataset(
        origin
    ):  # of Dataset[Sample]
        return origin
    # typing.Any is a class since Python 3.11
    return returned if isinstance(returned, type) and returned is not Any else None


def within(name: str, packages: Sequence[str]) -> bool:
    """Return whether a dotted name is in one of the packages."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def describe_kinds(path: str) -> str:
    """The kinds allowed at a path, in words."""
    return " or ".join(dict.fromkeys(kind.description for kind in kinds_at(path))) or "no component"


def known_slots() -> dict[tuple[Kind, Any], list[str]]:
    """Return everything that a config can call, by kind, except from the user's packages.

    Each has all its names, the shortest first.
    """
    slots = dict[tuple[Kind, Any], list[str]]()
    for kind in dict.fromkeys(
        (*KINDS.values(), *(kind for parts in PARTS.values() for kind in parts))
    ):
        for package in kind.packages:
            for module in _modules(package):
                for name, member in vars(module).items():
                    if not name.startswith("_") and _is(kind, member):
                        slots.setdefault((kind, member), []).append(f"{module.__name__}.{name}")
    return {key: sorted(names, key=lambda name: (len(name), name)) for key, names in slots.items()}


def _modules(package: str) -> Iterator[types.ModuleType]:
    try:
        module = importlib.import_module(package)
    except ImportError:  # requires something that is not installed
        return
    yield module
    for module_info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not module_info.name.startswith("_") and not within(
            f"{package}.{module_info.name}", tuple(REFUSED)
        ):
            yield from _modules(f"{package}.{module_info.name}")


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]+")
