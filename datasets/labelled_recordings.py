"""Recordings whose file names contain their labels: `dog/1.wav`, `7_jackson_32.wav`."""

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
from samewise.runner.errors import DataError


@final
class LabelledRecordings(Dataset[dict[str, Any]]):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}`.

    All samples have length T; `length` excludes the silence at the end.

    The files are all audio files below ROOT whose names match a pattern with named groups. The
    group `label` is the class. A file in which the group `valid` or `test` matches belongs to that
    split. If the pattern has neither, a hash decides (`parts.keyed_split`): of the group `group`,
    such as a speaker, whose recordings then stay together, else of the file's name.

    Args:
        root: The folder.
        split: "train", "valid" or "test".
        pattern: A regular expression that a file's name, relative to the folder, must match
            completely.
        shares: Shares of `valid` and `test`, parts of 1, by hash.
        key: The hash's key: another key splits differently.
        classes: Class names in the order of their numbers; None: all that occur, sorted.
        num_classes: The expected number of classes; None allows any number.
        seconds: Length of a sample in seconds. A longer recording is cut: in training to a section
            that the sample's own stream draws, else to the middle.
        sample_rate: The waveforms' rate in Hz; files at another rate are resampled.
        cache: "memory" keeps all recordings, decoded.

    Raises:
        DataError: The folder does not exist, no file matches, or a class is unknown.
        ConfigError: The pattern is not a valid regular expression, or has no group `label`.
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
        matched, self.left_out = match_audio(
            folder,
            pattern,
            groups={"label": "class"},
            expected="a folder for each class, or a dataset.pattern of your own",
        )
        self.classes = (
            list(map(str, classes))
            if classes is not None
            else sorted({match["label"] for match in matched.values()})
        )
        require_known(
            str(folder), ((name, match["label"]) for name, match in matched.items()), self.classes
        )
        require_count(str(folder), self.classes, num_classes, left_out=self.left_out)
        chosen = _select_split(matched, split, shares, key, str(folder))
        self.sample_rate, self._frames, self._training = (
            sample_rate,
            max(1, round(seconds * sample_rate)),
            split == "train",
        )
        self.labels = torch.tensor(
            [self.classes.index(matched[name]["label"]) for name in chosen], dtype=torch.int64
        )
        self._recordings = (
            Recordings(folder, chosen, sample_rate=sample_rate, cache=cache) if chosen else None
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._recordings is None:
            raise IndexError(index)
        spare = self._recordings.frames(index) - self._frames
        start = (
            0 if spare <= 0 else int(torch.randint(spare + 1, ())) if self._training else spare // 2
        )
        section = self._recordings.stretch(index, start, min(self._frames, self._frames + spare))
        return {
            "waveform": crop_or_pad(section, self._frames),
            "length": len(section),
            "label": int(self.labels[index]),
            "name": self._recordings.names[index],
        }

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        return self._recordings.fields(index, label=self.classes[self.labels[index]])

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._recordings.path(index)

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for programs that prepare recordings elsewhere."""
        return audio_preparation(self.sample_rate, frames=self._frames)

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the recordings, their labels, and how they are cut."""
        parts = (
            self._recordings.fingerprint() if self._recordings else "",
            self.classes,
            self.labels.tolist(),
            self._frames,
            self._training,
        )
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _select_split(
    matched: Mapping[str, re.Match[str]],
    split: str,
    shares: Mapping[str, float],
    key: str,
    where: str,
) -> list[str]:
    # All names are matched with one pattern
    groups = next(iter(matched.values())).re.groupindex
    if "valid" in groups or "test" in groups:
        splits = {
            name: next(
                (
                    name_of_split
                    for name_of_split in ("valid", "test")
                    if match.groupdict().get(name_of_split) is not None
                ),
                "train",
            )
            for name, match in matched.items()
        }
        chosen = [name for name in matched if splits[name] == split]
        # A data set may lack a test split
        DataError.raise_if(
            not chosen and split != "test",
            where,
            f"none of {len(matched)} recordings belongs to the split {split}, by dataset.pattern",
        )
        return chosen
    key_of_name = {name: match.groupdict().get("group") or name for name, match in matched.items()}
    selected = set(
        select_split(list(dict.fromkeys(key_of_name.values())), split, shares, key=key, where=where)
    )
    return [name for name in matched if key_of_name[name] in selected]
