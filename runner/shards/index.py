"""Index of a folder of shards: from a sample's number to its shard and place in it.

A file has a line of JSON for each shard; another has a row of 28 bytes for each sample, which is
mapped into memory and not read before it is used. They are made once, by `samewise data index` or
the first training, and are the same for the same shards.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast, final
from urllib.parse import quote

import numpy as np
import xxhash
from filelock import FileLock

from samewise.runner.errors import DataError, Problem, number_of
from samewise.runner.shards import cache, storage
from samewise.runner.shards.array_record import ArrayRecord
from samewise.runner.shards.chunks import ChunkReader, litdata_columns, mds_columns
from samewise.runner.shards.reader import PLAN, Label, Reader, Sample
from samewise.runner.shards.tables import Arrow, Parquet
from samewise.runner.shards.tar import Tar

READERS: Mapping[str, Reader] = {
    ".tar": Tar(),
    ".parquet": Parquet(),
    ".arrow": Arrow(),
    ".mds": ChunkReader(mds_columns),
    ".bin": ChunkReader(litdata_columns),
    ".array_record": ArrayRecord(),
}
"""The formats, by the endings of their files."""
SAMPLE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("label", "<i4"), ("key", "<u8")])
"""A row of the index: `label` is a place among the index's labels, `key` a hash."""
Show = Callable[[Iterable[Any], int], Iterable[Any]]
"""Shows the progress over items, whose number is the second argument."""


class Shard(NamedTuple):
    """A shard in the index."""

    name: str
    size: int
    version: int | str
    digest: str
    """Hash of all its bytes."""
    units: list[int]
    """Samples of each part that is read at once."""
    labels: list[str]
    """Labels that no shard before has."""
    blocks: Sequence[str] = ()
    """Hashes of its blocks, if it is in an object store."""


@final
class ShardIndex:
    """An index that has been made, or a part of one.

    Args:
        path: The file of the shards; that of the samples is beside it.
        folder: The folder of the shards.

    Attributes:
        shards: The shards, by name.
        labels: All labels that occur.
        samples: `SAMPLE`[N], mapped into memory.
        place: Where the index lies: its path, or after `open_index` its address in the store.
        unit_ends: int64[U], the number of samples up to the end of each unit.

    Raises:
        DataError: The files are damaged.
    """

    def __init__(self, path: Path, folder: str) -> None:
        self.path, self.folder, self.place = path, folder, str(path)
        with storage.readable(str(path)):
            self.shards = [Shard(*json.loads(line)) for line in path.read_text().splitlines()]
            units = [size for shard in self.shards for size in shard.units]
            self.unit_ends = np.cumsum(np.array(units, dtype=np.int64))
            count = int(self.unit_ends[-1])
            mapped = np.memmap(path.with_suffix(".samples"), SAMPLE, "r", shape=(count,))
        self.samples = mapped.view(np.ndarray)
        self.labels = [label for shard in self.shards for label in shard.labels]
        if storage.is_remote(folder):
            for shard in self.shards:
                storage.stores().expect(f"{folder}/{shard.name}", shard.size, shard.blocks)
        self._shard_of_unit = np.repeat(
            np.arange(len(self.shards)), [len(shard.units) for shard in self.shards]
        )

    # Workers that are not forked map the file themselves
    def __reduce__(self) -> tuple[Any, ...]:
        return ShardIndex, (self.path, self.folder)

    def shard_path(self, number: int) -> str:
        """Return the shard of a sample."""
        unit = self.unit_ends.searchsorted(number, "right")
        return f"{self.folder}/{self.shards[self._shard_of_unit[unit]].name}"

    def read(self, number: int, fields: Sequence[str], *, units: int) -> tuple[str, dict[str, Any]]:
        """Return the shard of a sample and its fields, as its format's `Reader.read` does.

        Raises:
            DataError: The shard is damaged.
        """
        path, sample = self.shard_path(number), self.samples[number]
        with storage.readable(path):
            offset, length, _, _ = sample.tolist()
            return path, _reader(path).read(path, offset, length, fields, units=units)

    def fetch(self, numbers: Sequence[int], fields: Sequence[str]) -> float:
        """Bring the bytes of some samples from a store, in threads, ahead of need.

        Returns:
            How many such calls are waiting for a thread.
        """
        places = dict[str, list[tuple[int, int]]]()
        for number in numbers:
            offset, length, _, _ = self.samples[number].tolist()
            places.setdefault(self.shard_path(number), []).append((offset, length))
        return storage.stores().read_ahead(
            [partial(_reader(path).fetch, path, x, fields) for path, x in places.items()]
        )

    def ahead(self, units: int) -> int:
        """Return the samples in so many units, at most those in half the cache; 0 on the disk."""
        if not storage.is_remote(self.folder):
            return 0
        share = cache.limit() / 2 / sum(shard.size for shard in self.shards)
        return 1 + int(min(units / len(self.unit_ends), share, 1) * len(self.samples))

    def fits(self, files: Sequence[storage.File]) -> bool:
        """Return whether the shards are those files, by names, sizes and times."""
        return [shard[:3] for shard in self.shards] == [*map(tuple, files)]


