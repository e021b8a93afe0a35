"""Base of data sets in shards: a split's index, labels as texts, and contents."""

import os
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from samewise.datasets.parts.keyed_split import in_split
from samewise.runner.errors import DataError, Problem
from samewise.runner.shards.index import open_index, split_folders
from samewise.runner.shards.reader import KEY, choice_hint


class ShardSamples:
    """Base of data sets in shards.

    The samples are those of a split, in the order of the shards' names, then as in the shard. The
    shards lie in `train`, `valid` and `test` below ROOT; there may be no `test`. If ROOT has no
    `train`, it has the shards itself, and a hash of each sample's key decides its split.

    Args:
        root: The folder.
        split: "train", "valid" or "test".
        content: The setting and the name of the column of contents. In tar files it is a member's
            ending; if a sample has no such member, that with one of `endings`.
        endings: Endings of members with contents.
        label: The column, the ending of a member, or the field of the JSON in `.json` with the
            label; for the name `label`, else `.cls` has it. Empty: samples have none.
        has_objects: Whether the label is the objects in the image that is the content.
        shares: Shares of `valid` and `test`, parts of 1, by hash; None: all samples are for training.
        key: The hash's key: another key splits differently.
        window: Shards, or row groups of tables, whose samples are mixed in training. So many row
            groups are in memory.

    Attributes:
        all_labels: The texts of all labels of all splits, in no order.
        own_labels: Those of this split's index, by number.
        window: As above.
        rows: int64[N], the row of each sample in the index; None: all rows.

    Raises:
        DataError: There are no shards, or one is damaged or has changed since it was indexed, or a
            sample has no label.
        ConfigError: The shares are not valid, or pyarrow is not installed.
    """

    def __init__(
        self,
        root: str,
        split: Literal["train", "valid", "test"],
        *,
        content: tuple[str, str],
        endings: Collection[str],
        label: str,
        has_objects: bool = False,
        shares: Mapping[str, float] | None,
        key: str,
        window: int = 16,
    ) -> None:
        base = os.path.expanduser(root).rstrip("/")
        DataError.raise_if(
            not base or root.endswith("://"),
            "dataset.root",
            "names no bucket" if base else "names no folder",
            root,
        )
        folders = split_folders(base)
        # There may be no test split
        splits = folders | ({split: f"{base}/{split}"} if folders and split != "test" else {})
        (self._setting, self._column), self._endings, self.window = content, endings, window
        image = self._column if has_objects else ""
        indexes = {
            x: open_index(y, label, image=image) for x, y in (splits or {split: base}).items()
        }
        self.all_labels = {x for index in indexes.values() for x in index.labels}
        self._index = indexes.get(split) or indexes["train"]
        self.own_labels = self._index.labels
        self.rows: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if not folders:
            hashes = (f"{number:016x}" for number in self._index.samples["key"])
            chosen = in_split(hashes, split, shares or {}, key=key, where=root)
            self.rows = np.flatnonzero(chosen)
        elif split not in folders:
            self.rows = np.arange(0)

    def __len__(self) -> int:
        return len(self._index.samples) if self.rows is None else len(self.rows)

    def row(self, index: int) -> int:
        """Return the row of a sample in the index."""
        return index if self.rows is None else int(self.rows[index])

    def content(self, index: int) -> tuple[bytes, str, str]:
        """Return a sample's content, the shard that holds it, and its name in there.

        Raises:
            DataError: The shard is damaged, or the sample has no such content.
        """
        shard, fields = self._index.read(self.row(index), [self._column], units=self.window)
        name = self._column
        if name not in fields:
            name = next((x for x in fields if f".{x}" in self._endings), "")
        content = fields.get(name)
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            raise DataError(
                Problem(
                    f"{shard}, {fields[KEY]}",
                    f"has no {self._setting}",
                    sorted(fields.keys() - {KEY}),
                    hint=choice_hint(fields)
                    or f"dataset.{self._setting}=NAME names the column, or the member's ending",
                )
            )
        ending = f".{name}" if f".{name}" in self._endings else ""
        return content, shard, f"{fields[KEY]}{ending}"

    def label_number(self, index: int) -> int:
        """Return the number of a sample's label among `own_labels`."""
        return int(self._index.samples["label"][self.row(index)])

    def path(self, index: int) -> str:
        """Return the shard of a sample."""
        return self._index.shard_path(self.row(index))

    def prefetch(self, indices: Sequence[int]) -> float:
        """Bring the bytes of samples from a store; return how many such calls wait."""
        return self._index.fetch([self.row(x) for x in indices], [self._column])

    @property
    def prefetch_samples(self) -> int:
        """Number of samples to bring before they are needed: a window's, in a store."""
        return self._index.ahead(self.window)

    @property
    def shard_sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers int64[U] of samples of each shard or row group."""
        ends = self._index.unit_ends
        return np.diff(ends if self.rows is None else np.searchsorted(self.rows, ends), prepend=0)

    def hash_shards(self, *facts: object) -> str:
        """Return 32 hex digits that cover the shards' content, the split, and further facts.

        They do not depend on where the data are.
        """
        shards = [(shard.digest, shard.units) for shard in self._index.shards]
        digest = blake2b(
            repr((shards, self.own_labels, *facts, self._column)).encode(), digest_size=16
        )
        if self.rows is not None:
            digest.update(self.rows)
        return digest.hexdigest()
