"""Tensors in shards on disk, by torch.distributed.checkpoint.

Each process writes its shards and reads those it needs. In a checkpoint's state, each sharded
tensor is replaced by its key, shape and dtype; `shards/` beside it contains the tensors.
"""

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from samewise.runner.errors import first_line
from samewise.runner.records.files import open_to_read, sha256

KEY = "samewise.shards"
SAFE = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "Path"),
}
"""Names that the index of a folder of shards, which is a pickle, may use, by module.

None stands for the classes of the module.
"""


def split(state: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Separate a state from its sharded tensors; return both, the tensors by key."""
    if hasattr(state, "device_mesh"):
        dtype = str(state.dtype).removeprefix("torch.")
        return {KEY: prefix, "shape": list(state.shape), "dtype": dtype}, {prefix: state.detach()}
    tensors = dict[str, Tensor]()
    if not isinstance(state, Mapping | list | tuple):
        return state, tensors
    is_mapping = isinstance(state, Mapping)
    items = (
        cast("Mapping[Any, Any]", state).items()
        if is_mapping
        else enumerate(cast("Sequence[Any]", state))
    )
    plain = dict[Any, Any]()
    for name, item in items:
        plain[name], inner = split(item, f"{prefix}/{name}")
        tensors |= inner
    return plain if is_mapping else type(state)(plain.values()), tensors  # pyright: ignore[reportUnknownVariableType, reportCallIssue]


def load_shards(
    state: Any,
    folder: Path,
    listed: Collection[str],
    empty: Callable[[list[int], torch.dtype], Tensor],
) -> Any:
    """Return the whole state, with the sharded tensors that `save` wrote to a folder.

    Args:
        state: A state from `split`.
        folder: The folder of the shards.
        listed: Names of its files that may be read.
        empty: Creates a tensor, or this process's shard of it, to be filled.
    """
    tensors = dict[str, Tensor]()
    state = _with_empty(state, empty, tensors)
    if tensors:
        _load(tensors, folder, listed)
    return state


def _with_empty(
    state: Any, empty: Callable[[list[int], torch.dtype], Tensor], tensors: dict[str, Tensor]
) -> Any:
    if isinstance(state, Mapping):
        mapping = cast("Mapping[Any, Any]", state)
        if KEY in mapping:
            return tensors.setdefault(
                mapping[KEY], empty(list(mapping["shape"]), getattr(torch, mapping["dtype"]))
            )
        return {name: _with_empty(item, empty, tensors) for name, item in mapping.items()}
    if isinstance(state, list | tuple):
        return type(state)(
            _with_empty(item, empty, tensors) for item in cast("Sequence[Any]", state)
        )  # pyright: ignore[reportUnknownVariableType, reportCallIssue]
    return state


def save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this process's shards.

    All processes call it with one shared folder.

    Raises:
        RuntimeError: One of the processes failed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as write

    try:
        write(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()
        )
        raise RuntimeError(reasons) from error


def digests(folder: Path, rank: int) -> dict[str, str]:
    """Return the SHA-256 of each file that a rank has written; rank 0 includes the index."""
    written = [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]
    return {path.name: sha256(path) for path in sorted(written)}


def _load(tensors: dict[str, Tensor], folder: Path, listed: Collection[str]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    index = _read_index(folder, listed)

    @final
    class Reader(FileSystemReader):
        """Reads the index without running anything that it names; torch reads the tensors."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            from torch.distributed.checkpoint.metadata import StorageMeta

            index.storage_meta = index.storage_meta or StorageMeta()
            index.storage_meta.load_id = self.load_id
            return index

    @final
    class Tensors(DefaultLoadPlanner):
        """Reads tensors only: torch would unpickle other entries, which may name anything."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise pickle.UnpicklingError(
                "the shards contain something other than tensors, which is not loaded"
            )

    with warnings.catch_warnings():
        # torch warns of `no_dist`, with which each process reads for itself
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            read(tensors, storage_reader=Reader(folder), planner=Tensors(), no_dist=True)
        except CheckpointException as error:
            # CheckpointException is no Exception, and its message has many lines
            raise RuntimeError(first_line(error.failures[min(error.failures)][0])) from None


def _read_index(folder: Path, listed: Collection[str]) -> Any:
    """Return the index, if it describes only tensors in the listed files.

    Raises:
        pickle.UnpicklingError: It names something else.
    """
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from samewise.runner.torch_private import StorageInfo

    handle = open_to_read(folder / ".metadata") if ".metadata" in listed else None
    if handle is None:
        raise pickle.UnpicklingError("the checkpoint does not name the index of its shards")
    with handle:
        index: Any = Index(handle).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError("the index of the shards is not a valid index")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(
                f"the index of the shards has {name}, which is not a tensor"
            )
    places: Mapping[Any, Any] = index.storage_data or {}
    for place in places.values():
        if (
            not isinstance(place, StorageInfo)
            # A subclass may compare equal to any name
            or type(place.relative_path) is not str
            or place.relative_path not in listed
            # These name the extensions by which torch would decode the file
            or place.transform_descriptors
        ):
            raise pickle.UnpicklingError(
                "the index of the shards names a file that is not part of the checkpoint: "
                f"{getattr(place, 'relative_path', place)!r}"
            )
    return index


@final
class Index(pickle.Unpickler):
    """Unpickles the index of a folder of shards, and refuses every class outside `SAFE`."""

    def find_class(self, module: str, name: str) -> Any:
        value: Any = (
            super().find_class(module, name) if module in SAFE or module == "torch" else None
        )
        if module == "torch" and (isinstance(value, torch.dtype) or value is torch.Size):
            return value
        if module in SAFE and (
            name in allowed
            if (allowed := SAFE[module]) is not None
            else isinstance(value, type) and value.__module__ == module
        ):
            return value
        raise pickle.UnpicklingError(
            f"the index of the shards names {module}.{name}, which is not allowed in it"
        )