def split_folders(root: str) -> dict[str, str]:
    """Return the folders of the splits below a root; empty if it has no `train`."""
    names = storage.list_folders(root)
    splits = [name for name in ("train", "valid", "test") if name in names]
    return {name: f"{root}/{name}" for name in splits} if "train" in names else {}


def plan_of(root: str) -> dict[str, Any]:
    """Return what `samewise data convert` notes of shards that it writes; empty for others."""
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        storage.open(f"{os.path.expanduser(root)}/{PLAN}") as file,
    ):
        return json.load(file)
    return {}


def digest(path: str, size: int) -> tuple[str, list[str]]:
    """Return a hash of all bytes of a shard, and of each block."""
    state, blocks = xxhash.xxh3_128(), list[str]()
    with storage.readable(path):
        for content in storage.contents(path, size):
            state.update(content)
            blocks.append(xxhash.xxh3_128_hexdigest(content))
    return state.hexdigest(), blocks


def open_index(
    folder: str,
    label: str,
    *,
    image: str = "",
    accepts_changes: bool = False,
    show: Show = lambda items, total: items,
) -> ShardIndex:
    """Open the index of a folder's shards, and make it first if there is none.

    It lies in the folder `.samewise` beside the shards; if that cannot be written, in the user's
    cache. In a store, a new index, and with `accepts_changes` any, is written there too. Shards that
    are done are kept if the work is interrupted.

    Args:
        folder: The folder.
        label: The field with the label (`reader.Label`); empty: samples have none.
        image: If the label is objects, the field with the image.
        accepts_changes: Whether shards may have changed since they were indexed.
        show: Shows the progress.

    Raises:
        DataError: A shard is damaged, has no samples, or has changed.
    """
    noted = Label(label, image)
    files, places = storage.list_files(folder, READERS), _places(folder, noted)
    beside = places[0].parent
    target = places[not os.access(beside if beside.exists() else beside.parent, os.W_OK)]
    in_store, is_published = f"{folder}/.samewise/{target.stem}", accepts_changes
    if (index := _fitting(places, folder, files)) is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            # Another process may have made it meanwhile
            index = _fitting(places, folder, files)
            if index is None and storage.is_remote(folder):
                storage.stores().receive(in_store, target)
                index = _fitting(places, folder, files)
            if index is None:
                older = next(
                    (ShardIndex(place, folder) for place in places if place.exists()), None
                )
                before = (
                    {} if older is None or accepts_changes else {x[0]: x[3] for x in older.shards}
                )
                index = _make(target, folder, files, noted, older, before, show)
                is_published = True
    if is_published and storage.is_remote(folder):
        index.place = storage.stores().publish(index.path, in_store)
    return index


def verify(
    folder: str, label: str, show: Show = lambda items, total: items, *, image: str = ""
) -> tuple[ShardIndex, list[Problem]]:
    """Return the index of a folder's shards, and what differs from it, after reading all bytes.

    Raises:
        DataError: The folder has no index.
    """
    noted = Label(label, image)
    places = _places(folder, noted)
    if storage.is_remote(folder):
        places[-1].parent.mkdir(parents=True, exist_ok=True)
        storage.stores().receive(f"{folder}/.samewise/{places[-1].stem}", places[-1])
    place = next((place for place in places if place.exists()), None)
    DataError.raise_if(
        place is None,
        folder,
        "has no index of this label",
        label,
        hint=f"`samewise data index {folder}{noted.options}` makes it",
    )
    index = ShardIndex(cast(Path, place), folder)
    sizes = {file.name: file.size for file in storage.list_files(folder, READERS)}
    reasons = {
        shard.name: "has other content than when it was indexed"
        if shard.name in sizes
        else "is missing, but was there when it was indexed"
        for shard in show(index.shards, len(index.shards))
        if shard.name not in sizes
        or digest(f"{folder}/{shard.name}", sizes[shard.name])[0] != shard.digest
    }
    new = sorted(sizes.keys() - {shard.name for shard in index.shards})
    reasons |= dict.fromkeys(new, "is not in the index")
    return index, [Problem(f"{folder}/{name}", reason) for name, reason in reasons.items()]


