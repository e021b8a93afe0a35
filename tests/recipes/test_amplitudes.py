"""How the vocoder expresses the next amplitude: as a mu-law step, or as a mixture of logistics."""

import math

import pytest
import torch

from samewise.recipes.parts.amplitudes import LogisticMixture, MuLaw


def naive_logistic(outputs: list[float], level: int, levels: int) -> float:
    """The probability of a level, from the definition (arXiv 1701.05517, equation 2), in Python's floats."""
    count = len(outputs) // 3
    weights = [math.exp(w) for w in outputs[:count]]

    def below(edge: float, mean: float, log_scale: float) -> float:
        return 1 / (1 + math.exp(-(edge - mean) / math.exp(log_scale)))

    total = 0.0
    for weight, mean, log_scale in zip(weights, outputs[count : 2 * count], outputs[2 * count :], strict=True):
        value, half = 2 * level / (levels - 1) - 1, 1 / (levels - 1)
        upper = 1.0 if level == levels - 1 else below(value + half, mean, log_scale)
        lower = 0.0 if level == 0 else below(value - half, mean, log_scale)
        total += weight / sum(weights) * (upper - lower)
    return total


def test_a_mixture_of_logistics_equals_the_naive_formula():
    torch.manual_seed(0)
    mixture, levels = LogisticMixture(n_classes=9, levels=33), torch.arange(33)
    outputs = torch.randn(9) * torch.tensor([1.0] * 3 + [0.5] * 3 + [1.0] * 3)
    found = mixture.surprise(outputs.expand(33, 9), 2 * levels / 32 - 1)
    assert (-found).exp().tolist() == pytest.approx([naive_logistic(outputs.tolist(), level, 33) for level in range(33)], rel=1e-4)


def test_samples_are_drawn_from_the_probabilities_of_the_loss():
    draws = 4000
    uniform = torch.stack([(torch.arange(draws) + 0.5) / draws, torch.rand(draws, generator=torch.Generator().manual_seed(0))], 1)
    mu_law, logits = MuLaw(n_classes=4), torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = mu_law.drawn_by(logits.expand(draws, 4), uniform)
    shares = torch.stack([(drawn - level).abs() < 1e-6 for level in (-1, -1 / 3, 1 / 3, 1)]).sum(1) / draws
    assert torch.allclose(shares, logits.softmax(0), atol=1e-3)
    assert mu_law.drawn_by(logits[None], torch.tensor([[0.99999994, 0.0]])).item() == 1.0
    mixture, outputs = LogisticMixture(n_classes=6, levels=9), torch.tensor([0.5, -0.5, -0.4, 0.6, -1.5, -2.0])
    drawn = mixture.drawn_by(outputs.expand(draws, 6), uniform)
    expected = (-mixture.surprise(outputs.expand(9, 6), levels := torch.arange(9) / 4 - 1)).exp()
    shares = torch.stack([(drawn - level).abs() < 1e-6 for level in levels]).sum(1) / draws
    assert torch.allclose(shares, expected, atol=0.03)
