"""Decodes a section of a video file to a tensor, by torchcodec, which needs FFmpeg's libraries from
the system.
"""

from __future__ import annotations

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
"""What an MP4 or MOV begins with, after a length."""

_IN_ORDER = {
    *("mjpeg", "rawvideo", "png", "ffv1", "huffyuv", "ffvhuff", "utvideo", "cinepak"),
    *("h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"),
}
"""Codecs without B-frames, by FFmpeg's names."""

_LAYER, _B_FRAME = (
    re.compile(rb"\0\0\x01[\x20-\x2f](.{8})", re.DOTALL),
    re.compile(rb"\0\0\x01\xb6[\x80-\xbf]"),
)
"""Of MPEG-4 (XviD, DivX): the header of a layer, and the beginning of a B-frame."""

_SIMPLE = (1, 17)
"""Its types that have no B-frames unless their header says so: Simple, Advanced Simple."""

_GLANCE = 4 << 20

_INSTALL = (
    "pip install 'samewise[video]', and FFmpeg's libraries from the system: apt-get install ffmpeg"
)


def read_frames(path: str | os.PathLike[str], choose: Callable[[int], Sequence[int]]) -> Tensor:
    """uint8[T, 3, H, W]: selected frames of a video, in the order of selection.

    Decoding takes one thread; the pixels do not depend on which frames were read before.

    Args:
        path: The file.
        choose: From the number of frames in the video to the numbers, from 0, of those wanted.

    Raises: DataError: the file does not exist, or it is empty, damaged or no video, or one for
        which `require_exact` raises; it names
            the file.
        ConfigError: torchcodec or FFmpeg is not there.
    """
    name = os.fspath(path)
    decoder = require_torchcodec()
    try:
        require_regular(path, whole=False)
        if not os.path.getsize(path):
            raise DataError(
                Problem(
                    name,
                    "is empty",
                    expected="a video file",
                    hint="remove the file, or download it again",
                )
            )
        if names_other_files(path):
            raise ValueError("it names other files")
        video = decoder(name, num_ffmpeg_threads=1, seek_mode="exact")
        _require_times(path, str(video.metadata.codec))
        PIXELS.check(name, (video.metadata.width or 0) * (video.metadata.height or 0))
        frames = torch.tensor(choose(len(video)))
        # Decoding is forward from the keyframe before: each frame once, then repeated where it was
        # asked for more than once.
        wanted, places = frames.unique(return_inverse=True)
        return video.get_frames_at(wanted.tolist()).data[places]
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    except (RuntimeError, ValueError, IndexError) as error:
        if other := another_kind(path, "video"):
            raise DataError(
                Problem(
                    name, f"is {other}, not a video", expected="a video file that FFmpeg decodes"
                )
            ) from None
        reason = f"is not a video, or is damaged: {first_line(error)}"
        raise DataError(
            Problem(
                name,
                reason,
                expected="a video file that FFmpeg decodes",
                hint="remove the file, or download it again",
            )
        ) from None


def require_exact(path: str | os.PathLike[str], *, most: int = _GLANCE) -> None:
    """Refuse a video in which torchcodec would find other frames than those asked for, as far as
    its first `most` bytes tell.

    A file that cannot be opened is no error here, but when it is read.

    Raises:
        DataError: it is such a video; it names the file.
    """
    try:
        require_regular(path, whole=False)
        if not _has_times(path) and not names_other_files(path):
            video = require_torchcodec()(
                os.fspath(path), num_ffmpeg_threads=1, seek_mode="approximate"
            )
            _require_times(path, str(video.metadata.codec), most)
    except (OSError, RuntimeError, ValueError):
        return


def _require_times(path: str | os.PathLike[str], codec: str, most: int | None = None) -> None:
    """Torchcodec finds frames by their times.

    AVI stores none: they are right only if frames are stored as they are shown, so without
    B-frames.
    """
    if _has_times(path):
        return
    with open(path, "rb") as file:
        is_avi = file.read(12)[8:] == b"AVI "
    if is_avi and (codec in _IN_ORDER or (codec == "mpeg4" and not _is_reordered(path, most))):
        return
    reason = (
        f"is {codec} video in {'AVI' if is_avi else 'another format'}, in which frames cannot "
        "be found exactly"
    )
    expected = (
        "MP4, MOV, Matroska or WebM; or AVI of MPEG-4 without B-frames, or of a codec that has none"
    )
    raise DataError(
        Problem(
            os.fspath(path),
            reason,
            expected=expected,
            hint="convert it: ffmpeg -i IN -crf 12 OUT.mp4",
        )
    )


def _has_times(path: str | os.PathLike[str]) -> bool:
    """Whether it is MP4, MOV, Matroska or WebM, which store the time of each frame."""
    with open(path, "rb") as file:
        first = file.read(8)
    return first.startswith(b"\x1aE\xdf\xa3") or first[4:] in _ATOMS


def _is_reordered(path: str | os.PathLike[str], most: int | None) -> bool:
    """Whether frames of MPEG-4 are, or may be, stored in another order than they are shown."""
    found = os.stat(path)
    return _scan(
        os.fspath(path),
        found.st_size if most is None else min(most, found.st_size),
        found.st_mtime_ns,
    )


@lru_cache(maxsize=1 << 16)
def _scan(path: str, size: int, changed: int) -> bool:
    """The same of a file's first bytes; one that changes is read again."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content,
    ):
        layer = _LAYER.search(content)
        return layer is None or _is_delayed(layer[1]) or _B_FRAME.search(content) is not None


def _is_delayed(header: bytes) -> bool:
    """Whether a decoder holds a frame back for B-frames, even if there are none."""
    bits = f"{int.from_bytes(header, 'big'):064b}"
    place = 17 if bits[9] == "1" else 10  # after the type, an identifier
    place += 20 if bits[place : place + 4] == "1111" else 4  # the shape of a pixel
    return bits[place + 3] == "0" if bits[place] == "1" else int(bits[1:9], 2) not in _SIMPLE


def clip_frames(
    available: int, *, frames: int, stride: int, start: Callable[[int], int]
) -> list[int]:
    """The numbers of a clip's frames in a video with so many.

    A video that is too short repeats its last frame.

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
        raise ConfigError(
            Problem(
                "dataset",
                "reading videos requires torchcodec, which is not installed",
                hint=_INSTALL,
            )
        ) from None
    except (OSError, RuntimeError):
        reason = (
            f"torchcodec cannot be loaded: it does not match torch {torch.__version__}, or "
            "cannot find FFmpeg"
        )
        raise ConfigError(Problem("dataset", reason, hint=_INSTALL)) from None
    if not getattr(
        torchcodec, "ffmpeg_major_version", True
    ):  # older ones could not be imported without it
        raise ConfigError(
            Problem(
                "dataset",
                "torchcodec cannot find FFmpeg, which it needs to read videos",
                hint=_INSTALL,
            )
        )
    return VideoDecoder


def versions() -> tuple[str, str]:
    """The versions of torchcodec and FFmpeg, which affect pixels."""
    import torchcodec

    return str(torchcodec.__version__), str(getattr(torchcodec, "ffmpeg_major_version", ""))
