"""Reading audio and video files: formats, excerpts, rates, channels, frames, and invalid files."""

import math
from pathlib import Path

import pytest
import soundfile
import torch
import torchaudio

from samewise.datasets.parts.audio_files import audio_info, read_audio
from samewise.datasets.parts.video_files import read_frames
from samewise.datasets.video_clips import VideoClips
from samewise.runner.errors import DataError

RATE = 8000


def tone(frames: int = 2000, *, frequency: float = 440.0, rate: int = RATE) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * frequency * torch.arange(frames) / rate)


def write(path, samples, rate=RATE, **options):
    soundfile.write(path, samples.t().numpy() if samples.dim() == 2 else samples.numpy(), rate, **options)
    return path


ENCODINGS = {
    "WAV": ["PCM_U8", "PCM_16", "PCM_24", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32", "NMS_ADPCM_32"],
    "AIFF": ["PCM_16", "ULAW", "IMA_ADPCM", "GSM610", "DWVW_16"],
    "AU": ["PCM_16", "FLOAT", "ULAW", "ALAW", "G721_32", "G723_24", "G723_40"],
    "W64": ["PCM_16", "MS_ADPCM", "GSM610"],
    "CAF": ["PCM_16", "ALAC_20"],
    "RF64": ["PCM_16"],
    "FLAC": ["PCM_16", "PCM_24"],
    "MP3": ["MPEG_LAYER_III"],
    "OGG": ["VORBIS", "OPUS"],
}
MONO = ("GSM610", "G721_32", "G723_24", "G723_40", "NMS_ADPCM_32", "DWVW_16")


@pytest.mark.parametrize(
    ("form", "encoding", "channels"),
    [(form, encoding, channels) for form, several in ENCODINGS.items() for encoding in several for channels in (1, 2) if channels == 1 or encoding not in MONO],
)
def test_an_excerpt_equals_the_same_part_of_the_whole(tmp_path, form, encoding, channels):
    """In Ogg Vorbis, libsndfile finds other samples if it seeks into the last page; Opus at a low rate depends on what it has decoded."""
    noise = 0.1 * torch.randn(channels, 24_017, generator=torch.Generator().manual_seed(0))
    noise[:, :18_000] = 0
    options = {"compression_level": 0.99} if encoding == "OPUS" else {}
    path = write(tmp_path / "sound", tone(24_017, frequency=200) + noise, format=form, subtype=encoding, **options)
    whole, _ = read_audio(path, mono=False)
    end = whole.shape[1]
    for start, frames in [(1, 1), (700, 300), (5_000, None), *((end - left, count) for left in (14_000, 9_999, 5_000, 1_500, 400, 1) for count in (1, None))]:
        section, _ = read_audio(path, mono=False, start=start, frames=frames)
        expected = whole[:, start : end if frames is None else start + frames]
        torch.testing.assert_close(section, expected, rtol=0, atol=1e-6 if form == "MP3" else 0)  # an MP3's sums may be rounded otherwise


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 16000), (22050, 8000)])
def test_another_rate_is_resampled_to_the_requested_one(tmp_path, rate, wanted):
    path = write(tmp_path / "a.wav", tone(rate // 2 + 3, rate=rate), rate, subtype="FLOAT")
    waveform, given = read_audio(path, sample_rate=wanted)
    assert given == wanted
    assert len(waveform) == audio_info(path).frames_at(wanted) == math.ceil((rate // 2 + 3) * wanted / rate)
    expected = tone(len(waveform), rate=wanted)
    assert (waveform - expected)[100:-100].abs().max() < 0.01
    assert torch.equal(waveform, torchaudio.transforms.Resample(rate, wanted)(read_audio(path)[0]))


def without_xing(path):
    """Write an MP3 again without its first frame, which says how long it is."""
    raw = path.read_bytes()
    begin = raw.index(b"\xff\xfb")
    assert b"Xing" in raw[begin : begin + 60] or b"Info" in raw[begin : begin + 60]
    path.with_name("plain.mp3").write_bytes(raw[raw.index(b"\xff\xfb", begin + 4) :])
    return path.with_name("plain.mp3")


@pytest.mark.parametrize(("mode", "level"), [("VARIABLE", 0.9), ("VARIABLE", 0.3), ("CONSTANT", 0.9)])
@pytest.mark.parametrize("quiet", ["first", "last"])
def test_an_mp3_without_a_xing_header_is_read_to_its_end(tmp_path, mode, level, quiet):
    """libsndfile estimates the length from the first frame's bit rate: far too many samples, or too few."""
    samples = torch.rand(150_000, generator=torch.Generator().manual_seed(0)) - 0.5
    samples[slice(50_000) if quiet == "first" else slice(100_000, None)] *= 1e-4
    path = write(tmp_path / "a.mp3", samples, 44100, bitrate_mode=mode, compression_level=level)
    plain = without_xing(path)
    (whole, _), (expected, _) = read_audio(plain), read_audio(path)
    assert len(expected) == len(samples)
    assert len(whole) % 1152 == 0
    assert 1105 + len(samples) <= len(whole) <= 1105 + len(samples) + 2 * 1152  # the header also says how much silence the encoder has put before and after
    assert (whole[1105 : 1105 + len(samples)] - expected)[2000:].abs().max() < 1e-4
    assert audio_info(plain).frames == len(whole)
    for file, all_of_it in ((plain, whole), (path, expected)):
        for start in (1, 40_001, 100_001, 149_000):
            section, _ = read_audio(file, start=start, frames=900)
            assert (section - all_of_it[start : start + 900]).abs().max() < 1e-5
    with pytest.raises(DataError, match=rf"plain.mp3: is too short: it has {len(whole)} frames"):
        read_audio(plain, start=len(whole) - 10, frames=11)


@pytest.mark.parametrize(("name", "channels"), [("a.m4a", 1), ("a.m4a", 2), ("a.aac", 1)])
def test_formats_unknown_to_soundfile_are_read_by_torchcodec(tmp_path, ffmpeg, name, channels):
    from torchcodec.encoders import AudioEncoder

    path, rate = tmp_path / name, 16000
    AudioEncoder(tone(rate, rate=rate).expand(channels, -1), sample_rate=rate).to_file(str(path))
    with pytest.raises(soundfile.LibsndfileError):
        soundfile.SoundFile(path)
    waveform, given = read_audio(path, mono=False)
    assert (waveform.dtype, waveform.shape[0], given) == (torch.float32, channels, rate)
    assert 0 <= waveform.shape[1] - rate <= 3 * 1024  # AAC comes in frames of 1024; outside a container nothing says where the sound begins
    begin = 0 if name.endswith("m4a") else 1024
    assert (waveform[:, begin : begin + rate] - tone(rate, rate=rate))[:, 1500:-1500].abs().max() < 0.05
    info = audio_info(path)
    assert (info.frames, info.sample_rate, info.channels) == (waveform.shape[1], rate, channels)
    assert torch.equal(read_audio(path, start=700, frames=300)[0], waveform.mean(0)[700:1000])
    assert len(read_audio(path, sample_rate=8000)[0]) == -(-waveform.shape[1] // 2)


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
