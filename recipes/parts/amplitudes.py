"""How a vocoder represents samples: as one of 256 mu-law steps, or by a mixture of logistic
distributions over 65,536 levels.
"""

from __future__ import annotations

import abc
import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from samewise.runner.errors import ConfigError, Problem, require_at_least


class Amplitudes(abc.ABC):
    """A probability for each value of the next sample, given a model's `n_classes` outputs."""

    n_classes: int

    @abc.abstractmethod
    def written(self, waveform: Tensor) -> Tensor:
        """float32[...] in [-1, 1]: samples in [-1, 1] in the model's representation."""

    @abc.abstractmethod
    def heard(self, written: Tensor) -> Tensor:
        """float32[...]: the samples that `written` represents."""

    @abc.abstractmethod
    def surprise(self, outputs: Tensor, waveform: Tensor) -> Tensor:
        """float32[M] in nats: minus the log-probability of each sample float32[M], given the
        outputs float32[M, n_classes].
        """

    @abc.abstractmethod
    def drawn_by(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        """float32[B] in the model's representation: a sample from each row of float32[B,
        n_classes], by random numbers float32[B, 2] in [0, 1).
        """


def _choose_class(logits: Tensor, uniform: Tensor) -> Tensor:
    """int64[B, 1]: for each row of float32[B, C], the class in whose share of [0, 1) a number
    float32[B, 1] falls.
    """
    return (
        (logits.softmax(1).cumsum(1) <= uniform).sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)
    )


@final
class MuLaw(Amplitudes):
    """A class for each step of ITU-T G.711's mu-law companding: 256 steps are 8 bits."""

    def __init__(self, *, n_classes: int = 256) -> None:
        require_at_least({"recipe.n_classes": n_classes}, least=2)
        self.n_classes = n_classes

    def labels(self, waveform: Tensor) -> Tensor:
        """int64[...] from 0 to n_classes - 1."""
        waveform, steps = (
            waveform.clamp(-1.0, 1.0),
            torch.tensor(self.n_classes - 1.0, dtype=waveform.dtype),
        )
        companded = waveform.sign() * (steps * waveform.abs()).log1p() / steps.log1p()
        return ((companded + 1.0) / 2.0 * steps + 0.5).long()

    def written(self, waveform: Tensor) -> Tensor:
        return self._scaled(self.labels(waveform))

    def heard(self, written: Tensor) -> Tensor:
        # WaveRNN (torchaudio's `infer`, too) speaks in labels scaled to [-1, 1]: they are mu-law
        # steps, not amplitudes.
        labels = ((written + 1.0) / 2.0 * (self.n_classes - 1)).round()
        steps = torch.tensor(self.n_classes - 1.0, dtype=written.dtype)
        companded = labels / steps * 2.0 - 1.0
        return companded.sign() * ((companded.abs() * steps.log1p()).exp() - 1.0) / steps

    def surprise(self, outputs: Tensor, waveform: Tensor) -> Tensor:
        return F.cross_entropy(outputs, self.labels(waveform), reduction="none")

    def drawn_by(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        return self._scaled(_choose_class(outputs, uniform[:, :1])[:, 0])

    def _scaled(self, labels: Tensor) -> Tensor:
        return 2.0 * labels.to(torch.float32) / (self.n_classes - 1) - 1.0


@final
class LogisticMixture(Amplitudes):
    """A mixture of logistic distributions, discretised to levels (Salimans et al., PixelCNN++,
    arXiv 1701.05517, section 2.1).

    A level's probability is the mass between the middles to its neighbours; the outermost levels
    have the tails too, so they all add up to one. The mass is computed from sigmoid(a) - sigmoid(b)
    = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which loses no digits where it is small; the
    published code approximates it there.

    Args:
        n_classes: Three for each component: its weight (a logit), mean and log scale; 30 for ten
            components.
        levels: Evenly spaced from -1 to 1.
        smallest_log_scale: Log scales below it count as it: some third of a level.
    """

    def __init__(
        self, *, n_classes: int = 30, levels: int = 65536, smallest_log_scale: float = -12.0
    ) -> None:
        if n_classes < 3 or n_classes % 3:
            raise ConfigError(
                Problem(
                    "recipe.n_classes",
                    "does not fit a mixture of logistics",
                    n_classes,
                    "three for each component: 30 for ten",
                )
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
        return self._value(mean.gather(1, chosen), log_scale.gather(1, chosen), uniform[:, 1:])

    def _value(self, mean: Tensor, log_scale: Tensor, noise: Tensor) -> Tensor:
        noise = noise.clamp(1e-5, 1.0 - 1e-5)
        return self.written((mean + log_scale.exp() * (noise.log() - (-noise).log1p()))[:, 0])

    def _components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, log_scale = outputs.chunk(3, 1)
        return weight, mean, log_scale.clamp(min=self._smallest)

    def _level(self, waveform: Tensor) -> Tensor:
        """float32[...], whole numbers from 0 to levels - 1."""
        return ((waveform.clamp(-1.0, 1.0) + 1.0) / 2.0 * (self.levels - 1)).round()


def entropy(counts: Tensor) -> float:
    """The entropy in nats of the distribution with these int64[K] counts."""
    shares = counts.double() / counts.sum().clamp(min=1)
    return float(-torch.special.xlogy(shares, shares).sum())


def _log_one_minus_exp(width: Tensor) -> Tensor:
    """log(1 - exp(-width)) of a positive width, without loss of precision (Maechler 2012)."""
    return torch.where(
        width < math.log(2.0), (-torch.expm1(-width)).log(), torch.log1p(-torch.exp(-width))
    )
