"""Speech Commands: one-second recordings of single words, loaded by torchaudio.

Source: Warden 2018, Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition, arXiv
1804.03209.
"""

import os
from functools import partial
from pathlib import Path
from typing import Literal, final

from torchaudio.datasets import SPEECHCOMMANDS

from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.torchvision_files import load
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances

_PARTS = {"train": "training", "valid": "validation", "test": "testing"}


@final
class SpeechCommands(Utterances):
    """Samples of `Utterances` from Speech Commands, with the word as transcript.

    A sample is `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`. The splits
    are the official ones, by speaker.

    Args:
        root: The folder that holds SpeechCommands/VERSION/WORD/*.wav.
        split: "train", "valid" or "test".
        version: "speech_commands_v0.02" (35 words) or "speech_commands_v0.01" (30).
        download: Download the data set if it is missing: 2.4 GB.
        sample_rate: The waveforms' rate in Hz; the files have 16,000.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`.

    Raises:
        DataError: The data set is missing.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        version: Literal[
            "speech_commands_v0.01", "speech_commands_v0.02"
        ] = "speech_commands_v0.02",
        download: bool = False,
        sample_rate: int = 16000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        cache: Cache = "none",
    ) -> None:
        make = partial(SPEECHCOMMANDS, url=version, subset=_PARTS[split])
        data = load(
            make,
            root=root,
            expected=f"the folder SpeechCommands/{version}, with its lists of files",
            download=download,
        )
        listed = [data.get_metadata(index) for index in range(len(data))]
        super().__init__(
            Path(root).expanduser() / "SpeechCommands",
            [name.replace(os.sep, "/") for name, *_ in listed],
            [word for _, _, word, *_ in listed],
            sample_rate=sample_rate,
            spelling=Spelling(letters=letters, lowercase=lowercase, ignore=ignore),
            cache=cache,
        )
