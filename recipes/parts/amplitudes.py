"""Representations of a vocoder's samples: mu-law steps, or a mixture of logistic distributions."""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torchaudio.functional import mu_law_decoding, mu_law_encoding

from samewise.runner.errors import ConfigError, require_at_least


def _choose_class(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return int64[B, 1]: the class of each row whose share of [0, 1) contains a random number.

    Args:
        logits: float32[B, C].
        uniform: float32[B, 1].
    """
    return (
        (logits.softmax(1).cumsum(1) <= uniform).sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)
    )


@final
class MuLaw:
    """A class for each step of ITU-T G.711's mu-law companding: 256 steps are 8 bits.

    Args:
        n_classes: Number of steps.
    """

    def __init__(self, *, n_classes: int = 256) -> None:
        require_at_least({"recipe.n_classes": n_classes}, least=2)
        self.n_classes = n_classes

    def labels(self, waveform: Tensor) -> Tensor:
        """Return int64[...] from 0 to n_classes - 1."""
        return mu_law_encoding(waveform.clamp(-1.0, 1.0), self.n_classes)

    def written(self, waveform: Tensor) -> Tensor:
        """Return samples float32[...] in [-1, 1] in the model's representation, in [-1, 1]."""
        return self._scaled(self.labels(waveform))

    def heard(self, written: Tensor) -> Tensor:
        """Return the samples float32[...] of a representation."""
        # WaveRNN (like torchaudio's `infer`) speaks in labels scaled to [-1, 1]: they are mu-law
        # steps, not amplitudes.
        labels = ((written + 1.0) / 2.0 * (self.n_classes - 1)).round()
        return mu_law_decoding(labels, self.n_classes)

    def surprise(self, outputs: Tensor, waveform: Tensor) -> Tensor:
        """Return the negative log-probability of each sample in nats, float32[M].

        Args:
            outputs: float32[M, n_classes].
            waveform: float32[M].
        """
        return F.cross_entropy(outputs, self.labels(waveform), reduction="none")

    def drawn_by(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        """Draw a sample from each row of outputs, float32[B] in the model's representation.

        Args:
            outputs: float32[B, n_classes].
            uniform: float32[B, 2], random numbers in [0, 1).
        """
        return self._scaled(_choose_class(outputs, uniform[:, :1])[:, 0])

    def _scaled(self, labels: Tensor) -> Tensor:
        return 2.0 * labels.to(torch.float32) / (self.n_classes - 1) - 1.0


@final
class LogisticMixture:
    """A mixture of logistic distributions, discretised to levels.

    Source: Salimans et al. 2017, PixelCNN++, arXiv 1701.05517, section 2.1. A level's probability
    is the mass between the midpoints to its neighbours; the outermost levels include the tails, so
    all add up to one.

    Args:
        n_classes: Three for each component, its weight (a logit), mean and log scale: 30 for ten
            components.
        levels: Number of levels, evenly spaced from -1 to 1.
        smallest_log_scale: Lower limit of log scales, about a third of a level.

    Raises:
        ConfigError: `n_classes` is not a multiple of three, or there are fewer than two levels.
    """

    def __init__(
        self, *, n_classes: int = 30, levels: int = 65536, smallest_log_scale: float = -12.0
    ) -> None:
        ConfigError.raise_if(
            n_classes < 3 or n_classes % 3,
            "recipe.n_classes",
            "does not fit a mixture of logistics",
            n_classes,
            "three for each component: 30 for ten",
        )
        require_at_least({"recipe.levels": levels}, least=2)
        self.n_classes = n_classes
        self.levels = levels
        self._smallest = smallest_log_scale

    def written(self, waveform: Tensor) -> Tensor:
        return 2.0 * self._level(waveform) / (self.levels - 1) - 1.0

    def heard(self, written: Tensor) -> Tensor:
        return written

    def surprise(self, outputs: Tensor, waveform: Tensor) -> Tensor:
        level = self._level(waveform)[:, None]
        weight, mean, log_scale = self._components(outputs)
        value = 2.0 * level / (self.levels - 1) - 1.0
        half = 1.0 / (self.levels - 1)
        sharpness = (-log_scale).exp()
        above, below = (value - mean + half) * sharpness, (value - mean - half) * sharpness
        width = 2.0 * half * sharpness
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) loses no digits where it
        # is small; the published code approximates it there
        inner = F.logsigmoid(above) + F.logsigmoid(-below) + _log_one_minus_exp(width)
        mass = torch.where(
            level == 0,
            F.logsigmoid(above),
            torch.where(level == self.levels - 1, F.logsigmoid(-below), inner),
        )
        return -torch.logsumexp(F.log_softmax(weight, 1) + mass, 1)

    def drawn_by(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        weight, mean, log_scale = self._components(outputs)
        chosen = _choose_class(weight, uniform[:, :1])
        mean, scale = mean.gather(1, chosen), log_scale.gather(1, chosen).exp()
        noise = uniform[:, 1:].clamp(1e-5, 1.0 - 1e-5)
        return self.written((mean + scale * (noise.log() - (-noise).log1p()))[:, 0])

    def _components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, log_scale = outputs.chunk(3, 1)
        return weight, mean, log_scale.clamp(min=self._smallest)

    def _level(self, waveform: Tensor) -> Tensor:
        """Return float32[...], whole numbers from 0 to levels - 1."""
        return ((waveform.clamp(-1.0, 1.0) + 1.0) / 2.0 * (self.levels - 1)).round()


Amplitudes = MuLaw | LogisticMixture
"""Probabilities of the next sample's values, for a model's `n_classes` outputs."""


def entropy(counts: Tensor) -> float:
    """Return the entropy in nats of the distribution with these counts, int64[K]."""
    shares = counts.double() / counts.sum().clamp(min=1)
    return float(-torch.special.xlogy(shares, shares).sum())


def _log_one_minus_exp(width: Tensor) -> Tensor:
    """Return log(1 - exp(-width)) of a positive width, without loss of precision."""
    # Maechler 2012, Accurately Computing log(1 - exp(-|a|))
    return torch.where(
        width < math.log(2.0), (-torch.expm1(-width)).log(), torch.log1p(-torch.exp(-width))
    )
