"""Decodes a section of a video file to a tensor, by torchcodec, which needs FFmpeg's libraries from the system."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind, names_other_files
from samewise.datasets.parts.limits import PIXELS, require_regular
from samewise.runner.errors import ConfigError, DataError, Problem, first_line

EXTENSIONS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg")
"""The file names that are videos."""

_INSTALL = "pip install 'samewise[video]', and FFmpeg's libraries from the system: apt-get install ffmpeg"


def read_frames(path: str | os.PathLike[str], choose: Callable[[int], Sequence[int]]) -> Tensor:
    """uint8[T, 3, H, W]: selected frames of a video, in the order of selection.

    Decoding takes one thread; the pixels do not depend on which frames were read before.

    Args:
        path: The file.
        choose: From the number of frames in the video to the numbers, from 0, of those wanted.

    Raises:
        DataError: the file does not exist, or it is empty, damaged or no video; it names the file.
        ConfigError: torchcodec or FFmpeg is not there.
    """
    name = os.fspath(path)
    decoder = require_torchcodec()
    try:
        require_regular(path, whole=False)
        if not os.path.getsize(path):
            raise DataError(Problem(name, "is empty", expected="a video file", hint="remove the file, or download it again"))
        if names_other_files(path):
            raise ValueError("it names other files")
        video = decoder(name, num_ffmpeg_threads=1, seek_mode="exact")
        PIXELS.check(name, (video.metadata.width or 0) * (video.metadata.height or 0))
        frames = torch.tensor(choose(len(video)))
        # Decoding is forward from the keyframe before: each frame once, then repeated where it was asked for more than once.
        wanted, places = frames.unique(return_inverse=True)
        return video.get_frames_at(wanted.tolist()).data[places]
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    except (RuntimeError, ValueError, IndexError) as error:
        if other := another_kind(path, "video"):
            raise DataError(Problem(name, f"is {other}, not a video", expected="a video file that FFmpeg decodes")) from None
        reason = f"is not a video, or is damaged: {first_line(error)}"
        raise DataError(Problem(name, reason, expected="a video file that FFmpeg decodes", hint="remove the file, or download it again")) from None


def clip_frames(available: int, *, frames: int, stride: int, start: Callable[[int], int]) -> list[int]:
    """The numbers of a clip's frames in a video with so many. A video that is too short repeats its last frame.

    Args:
        available: Frames of the video.
        frames: Of the clip.
        stride: From one to the next.
        start: From the number of frames to spare to how many of them lie before the clip.
    """
    if available < 1:
        raise ValueError("it has no frames")
    first = start(max(available - (frames - 1) * stride - 1, 0))
    return [min(first + place * stride, available - 1) for place in range(frames)]


def centre(spare: int) -> int:
    """The `start` of a clip in the middle of the video."""
    return spare // 2


def require_torchcodec() -> Any:
    """Return the VideoDecoder of torchcodec, or raise an error.

    Raises:
        ConfigError: it is not installed, does not fit this torch, or finds no FFmpeg.
    """
    try:
        import torchcodec
        from torchcodec.decoders import VideoDecoder
    except ImportError:
        raise ConfigError(Problem("dataset", "reading videos requires torchcodec, which is not installed", hint=_INSTALL)) from None
    except (OSError, RuntimeError):
        reason = f"torchcodec cannot be loaded: it does not match torch {torch.__version__}, or cannot find FFmpeg"
        raise ConfigError(Problem("dataset", reason, hint=_INSTALL)) from None
    if not getattr(torchcodec, "ffmpeg_major_version", True):  # older ones could not be imported without it
        raise ConfigError(Problem("dataset", "torchcodec cannot find FFmpeg, which it needs to read videos", hint=_INSTALL))
    return VideoDecoder


def versions() -> tuple[str, str]:
    """The versions of torchcodec and FFmpeg, which affect pixels."""
    import torchcodec

    return str(torchcodec.__version__), str(getattr(torchcodec, "ffmpeg_major_version", ""))
