"""Clips of recordings for vocoders: where they begin, what lies around them, and the layouts they come from."""

from pathlib import Path

import pytest
import soundfile
import torch

from samewise.datasets.libritts import LibriTTS
from samewise.datasets.wav_folder import WavFolder
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, DataError

SIZE = {"samples": 100, "context": 30}


def record(path: Path, frames: int = 1000, rate: int = 8000) -> None:
    """Write a ramp, whose values show where a clip lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, (torch.arange(1, frames + 1) / 2000).numpy(), rate, subtype="FLOAT")


def draw_sample(data, index: int, *numbers: int) -> dict:
    with streams.scope(0, "sample", *numbers):
        return data[index]


def place(sample: dict) -> int:
    """The position in the ramp of the clip's first sample."""
    return round(float(sample["waveform"][30]) * 2000) - 1


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_clip_lies_anywhere_in_its_recording_with_its_context(tmp_path, cache):
    record(tmp_path / "a.wav")
    data = WavFolder(root=str(tmp_path), sample_rate=8000, cache=cache, **SIZE)
    places = set()
    for number in range(200):
        sample = draw_sample(data, 0, number)
        assert (sample["waveform"].shape, sample["name"], sample["index"]) == ((160,), "a.wav", 0)
        around = torch.arange(place(sample) - 30, place(sample) + 130)
        inside = (around >= 0) & (around < 1000)
        assert torch.allclose(sample["waveform"], torch.where(inside, (around + 1) / 2000, 0.0), atol=1e-6)
        places.add(place(sample))
    assert min(places) < 40
    assert 860 < max(places) <= 1000 - 100 - 1
    assert torch.equal(draw_sample(data, 0, 7)["waveform"], draw_sample(data, 0, 7)["waveform"])


def test_libritts_has_the_requested_subsets(tmp_path):
    for subset in ("dev-clean", "test-clean"):
        for chapter in ("7", "12"):
            record(tmp_path / "LibriTTS" / subset / "84" / chapter / f"84_{chapter}_000001_000000.wav", 400, rate=24000)
    data = LibriTTS(root=str(tmp_path), subsets=["dev-clean", "test-clean"], **SIZE)
    assert len(data) == 4
    assert data[0]["name"] == "dev-clean/84/12/84_12_000001_000000.wav"
    with pytest.raises(DataError, match=r"this part of LibriTTS was not found"):
        LibriTTS(root=str(tmp_path), subsets=["train-clean-100"], **SIZE)
    with pytest.raises(ConfigError, match="did you mean 'dev-clean'"):
        LibriTTS(root=str(tmp_path), subsets=["devclean"], **SIZE)
