"""A folder of recordings whose names contain their labels: `dog/1.wav`, `7_jackson_32.wav`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch.utils.data import Dataset

from samewise.datasets.parts.audio_files import audio_preparation, match_audio
from samewise.datasets.parts.classes import require_count, require_known
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.recordings import Cache, Recordings, crop_or_pad
from samewise.runner.errors import DataError, Problem


@final
class LabelledRecordings(Dataset[dict[str, Any]]):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}`, all of length
    T; `length` excludes the silence at the end.

    Files are all audio below ROOT whose names match a pattern with named groups: `label` is the
    class; a file in which `valid` or `test` takes part belongs to that split. In a pattern that has
    neither, a hash of the file's name decides (`parts.keyed_split`), or of `group` where the
    pattern has it, as a speaker, whose recordings then stay together.

    Args:
        root: The folder.
        split: "train", "valid" or "test".
        pattern: A regular expression that a file's name, relative to the folder, must match in
            full.
        shares: Of `valid` and `test`, by hash.
        key: Of the hash: another key splits otherwise.
        classes: The labels in the order of their numbers; None: all that occur, sorted.
        num_classes: How many there should be; None: as many as there are.
        seconds: The length of a sample. Of a longer recording a stretch that is drawn by the
            sample's own stream in training, else the middle.
        sample_rate: In Hz; files at another rate are resampled.
        cache: "memory" keeps all recordings decoded.

    Raises:
        DataError: the folder does not exist, no file matches, or there are other classes.
        ConfigError: the pattern is not a valid regular expression, or has no `label`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        pattern: str = "(?P<label>[^/]+)/.+",
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        seconds: float,
        sample_rate: int,
        cache: Cache = "none",
    ) -> None:
        folder = Path(root).expanduser()
        matched = match_audio(
            folder,
            pattern,
            marks={"label": "class"},
            expected="a folder for each class, or a dataset.pattern of your own",
        )
        self.classes = (
            list(map(str, classes))
            if classes is not None
            else sorted({found["label"] for found in matched.values()})
        )
        labels = ((name, found["label"]) for name, found in matched.items())
        require_known(str(folder), labels, self.classes)
        require_count(str(folder), self.classes, num_classes)
        chosen = _select_split(matched, split, shares, key, str(folder))
        self.sample_rate, self._frames, self._training = (
            sample_rate,
            max(1, round(seconds * sample_rate)),
            split == "train",
        )
        self._labels = torch.tensor(
            [self.classes.index(matched[name]["label"]) for name in chosen], dtype=torch.int64
        )
        self._recordings = (
            Recordings(folder, chosen, sample_rate=sample_rate, cache=cache) if chosen else None
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._recordings is None:
            raise IndexError(index)
        spare = self._recordings.frames(index) - self._frames
        start = (
            0 if spare <= 0 else int(torch.randint(spare + 1, ())) if self._training else spare // 2
        )
        heard = self._recordings.stretch(index, start, min(self._frames, self._frames + spare))
        return {
            "waveform": crop_or_pad(heard, self._frames),
            "length": len(heard),
            "label": int(self._labels[index]),
            "name": self._recordings.names[index],
        }

    def path(self, index: int) -> Path:
        """The file of a sample."""
        assert self._recordings is not None
        return self._recordings.path(index)

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for those who do it elsewhere."""
        return audio_preparation(self.sample_rate, frames=self._frames)

    def fingerprint(self) -> str:
        """32 hex digits of the recordings, their labels, and how they are cropped."""
        what = (
            self._recordings.fingerprint() if self._recordings else "",
            self.classes,
            self._labels.tolist(),
            self._frames,
            self._training,
        )
        return blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _select_split(
    matched: Mapping[str, re.Match[str]],
    split: str,
    shares: Mapping[str, float],
    key: str,
    where: str,
) -> list[str]:
    groups = next(iter(matched.values())).re.groupindex
    if "valid" in groups or "test" in groups:
        splits = {
            name: next(
                (one for one in ("valid", "test") if found.groupdict().get(one) is not None),
                "train",
            )
            for name, found in matched.items()
        }
        chosen = [name for name in matched if splits[name] == split]
        if not chosen and split != "test":
            raise DataError(
                Problem(
                    where,
                    f"none of {len(matched)} recordings belongs to the split {split}, by "
                    "dataset.pattern",
                )
            )
        return chosen
    hashed = {name: found.groupdict().get("group") or name for name, found in matched.items()}
    wanted = set(
        select_split(list(dict.fromkeys(hashed.values())), split, shares, key=key, where=where)
    )
    return [name for name in matched if hashed[name] in wanted]
