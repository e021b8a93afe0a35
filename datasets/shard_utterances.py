"""Transcribed recordings in shards."""

from collections.abc import Mapping
from typing import Any, Literal, final

from torch.utils.data import Dataset

from samewise.datasets.parts.audio_files import audio_preparation
from samewise.datasets.parts.encoded_samples import decode_audio
from samewise.datasets.parts.folders import SOUNDS
from samewise.datasets.parts.shard_samples import ShardSamples
from samewise.datasets.parts.utterances import LETTERS, Spelling, sample


@final
class ShardUtterances(ShardSamples, Dataset[dict[str, Any]]):
    """Samples `{"waveform": float32[T], "length": T, "transcript": str, "name": str}` in shards.

    All transcripts are in the index, and are checked at the start.

    Args:
        audio: The column of the recordings, or a member's ending, as `content` in `ShardSamples`.
        text: The transcripts: a column, a member's ending, or a field of the JSON in `.json`.
        sample_rate: The waveforms' rate in Hz; recordings at another rate are resampled.
        letters, lowercase, ignore: As in `Spelling`.
        root, split, shares, key, window: As in `ShardSamples`.

    Raises:
        DataError: As in `ShardSamples`; or a transcript has an unknown letter, or a recording is
            damaged.
        ConfigError: As in `ShardSamples` and `Spelling`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        audio: str = "audio",
        text: str = "text",
        sample_rate: int = 16000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        window: int = 16,
    ) -> None:
        self.sample_rate = sample_rate
        super().__init__(
            root,
            split,
            content=("audio", audio),
            endings=SOUNDS,
            label=text,
            shares=shares,
            key=key,
            window=window,
        )
        spelling = Spelling(letters=letters, lowercase=lowercase, ignore=ignore)
        self._transcripts = [spelling(x, root) for x in self.own_labels]

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw, shard, name = self.content(index)
        waveform = decode_audio(raw, f"{shard}, {name}", sample_rate=self.sample_rate)
        return sample(waveform, self._transcripts[self.label_number(index)], name)

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        raw, _, name = self.content(index)
        return name, {"audio": raw, "text": self._transcripts[self.label_number(index)]}

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for programs that prepare recordings elsewhere."""
        return audio_preparation(self.sample_rate)

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the shards' content, the transcripts and the split."""
        return self.hash_shards(self._transcripts)
