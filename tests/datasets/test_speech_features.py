"""Front ends of speech models: published values, and the same for a batch as for its utterances one by one."""

import pytest
import torch
import torchaudio
import torchaudio.functional as AF

from samewise.datasets.parts.signals import resample, resampled_length
from samewise.datasets.transforms.speech_augment import Noise, SpeedPerturbation
from samewise.datasets.transforms.speech_features import MFCC, LogMel, Waveform
from samewise.recipes.parts.amplitudes import MuLaw

LENGTHS = [4000, 1, 150, 3999, 2400, 401]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def padded_batch(device="cpu") -> dict:
    """Utterances of very different lengths in one batch, padded with zeros."""
    torch.manual_seed(1)
    waveform = torch.randn(len(LENGTHS), max(LENGTHS))
    waveform[0, 1000:3000] *= 1e-4  # loud and silent parts, which the threshold of 80 dB tells apart
    length = torch.tensor(LENGTHS)
    waveform[torch.arange(max(LENGTHS)) >= length[:, None]] = 0.0
    return {"waveform": waveform.to(device), "length": length.to(device)}


def alone(batch: dict, row: int) -> dict:
    length = int(batch["length"][row])
    return {"waveform": batch["waveform"][row : row + 1, :length], "length": batch["length"][row : row + 1]}


FRONT_ENDS = [
    MFCC(),
    MFCC(normalise=False),
    LogMel(n_mels=40),
    LogMel(n_mels=40, normalise=False, above_silence=True),
    LogMel(sample_rate=8000, n_fft=256, n_mels=40, hop_length=80),
    Waveform(),
    Waveform(normalise=False),
]
AUGMENTATIONS = [SpeedPerturbation(), SpeedPerturbation(factors=[0.5, 1.3]), Noise(), Noise(snr=(0, 0), p=0.5)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("front", FRONT_ENDS, ids=lambda front: f"{type(front).__name__} {front.normalise}")
def test_a_batch_gives_the_features_of_its_utterances_one_by_one(front, device):
    batch = padded_batch(device)
    together = front(batch)
    for row in range(len(LENGTHS)):
        single = front(alone(batch, row))
        frames = int(single["feature_length"])
        assert frames == int(together["feature_length"][row]) == single["features"].shape[-1]
        torch.testing.assert_close(together["features"][row, :, :frames], single["features"][0], rtol=1e-4, atol=1e-4)
        assert not together["features"][row, :, frames:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", AUGMENTATIONS, ids=lambda change: type(change).__name__)
def test_a_batch_is_augmented_like_its_utterances_one_by_one(change, device):
    batch = padded_batch(device)
    torch.manual_seed(3)
    choices = change.draw(batch, len(LENGTHS))
    together = change.apply(batch, choices)
    for row in range(len(LENGTHS)):
        single = change.apply(alone(batch, row), {name: drawn[row : row + 1] for name, drawn in choices.items()})
        length = int(single["length"])
        assert length == int(together["length"][row])
        torch.testing.assert_close(together["waveform"][row, :length], single["waveform"][0, :length], rtol=1e-4, atol=1e-5)
        assert not together["waveform"][row, length:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("change", [*AUGMENTATIONS, *FRONT_ENDS], ids=lambda change: type(change).__name__)
def test_the_gpu_chooses_and_computes_like_the_cpu(change):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(5)
        results.append(change(padded_batch(device)))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name].cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frames", [16000, 401, 1234])
def test_mfcc_equals_torchaudios_for_one_utterance(frames):
    torch.manual_seed(2)
    waveform = torch.randn(1, frames)
    published = torchaudio.transforms.MFCC(16000, 13, melkwargs={"n_fft": 400, "hop_length": 160, "n_mels": 13})(waveform)
    batch = {"waveform": waveform, "length": torch.tensor([frames])}
    torch.testing.assert_close(MFCC(normalise=False)(batch)["features"], published, rtol=1e-4, atol=1e-4)
    normal = (published - published.mean(-1, keepdim=True)) / published.std(-1, keepdim=True)
    torch.testing.assert_close(MFCC()(batch)["features"], normal, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n_fft", [201, 200, 441])
def test_windows_of_any_length_give_torchaudios_frames_alone_and_in_a_batch(n_fft):
    """An odd window fits once less into a recording whose length is a multiple of the hop."""
    front = LogMel(sample_rate=8000, n_mels=20, n_fft=n_fft, hop_length=80, normalise=False)
    lengths = [800, 880, 881, 959, 960]
    batch = {"waveform": torch.randn(len(lengths), max(lengths)), "length": torch.tensor(lengths)}
    made = front(batch)
    for row, length in enumerate(lengths):
        mel = torchaudio.transforms.MelSpectrogram(8000, n_fft, hop_length=80, n_mels=20, f_min=20.0)(batch["waveform"][row, :length])
        assert made["feature_length"][row] == mel.shape[-1]
        torch.testing.assert_close(made["features"][row, :, : mel.shape[-1]], mel.clamp(min=1e-6).log(), rtol=1e-4, atol=1e-4)


def require_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


RATES = [(44100, 16000), (16000, 44100), (22050, 8000), (8000, 24000), (48000, 44100), (90, 100), (110, 100), (8000, 8000)]


@pytest.mark.parametrize(("old", "new"), RATES)
def test_resampling_gives_torchaudios_bits(old, new):
    torch.manual_seed(0)
    for length in (1, 777, 70_001):
        waveform = torch.randn(2, length)
        found = resample(waveform, old, new)
        require_same_bits(found, torchaudio.transforms.Resample(old, new)(waveform))
        assert found.shape[-1] == resampled_length(length, old, new)


@pytest.mark.parametrize("steps", [2, 256, 1024])
def test_mu_law_is_torchaudios_bits(steps):
    torch.manual_seed(0)
    waveform = torch.cat([0.5 * torch.randn(10_000), torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30])])
    law = MuLaw(n_classes=steps)
    labels = law.labels(waveform)
    assert torch.equal(labels, AF.mu_law_encoding(waveform.clamp(-1.0, 1.0), steps))
    require_same_bits(law.heard(law.written(waveform)), AF.mu_law_decoding(labels, steps))
