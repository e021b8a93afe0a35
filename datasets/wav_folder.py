"""A folder of recordings whose names determine their split."""

from pathlib import Path
from typing import final

from samewise.datasets.parts.audio_files import match_audio
from samewise.datasets.parts.clips import Clips
from samewise.datasets.parts.recordings import Cache, Recordings


@final
class WavFolder(Clips):
    """Samples of `Clips` from all audio files below a folder whose names match.

    A sample is `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`.

    Args:
        root: The folder.
        pattern: A regular expression that a file's name, relative to the folder, must match
            completely: `[0-9]_jackson_[0-9]+[.]wav` selects one speaker of the spoken digits.
        samples, context: As in `Clips`.
        sample_rate: The waveforms' rate in Hz; files at another rate are resampled.
        cache: "memory" keeps all recordings, decoded.

    Raises:
        DataError: The folder does not exist, or no file matches.
        ConfigError: The pattern is not a valid regular expression.
    """

    def __init__(
        self,
        *,
        root: str,
        samples: int,
        context: int,
        sample_rate: int,
        pattern: str = ".+",
        cache: Cache = "none",
    ) -> None:
        folder = Path(root).expanduser()
        super().__init__(
            Recordings(
                folder, list(match_audio(folder, pattern)[0]), sample_rate=sample_rate, cache=cache
            ),
            samples=samples,
            context=context,
        )
