"""Any folder of recordings, whose names say which belong to a split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import final

from samewise.datasets.parts.audio_files import list_audio
from samewise.datasets.parts.clips import Clips
from samewise.datasets.parts.recordings import Cache, Recordings
from samewise.runner.errors import ConfigError, DataError, Problem


@final
class WavFolder(Clips):
    """Samples as `Clips`; files are all audio below ROOT whose names match.

    Args:
        root: The folder.
        pattern: A regular expression that a file's name, relative to the folder, must match in full: `[0-9]_jackson_[0-9]+[.]wav` is one of the
            spoken digits' speakers.
        samples, context: As in `Clips`.
        sample_rate: In Hz; files at another rate are resampled.
        cache: "memory" keeps all recordings decoded.

    Raises:
        DataError: the folder does not exist, or no file matches.
        ConfigError: the pattern is not a valid regular expression.
    """

    def __init__(self, *, root: str, samples: int, context: int, sample_rate: int, pattern: str = ".+", cache: Cache = "none") -> None:
        folder = Path(root).expanduser()
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError(Problem("dataset.pattern", f"is not a valid regular expression: {error}", pattern)) from None
        names = [name for name in list_audio(folder) if compiled.fullmatch(name)]
        if not names:
            raise DataError(Problem(str(folder), "the pattern matches no recording there", pattern, hint="set dataset.root=FOLDER"))
        super().__init__(Recordings(folder, names, sample_rate=sample_rate, cache=cache), samples=samples, context=context)