def _places(folder: str, label: Label) -> list[Path]:
    """Return where the index may lie: beside the shards on the disk, in the cache."""
    name = os.fsencode(folder if storage.is_remote(folder) else os.path.realpath(folder))
    cached = cache.folder() / blake2b(name, digest_size=16).hexdigest()
    # A comma is in no quoted name
    file = ",".join(quote(x, safe="") for x in label).removesuffix(",") or ","
    return [place / f"{file}.shards" for place in (Path(folder, ".samewise"), cached)]


def _fitting(
    places: Iterable[Path], folder: str, files: Sequence[storage.File]
) -> ShardIndex | None:
    indexes = (ShardIndex(place, folder) for place in places if place.exists())
    return next((index for index in indexes if index.fits(files)), None)


def _make(
    target: Path,
    folder: str,
    files: Sequence[storage.File],
    label: Label,
    older: ShardIndex | None,
    before: Mapping[str, str],
    show: Show,
) -> ShardIndex:
    """Make an index shard by shard as a draft, which the next start continues if it is interrupted.

    Args:
        target: Its file of the shards.
        folder: The folder.
        files: The shards.
        label: What to note of each sample.
        older: An index of the folder: if its shards are the first of the files, others are added.
        before: Digests by shard; those must still be the same.
        show: Shows the progress.

    Raises:
        DataError: A shard is damaged, has no samples, or has another digest than before.
    """
    draft = target.with_name(f"draft-{target.name}")
    rows_file, draft_rows = target.with_suffix(".samples"), draft.with_suffix(".samples")
    base = ShardIndex(draft, folder) if draft.exists() else older
    done = files[: len(base.shards)] if base else []
    if base is None or not base.fits(done):
        base, done = None, []
        draft.unlink(missing_ok=True)
        draft_rows.unlink(missing_ok=True)
    elif not draft.exists():
        shutil.copy(base.path.with_suffix(".samples"), draft_rows)
        shutil.copy(base.path, draft)
    numbers = {name: number for number, name in enumerate(base.labels if base else ())}
    count, pending = len(base.samples) if base else 0, files[len(done) :]
    if pending:
        print(f"indexing {number_of(len(pending), 'shard')} in {folder}", file=sys.stderr)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        paths = [f"{folder}/{file.name}" for file in pending]
        scans = pool.map(_scan, paths, [x.size for x in pending], [label] * len(pending))
        for file, (content, blocks, units) in zip(pending, show(scans, len(pending)), strict=True):
            earlier_labels, rows = len(numbers), [row for unit in units for row in unit]
            samples = [
                (
                    *(row.offset, row.length, numbers.setdefault(row.label, len(numbers))),
                    xxhash.xxh3_64_intdigest(os.fsencode(row.key)),
                )
                for row in rows
            ]
            mode, count = "r+" if count else "w+", count + len(rows)
            mapped = np.memmap(draft_rows, SAMPLE, mode, shape=(count,))
            mapped[count - len(rows) :] = np.array(samples, dtype=SAMPLE)
            mapped.flush()
            shard = Shard(*file, content, [*map(len, units)], [*numbers][earlier_labels:], blocks)
            with open(draft, "a") as lines:
                print(json.dumps(shard), file=lines)
    finally:
        # After an error, nothing further is read
        pool.shutdown(cancel_futures=True)
    digests = {shard.name: shard.digest for shard in ShardIndex(draft, folder).shards}
    for name, earlier in before.items():
        if digests.get(name) != earlier:
            reason = "has other content than" if name in digests else "is missing, but was there"
            hint = (
                f"restore it; or, if this is meant, `samewise data index {folder}{label.options}`"
            )
            raise DataError(Problem(f"{folder}/{name}", f"{reason} when it was indexed", hint=hint))
    os.truncate(draft_rows, count * SAMPLE.itemsize)
    os.replace(draft_rows, rows_file)
    os.replace(draft, target)
    return ShardIndex(target, folder)


def _scan(path: str, size: int, label: Label) -> tuple[str, Sequence[str], list[Sequence[Sample]]]:
    """Return a shard's digest, the hashes of its blocks in a store, and the samples of its units."""
    content, blocks = digest(path, size)
    if storage.is_remote(path):
        storage.stores().expect(path, size, blocks)
    with storage.readable(path):
        units = list(_reader(path).scan(path, label))
    if not any(units):
        raise DataError(Problem(path, "has no samples", hint="remove it"))
    return content, blocks if storage.is_remote(path) else (), units


def _reader(path: str) -> Reader:
    return READERS[storage.ending_of(path)]
