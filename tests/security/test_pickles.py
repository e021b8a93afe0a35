"""A pickle anywhere in a checkpoint runs nothing, and its refusal does not advise to load it."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_keeping import keeper
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from samewise.runner.errors import CheckpointError
from samewise.runner.records import checkpoint, shards
from samewise.runner.records.files import sha256


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


class Sharded:
    """What `shards.split` accepts as a sharded tensor."""

    device_mesh = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def detach(self) -> torch.Tensor:
        return self.tensor


def write(folder: Path, spoil: Callable[[Path], None] = lambda shards: None) -> Path:
    """A sharded checkpoint after a stranger's changes to its shards, with digests that match the changes."""
    made = keeper(folder, keep_last=1, keep_best=0)
    state, tensors = shards.split({"model": {"weight": Sharded(torch.arange(6.0))}})
    inner = made.shards_folder(1)
    shards.save(tensors, inner)
    spoil(inner)
    made.save(1, {**state, "shards": {path.name: sha256(path) for path in inner.iterdir()}}, {})
    return folder / "step-00000001"


def rewrite_index(file: Path, change: Callable[[Any], None]) -> None:
    """Rewrite an index with a change."""
    index = pickle.loads(file.read_bytes())
    change(index)
    file.write_bytes(pickle.dumps(index))


def as_bytes(mark: Path) -> Callable[[Path], None]:
    """The tensor's entry claims to be bytes, and a pickle is stored in its place."""

    def spoil(folder: Path) -> None:
        written = io.BytesIO()
        torch.save(Attack(mark), written)
        (folder / "__0_0.distcp").write_bytes(written.getvalue())

        def change(index: Metadata) -> None:
            (name,) = index.state_dict_metadata
            index.state_dict_metadata[name] = BytesStorageMetadata()
            index.storage_data = {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, len(written.getvalue()))}

        rewrite_index(folder / ".metadata", change)

    return spoil


def test_torch_itself_would_run_the_pickle_in_the_shards(tmp_path: Path) -> None:
    """Otherwise the test below could not fail."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder, mark = write(tmp_path, as_bytes(tmp_path / "mark")) / "shards", tmp_path / "mark"
    load({"/model/weight": torch.empty(6)}, storage_reader=FileSystemReader(folder), no_dist=True)
    assert mark.exists()


def test_a_pickle_in_the_shards_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, as_bytes(tmp_path / "mark"))
    with pytest.raises(CheckpointError, match="which is not a tensor"):
        checkpoint.load(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("place", ["../../outside", "{}/outside", "unlisted", "../shards/__0_0.distcp"])
def test_an_index_that_names_another_file_is_refused(tmp_path: Path, place: str) -> None:
    place = place.format(tmp_path)
    torch.save(torch.full((6,), 7.0), tmp_path / "outside")

    def change(index: Metadata) -> None:
        for one in index.storage_data.values():
            one.relative_path, one.offset, one.length = place, 0, (tmp_path / "outside").stat().st_size

    path = write(tmp_path / "checkpoints", lambda folder: rewrite_index(folder / ".metadata", change))
    torch.save(torch.full((6,), 7.0), path / "shards" / "unlisted")
    with pytest.raises(CheckpointError, match="names a file that is not part of the checkpoint"):
        checkpoint.load(path)
