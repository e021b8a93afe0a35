"""Everything that can be reached from an object, as a flat mapping from paths to values: used to compare a resumed run with an undisturbed one.

It does not know what a checkpoint contains: it follows attributes, items, closures and bound arguments down to tensors, numbers and text. What it
cannot inspect must be named in `OPAQUE`, so nothing is skipped silently. Tests import this as `samewise_runner_reachable`.
"""

import collections
import copy
import dataclasses
import enum
import functools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

PLAIN = (type(None), bool, int, str, bytes, complex, range, slice, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type(Ellipsis))
ITERATORS = (type(iter(())), type(iter([])), type(iter(range(0))))
"""Iterators that can be copied, so that reading them does not consume them."""
OPAQUE = {
    "Lock": "guards, holds nothing",
    "RLock": "guards, holds nothing",
    "Thread": "writes a checkpoint beside training",
    "lock": "guards, holds nothing",
    "DictConfig": "the config: what a run is made from",
    "ListConfig": "the config: what a run is made from",
    "Console": "a terminal",
    "RemovableHandle": "takes a hook away",
    "weakref": "leads to what is reached by another way",
    "ReferenceType": "leads to what is reached by another way",
    "ProcessGroup": "a connection",
    "Reducer": "DDP's, in C++: what it holds shows in the next step's bits",
    "Logger": "DDP's statistics",
    "Store": "a connection",
    "FSDPState": "fully sharded data parallelism's, in which weights are gathered: the shards are the model's parameters",
    "FSDPParam": "the same",
    "FSDPParamGroup": "the same",
    "View": "shows the run, which is reached by itself",
    "PyRRef": "lives in another process, which sees it itself",
}
"""Classes that are not inspected, by name, with the reason."""

Paths = dict[str, Any]


def reachable(root: Any, *, skipped: Mapping[tuple[str, str], str] = {}) -> Paths:
    """The value at each path from `root`.

    Args:
        root: The object to start from.
        skipped: (class, attribute) to the reason why it is not followed; the class may be a base of the object's.
    """
    return _Walk(skipped).all(root)


def difference(one: Paths, other: Paths) -> str | None:
    """The first path at which they differ, with both values; None if they agree."""
    for path in [*one, *(path for path in other if path not in one)]:
        first, second = one.get(path, "nothing"), other.get(path, "nothing")
        if first != second:
            return f"{path}: {first} and {second}"
    return None


def of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's kind, dtype, shape, strides and device, whether it takes gradients, and a digest of its bytes."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # a copy, because fully sharded data parallelism resizes storages, which torch refuses while NumPy shares them
    missing = local.is_meta or not local.numel() or not local.untyped_storage().nbytes()  # the last case: freed until it is gathered again
    data = b"" if missing else local.detach().cpu().flatten().clone().view(torch.uint8).numpy()
    kind = type(tensor).__name__, str(tensor.dtype), list(tensor.shape), list(local.stride()), str(tensor.device), tensor.requires_grad
    return (*kind, xxhash.xxh3_64_hexdigest(data))


class _Walk:
    def __init__(self, skipped: Mapping[tuple[str, str], str]) -> None:
        self._skipped = skipped
        self._found: Paths = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # by id; the object is kept alive, so that its id is not reused
        self._storages: dict[int, str] = {}

    def all(self, root: Any) -> Paths:
        waiting = [("", root)]  # in the order of the attributes, and without recursion: a model may be deep
        while waiting:
            path, value = waiting.pop()
            waiting.extend((f"{path}{step}", inner) for step, inner in reversed(list(self._visit(path, value))))
        return self._found

    def _visit(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record the value at a path; yields what it leads to."""
        if isinstance(value, PLAIN):
            self._found[path] = value
        elif isinstance(value, float | np.generic):
            self._found[path] = float(value).hex()  # nan is nan, and -0.0 is not 0.0
        elif isinstance(value, enum.Enum | Path | type | types.ModuleType):
            self._found[path] = type(value).__name__ if isinstance(value, Path) else str(value)
        elif id(value) in self._seen and not isinstance(value, tuple):  # for immutable values it does not matter whether they appear twice
            self._found[path] = f"the same as {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = path, value
            yield from self._into(path, value)

    def _into(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Tensor):
            self._tensor(path, value)
            yield from ((f".{name}", inner) for name, inner in vars(value).items() if self._wanted(value, name))
        elif isinstance(value, ITERATORS):
            yield ".rest", list(copy.copy(value))
        elif isinstance(value, torch.Generator | np.random.RandomState):
            yield ".get_state()", value.get_state()
        elif isinstance(value, random.Random):
            yield ".getstate()", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield ".bit_generator.state", value.bit_generator.state
        elif isinstance(value, np.ndarray):
            self._found[path] = str(value.dtype), value.shape, value.strides, xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping) and type(value).__name__ not in OPAQUE:
            self._found[path] = type(value).__name__
            yield from self._items(value)
        elif isinstance(value, set | frozenset):
            self._found[path] = sorted(map(str, value))
        elif isinstance(value, Sequence | collections.deque) and type(value).__name__ not in OPAQUE:
            self._found[path] = type(value).__name__, len(value)
            yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
        elif isinstance(value, functools.partial):
            yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, types.FunctionType):
            self._found[path] = f"{value.__module__}.{value.__qualname__}"
            yield from self._closure(value)
        elif isinstance(value, types.MethodType):
            yield ".__func__", value.__func__
            yield ".__self__", value.__self__
        else:
            self._found[path] = type(value).__qualname__
            yield from self._attributes(path, value)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        self._found[path] = of_tensor(tensor)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel() and (owner := self._storages.setdefault(local.untyped_storage().data_ptr(), path)) != path:
            self._found[f"{path}.storage"] = f"that of {owner}"

    def _items(self, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """An object used as a key is named by the path where it was first found; ids of hooks, which keep increasing, are replaced by positions."""
        hooks = isinstance(mapping, collections.OrderedDict) and bool(mapping) and all(isinstance(key, int) for key in mapping)
        for number, (key, inner) in enumerate(list(mapping.items())):
            known = self._seen.get(id(key))
            named = number if hooks else f"<{known[0]}>" if known else repr(key) if isinstance(key, str | int | tuple) else f"key {number}"
            yield f"[{named}]", inner

    def _closure(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f".<{name}>", cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from ((f".{name}", inner) for name in ("__defaults__", "__kwdefaults__", "__dict__") if (inner := getattr(function, name)))

    def _attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kinds = {kind.__name__ for kind in type(value).__mro__}
        if kinds & OPAQUE.keys():
            return
        if "GradScaler" in kinds:  # its tensors are created at the first step, and none is needed before that
            yield ".state_dict()", value.state_dict()
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")}}
        builtin = isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType)
        if not held and not builtin and not hasattr(value, "__dict__") and not dataclasses.is_dataclass(value):
            raise AssertionError(f"{path} is a {type(value).__qualname__}, which cannot be looked into: name it in OPAQUE, with the reason")
        yield from ((f".{name}", inner) for name, inner in held.items() if self._wanted(value, name))

    def _wanted(self, owner: Any, name: str) -> bool:
        return not any((kind.__name__, name) in self._skipped for kind in type(owner).__mro__)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
