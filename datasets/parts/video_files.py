"""Decodes sections of video files by torchcodec, which needs FFmpeg's libraries from the system."""

import mmap
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind, names_other_files
from samewise.datasets.parts.limits import PIXELS, require_regular
from samewise.runner.errors import ConfigError, DataError, Problem, first_line

_ATOMS = (
    b"ftyp",
    b"moov",
    b"mdat",
    b"free",
    b"skip",
    b"wide",
    b"pnot",
    b"uuid",
    b"styp",
    b"sidx",
    b"moof",
)
"""Atoms that an MP4 or MOV may begin with, after a length."""

_IN_ORDER = {
    *("mjpeg", "rawvideo", "png", "ffv1", "huffyuv", "ffvhuff", "utvideo", "cinepak"),
    *("h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"),
}
"""Codecs without B-frames, by FFmpeg's names."""

_LAYER, _B_FRAME = (
    re.compile(rb"\0\0\x01[\x20-\x2f](.{8})", re.DOTALL),
    re.compile(rb"\0\0\x01\xb6[\x80-\xbf]"),
)
"""MPEG-4 (XviD, DivX): the header of a layer, and the beginning of a B-frame."""

_SIMPLE = (1, 17)
"""MPEG-4 types without B-frames unless their header says so: Simple, Advanced Simple."""

_GLANCE = 4 << 20

_INSTALL = (
    "pip install '.[video]' in samewise's folder, and FFmpeg's libraries from the system: "
    "apt-get install ffmpeg"
)


def read_frames(path: str | os.PathLike[str], choose: Callable[[int], Sequence[int]]) -> Tensor:
    """Return selected frames of a video, uint8[T, 3, H, W], in the order of selection.

    Decoding takes one thread; the pixels do not depend on which frames were read before.

    Args:
        path: The file.
        choose: Returns the numbers of the selected frames, from 0, for the number of frames in the
            video.

    Raises:
        DataError: The file does not exist, is empty, damaged or not a video, or `require_exact`
            refuses it.
        ConfigError: torchcodec or FFmpeg is missing.
    """
    name = os.fspath(path)
    decoder = require_torchcodec()
    try:
        require_regular(path, into_memory=False)
        DataError.raise_if(
            not os.path.getsize(path),
            name,
            "is empty",
            expected="a video file",
            hint="remove the file, or download it again",
        )
        if names_other_files(path):
            raise ValueError("it names other files")
        # Approximate seeking relies on the frame rate in the header
        video = decoder(name, num_ffmpeg_threads=1, seek_mode="exact")
        _require_times(path, str(video.metadata.codec))
        PIXELS.check(name, (video.metadata.width or 0) * (video.metadata.height or 0))
        frames = torch.tensor(choose(len(video)))
        # Decoding goes forward from the last keyframe: each distinct frame is decoded once.
        distinct, places = frames.unique(return_inverse=True)
        return video.get_frames_at(distinct.tolist()).data[places]
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    except (RuntimeError, ValueError, IndexError) as error:
        if description := another_kind(path, "video"):
            raise DataError(
                Problem(
                    name,
                    f"is {description}, not a video",
                    expected="a video file that FFmpeg decodes",
                )
            ) from None
        raise DataError(
            Problem(
                name,
                f"is not a video, or is damaged: {first_line(error)}",
                expected="a video file that FFmpeg decodes",
                hint="remove the file, or download it again",
            )
        ) from None


def require_exact(path: str | os.PathLike[str], *, most: int = _GLANCE) -> None:
    """Refuse a video in which torchcodec would return other frames than the requested ones.

    It judges by the first `most` bytes. A file that cannot be opened passes here, and fails when it
    is read.

    Raises:
        DataError: Frames of the video cannot be found exactly.
    """
    try:
        require_regular(path, into_memory=False)
        if not _has_times(path) and not names_other_files(path):
            video = require_torchcodec()(
                os.fspath(path), num_ffmpeg_threads=1, seek_mode="approximate"
            )
            _require_times(path, str(video.metadata.codec), most)
    except (OSError, RuntimeError, ValueError):
        return


