"""Resampling, the cosine transform and mu-law: torchaudio's to the bit."""

import pytest
import torch
import torchaudio
import torchaudio.functional as AF

from samewise.datasets.parts.signals import resample, resampled_length
from samewise.recipes.parts.amplitudes import MuLaw


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
