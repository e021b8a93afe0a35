"""Clips of videos: the frames that were written, where clips begin, and invalid files."""

from pathlib import Path

import pytest
import torch

from samewise.datasets.parts.video_files import read_frames
from samewise.datasets.video_clips import VideoClips
from samewise.runner.errors import DataError

pytestmark = pytest.mark.usefixtures("ffmpeg")


def write_video(path: Path, frames: int = 20, *, height: int = 32, width: int = 48) -> Path:
    """Write a video whose frame k has the grey value 10 k everywhere, so that each frame can be identified."""
    from torchcodec.encoders import VideoEncoder

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (10 * torch.arange(frames))[:, None, None, None].expand(frames, 3, height, width).to(torch.uint8)
    VideoEncoder(pixels.contiguous(), frame_rate=10).to_file(str(path))
    return path


def numbers(clip: torch.Tensor) -> list[int]:
    """The numbers of the frames, as `write_video` wrote them."""
    return [round(float(frame.float().mean()) / 10) for frame in clip]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train and valid with the classes jump and run; an AVI, and a video of five frames."""
    base = tmp_path_factory.mktemp("videos")
    for split in ("train", "valid"):
        for name in ("run", "jump"):
            for number in range(2):
                write_video(base / split / name / f"{number}.mp4")
    write_video(base / "train" / "run" / "deeper" / "old.AVI", 12)
    write_video(base / "train" / "run" / "short.mp4", 5)
    (base / "train" / "run" / "notes.txt").write_text("no video")
    return base


def clips(root: Path, **settings) -> VideoClips:
    return VideoClips(**{"root": str(root), "folder": "train", "frames": 4, "stride": 2, "clip": "centre", **settings})


def test_files_are_found_by_class_and_labelled_in_sorted_order(root):
    made = clips(root, num_classes=2)
    assert made.classes == ["jump", "run"]
    names = [str(made.path(index).relative_to(root / "train")) for index in range(len(made))]
    assert names == ["jump/0.mp4", "jump/1.mp4", "run/0.mp4", "run/1.mp4", "run/short.mp4", "run/deeper/old.AVI"]
    assert [made[index]["label"] for index in range(len(made))] == [0, 0, 1, 1, 1, 1]
    given = clips(root, folder="valid", classes=["run", "walk", "jump"], num_classes=3)
    assert (given.classes, [given[index]["label"] for index in range(len(given))]) == (["run", "walk", "jump"], [0, 0, 2, 2])


def test_a_centred_clip_has_the_middle_frames_with_their_stride(root):
    sample = clips(root)[0]["image"]
    assert (sample.dtype, tuple(sample.shape)) == (torch.uint8, (4, 3, 32, 48))
    assert numbers(sample) == [6, 8, 10, 12]
    assert numbers(clips(root, frames=20, stride=1)[0]["image"]) == list(range(20))


def write_coded(path: Path, codec: str, *, written: str = "", **options: str) -> Path:
    """The same video of 50 frames in a codec of FFmpeg's; `written`: the extension of the format, if `path` has another."""
    from torchcodec.encoders import VideoEncoder

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (5 * torch.arange(50))[:, None, None, None].expand(50, 3, 32, 48).to(torch.uint8)
    made = path.with_suffix(written or path.suffix)
    try:
        VideoEncoder(pixels.contiguous(), frame_rate=25).to_file(
            str(made), codec=codec, pixel_format=options.pop("pixel_format", "yuv420p"), extra_options=options
        )
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"FFmpeg lacks what the test needs: {error}")
    return made.rename(path)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [("a.avi", "mpeg4", {"bf": "0", "q": "2"}), ("a.avi", "mjpeg", {"pixel_format": "yuvj420p"}), ("a.mkv", "mpeg4", {"bf": "2", "q": "2"})],
)
def test_frames_are_found_wherever_a_clip_begins(tmp_path, name, codec, options):
    path = write_coded(tmp_path / "run" / name, codec, g="12", **options)
    for first in range(0, 47, 5):
        found = read_frames(path, lambda _, first=first: range(first, first + 4))
        assert [round(float(frame.float().mean()) / 5) for frame in found] == list(range(first, first + 4))
    assert len(VideoClips(root=str(tmp_path), folder="")) == 1


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"not a video, but some words" * 9, "is a text file, not a video"), (None, "cannot be read")]
)
def test_a_file_that_is_not_a_video_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "thing.mp4").write_bytes(content)
    with pytest.raises(DataError, match=f"thing.mp4: {message}"):
        read_frames(tmp_path / "thing.mp4", range)