def _require_times(path: str | os.PathLike[str], codec: str, most: int | None = None) -> None:
    """Raise a DataError unless frames can be found by their times."""
    if _has_times(path):
        return
    with open(path, "rb") as file:
        is_avi = file.read(12)[8:] == b"AVI "
    # AVI stores no times: they are right only if frames are stored as they are shown, so without
    # B-frames
    if is_avi and (codec in _IN_ORDER or (codec == "mpeg4" and not _is_reordered(path, most))):
        return
    raise DataError(
        Problem(
            os.fspath(path),
            f"is {codec} video in {'AVI' if is_avi else 'another format'}, in which frames cannot "
            "be found exactly",
            expected="MP4, MOV, Matroska or WebM; or AVI of MPEG-4 without B-frames, or of a codec "
            "that has none",
            hint="convert it: ffmpeg -i IN -crf 12 OUT.mp4",
        )
    )


def _has_times(path: str | os.PathLike[str]) -> bool:
    """Whether a file is MP4, MOV, Matroska or WebM, which store the time of each frame."""
    with open(path, "rb") as file:
        beginning = file.read(8)
    return beginning.startswith(b"\x1aE\xdf\xa3") or beginning[4:] in _ATOMS


def _is_reordered(path: str | os.PathLike[str], most: int | None) -> bool:
    """Whether MPEG-4 frames are, or may be, stored in another order than they are shown."""
    status = os.stat(path)
    return _scan(
        os.fspath(path),
        status.st_size if most is None else min(most, status.st_size),
        status.st_mtime_ns,
    )


@lru_cache(maxsize=1 << 16)
def _scan(path: str, size: int, changed: int) -> bool:
    """Do the same for the first bytes of a file; a changed file is read again."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content,
    ):
        layer = _LAYER.search(content)
        return layer is None or _is_delayed(layer[1]) or _B_FRAME.search(content) is not None


def _is_delayed(header: bytes) -> bool:
    """Whether a decoder holds a frame back for B-frames, even if there are none."""
    bits = f"{int.from_bytes(header, 'big'):064b}"
    # An identifier may follow the type, then the pixel's aspect ratio
    place = 17 if bits[9] == "1" else 10
    place += 20 if bits[place : place + 4] == "1111" else 4
    return bits[place + 3] == "0" if bits[place] == "1" else int(bits[1:9], 2) not in _SIMPLE


def clip_frames(
    available: int, *, frames: int, stride: int, start: Callable[[int], int]
) -> list[int]:
    """Return the numbers of a clip's frames; a video that is too short repeats its last frame.

    Args:
        available: Number of frames in the video.
        frames: Number of frames in the clip.
        stride: Distance between frames of the clip.
        start: Returns the frames before the clip, for the number of frames to spare.
    """
    if available < 1:
        raise ValueError("it has no frames")
    first_frame = start(max(available - (frames - 1) * stride - 1, 0))
    return [min(first_frame + place * stride, available - 1) for place in range(frames)]


def centre(spare: int) -> int:
    """Return the `start` of a clip in the middle of the video."""
    return spare // 2


def require_torchcodec() -> Any:
    """Return the VideoDecoder of torchcodec.

    Raises:
        ConfigError: torchcodec is not installed, does not match this torch, or finds no FFmpeg.
    """
    try:
        import torchcodec
        from torchcodec.decoders import VideoDecoder
    except ImportError:
        raise ConfigError(
            Problem(
                "dataset",
                "reading videos requires torchcodec, which is not installed",
                hint=_INSTALL,
            )
        ) from None
    except (OSError, RuntimeError):
        raise ConfigError(
            Problem(
                "dataset",
                f"torchcodec cannot be loaded: it does not match torch {torch.__version__}, or "
                "cannot find FFmpeg",
                hint=_INSTALL,
            )
        ) from None
    # Versions without this attribute cannot be imported without FFmpeg
    ConfigError.raise_if(
        not getattr(torchcodec, "ffmpeg_major_version", True),
        "dataset",
        "torchcodec cannot find FFmpeg, which it needs to read videos",
        hint=_INSTALL,
    )
    return VideoDecoder


def versions() -> tuple[str, str]:
    """Return the versions of torchcodec and FFmpeg, which affect pixels."""
    import torchcodec

    return str(torchcodec.__version__), str(getattr(torchcodec, "ffmpeg_major_version", ""))
