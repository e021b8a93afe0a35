"""Reading audio files: formats, excerpts, rates, channels, and invalid files."""

import math

import pytest
import soundfile
import torch
import torchaudio

from samewise.datasets.parts.audio_files import audio_info, read_audio
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
