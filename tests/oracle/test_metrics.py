"""What the recipes report, compared with each field's evaluators and with float64 computed another way, including edge cases."""

import csv
import itertools
import math
import random

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import scipy.stats
import torch
from torch import Tensor, nn

from samewise.datasets.transforms.vocoder_mel import VocoderMel
from samewise.recipes.adversarial import energy_distance
from samewise.recipes.classification import Classification
from samewise.recipes.parts.pictures import save_class_accuracy
from samewise.recipes.separation import Separation
from samewise.recipes.speech_recognition import SpeechRecognition
from samewise.recipes.vocoder import Vocoder


class Says(nn.Module):
    """Returns the outputs that it was given, batch after batch."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = iter(outputs)

    def forward(self, *_: object) -> Tensor:
        return next(self._outputs)


def test_accuracies_confusion_and_loss_equal_scikit_learns(tmp_path):
    from sklearn import metrics

    drawn = torch.Generator().manual_seed(0)
    label = torch.randint(0, 7, (200,), generator=drawn)
    label[label == 3] = 4  # no image of class 3, though it is predicted
    logits = torch.randn(200, 7, generator=drawn) + 1.5 * nn.functional.one_hot(label, 7)
    recipe = Classification(top_k=(1, 3, 5))
    scores = recipe.scores(None)
    for first in range(0, 200, 64):
        part = slice(first, first + 64)
        scores.add(recipe.measure(Says([logits[part]]), {"image": torch.zeros(len(label[part]), 1, 2, 2), "label": label[part]}))
    probabilities, predicted, found = scipy.special.softmax(logits.double().numpy(), 1), logits.argmax(1), scores.compute()
    assert found["accuracy"] == metrics.accuracy_score(label, predicted)
    assert found["accuracy_top3"] == metrics.top_k_accuracy_score(label, logits, k=3, labels=range(7))
    assert found["accuracy_top5"] == metrics.top_k_accuracy_score(label, logits, k=5, labels=range(7))
    assert found["loss"] == pytest.approx(metrics.log_loss(label, probabilities, labels=range(7)), rel=1e-6)
    assert scores.confusion.tolist() == metrics.confusion_matrix(label, predicted, labels=range(7)).tolist()
    recall = metrics.recall_score(label, predicted, labels=range(7), average=None, zero_division=0)
    save_class_accuracy(tmp_path / "class_accuracy.csv", scores.confusion, scores.names())
    rows = list(csv.DictReader((tmp_path / "class_accuracy.csv").read_text().splitlines()))
    assert [row["accuracy"] for row in rows] == ["" if number == 3 else f"{recall[number]:.4f}" for number in range(7)]


def test_error_rates_equal_torchmetrics():
    from torchmetrics.text import CharErrorRate, WordErrorRate

    letters, chance = " abc", random.Random(2)
    said = ["", "a", "a b c", "abc cba", *("".join(chance.choices(letters, k=chance.randint(1, 12))).strip() for _ in range(40))]
    paths, frames = [], 60
    for text in said:  # labels as a network gives them, with some letters missed, doubled or wrong
        path: list[int] = [0] * chance.randint(0, 3)
        for letter in text:
            label = letters.index(letter) + 1
            path += chance.choice([[label], [label, 0], [label, label, 0], [0, label, 0], [], [chance.randint(1, 4), 0], [label, 0, label, 0]])
        paths.append((path + [0] * frames)[:frames])
    paths[1], paths[2] = [0] * frames, [1, 0] * 4 + [0] * (frames - 8)  # nothing, and nothing but spaces
    logits = 9.0 * nn.functional.one_hot(torch.tensor(paths), 5).float().transpose(1, 2)
    read = []
    for path in paths:
        kept = [label for place, label in enumerate(path) if label and (place == 0 or path[place - 1] != label)]
        read.append("".join(letters[label - 1] for label in kept))
    recipe = SpeechRecognition(letters=letters, impossible="skip")
    scores = recipe.scores(None)
    for first in range(0, len(said), 16):
        texts = said[first : first + 16]
        batch = recipe.collate([{"waveform": torch.zeros(8), "transcript": text} for text in texts])
        batch |= {"features": torch.zeros(len(texts), 1, frames), "feature_length": torch.full((len(texts),), frames)}
        scores.add(recipe.measure(Says([logits[first : first + 16]]), batch))
    found = scores.compute()
    assert found["cer"] == pytest.approx(CharErrorRate()(read, said).item(), abs=1e-6)
    assert found["wer"] == pytest.approx(WordErrorRate()(read, said).item(), abs=1e-6)
    assert 0.2 < found["cer"] < found["wer"]


def separate(estimates: list[Tensor], sources: list[Tensor], *, sdr: bool = False) -> dict[str, float]:
    """The recipe's figures if the model gives these estimates."""
    recipe = Separation(sdr=sdr)
    batch = recipe.collate([{"mixture": one.sum(0), "sources": one, "name": str(place)} for place, one in enumerate(sources)])
    scores = recipe.scores(None)
    scores.add(recipe.measure(Says([one[None] for one in estimates]), batch))
    return scores.compute()


def mix(speakers: int, lengths: list[int], noise: float) -> tuple[list[Tensor], list[Tensor]]:
    """Estimates of sources in another order, at another loudness and with an offset, and the sources, which differ in length."""
    drawn = torch.Generator().manual_seed(speakers)
    sources = [0.1 * torch.randn(speakers, length, generator=drawn) for length in lengths]
    estimates = [(one + noise * torch.randn(one.shape, generator=drawn)).roll(place, 0) * 3 + 0.05 for place, one in enumerate(sources)]
    return estimates, sources


@pytest.mark.parametrize("speakers", [2, 3])
def test_si_sdr_of_the_best_permutation_equals_torchmetrics(speakers):
    from torchmetrics.functional.audio import permutation_invariant_training, scale_invariant_signal_distortion_ratio

    estimates, sources = mix(speakers, [800, 1200, 950], 0.05)
    estimates[1][0] = 0.0  # a silent estimate
    found, reached, before = separate(estimates, sources), [], []
    for estimate, source in zip(estimates, sources, strict=True):
        true, mixture = source.double()[None], source.double().sum(0).expand(1, speakers, -1)
        options = {"mode": "speaker-wise", "eval_func": "max", "zero_mean": True}
        best, _ = permutation_invariant_training(estimate.double()[None], true, scale_invariant_signal_distortion_ratio, **options)
        reached.append(best.item())
        before.append(scale_invariant_signal_distortion_ratio(mixture, true, zero_mean=True).mean().item())
    assert found["si_sdr"] == -found["loss"] == pytest.approx(np.mean(reached), abs=1e-4)
    assert found["si_sdri"] == pytest.approx(np.mean(reached) - np.mean(before), abs=1e-4)


def distortion_ratio(estimate: Tensor, source: Tensor, taps: int = 512) -> float:
    """BSS eval's SDR in dB (Vincent et al. 2006): what a filter of the source explains of the estimate over what it does not, by its normal equations."""
    x, y = (np.pad(one.double().numpy(), (0, taps - 1)) for one in (estimate, source))
    correlated = [np.correlate(one, y, "full")[len(y) - 1 : len(y) - 1 + taps] for one in (y, x)]
    explained = np.convolve(source.double().numpy(), scipy.linalg.solve_toeplitz(correlated[0], correlated[1]))
    return 10 * math.log10((explained**2).sum() / ((x - explained) ** 2).sum())


@pytest.mark.parametrize("speakers", [2, 3])
def test_sdr_equals_that_of_bss_eval(speakers):
    estimates, sources = mix(speakers, [900, 1300], 0.2)
    found, reached, before = separate(estimates, sources, sdr=True), [], []
    for estimate, source in zip(estimates, sources, strict=True):
        pairs = [[distortion_ratio(one, true) for true in source] for one in estimate]
        orders = itertools.permutations(range(speakers))
        reached.append(max(np.mean([pairs[one][place] for place, one in enumerate(order)]) for order in orders))
        before.append(np.mean([distortion_ratio(source.sum(0), one) for one in source]))
    assert found["sdr"] == pytest.approx(np.mean(reached), abs=1e-3)
    assert found["sdri"] == pytest.approx(np.mean(reached) - np.mean(before), abs=1e-3)


def test_bits_per_sample_and_the_entropy_of_labels_equal_float64():
    drawn = torch.Generator().manual_seed(3)
    end = VocoderMel(sample_rate=8000, n_fft=64, win_length=40, hop_length=10, n_mels=6, context=52)
    recipe, clips = Vocoder(front_end=end), 0.4 * torch.randn(5, 60 + 104, generator=drawn).clamp(-2.4, 2.4)
    outputs = 2 * torch.randn(5, 1, 60, 256, generator=drawn)
    batch = end(recipe.collate([{"waveform": clip, "name": "", "index": place} for place, clip in enumerate(clips)]))
    scores = recipe.scores(None)
    for part in (slice(0, 3), slice(3, 5)):
        scores.add(recipe.measure(Says([outputs[part]]), {"waveform": batch["waveform"][part], "mel": batch["mel"][part], "index": batch["index"][part]}))
    wave = clips[:, 53 : 53 + 60].double().numpy()
    steps = np.floor((np.sign(wave) * np.log1p(255 * np.abs(wave)) / np.log(256) + 1) / 2 * 255 + 0.5).astype(int)
    nats = -np.take_along_axis(scipy.special.log_softmax(outputs[:, 0].double().numpy(), -1), steps[..., None], -1).mean()
    expected = {"loss": nats, "bits_per_sample": nats / math.log(2), "label_entropy": scipy.stats.entropy(np.bincount(steps.ravel()))}
    assert scores.compute() == pytest.approx({**expected, "below_entropy": expected["label_entropy"] - nats}, rel=1e-6)


def spectrogram(waveform: np.ndarray, *, rate: int, size: int, window: int, hop: int, bands: int, low: float) -> np.ndarray:
    """float64[bands, N] in dB, from -100 to 0: magnitudes in triangles of unit area on Slaney's mel scale, written down from its definition."""

    def mel(hertz: float) -> float:
        return hertz * 3 / 200 if hertz < 1000 else 15 + math.log(hertz / 1000) / math.log(6.4) * 27

    def hertz(value: float) -> float:
        return value * 200 / 3 if value < 15 else 1000 * 6.4 ** ((value - 15) / 27)

    corners = [hertz(value) for value in np.linspace(mel(low), mel(rate / 2), bands + 2)]
    places, banks = np.arange(size // 2 + 1) * rate / size, []
    for left, middle, right in zip(corners, corners[1:], corners[2:], strict=False):
        banks.append(np.clip(np.minimum((places - left) / (middle - left), (right - places) / (right - middle)), 0, None) * 2 / (right - left))
    hann = np.zeros(size)
    hann[(size - window) // 2 : (size - window) // 2 + window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    frames = [np.abs(np.fft.rfft(waveform[start : start + size] * hann)) for start in range(0, len(waveform) - size + 1, hop)]
    return np.clip(20 * np.log10(np.maximum(np.array(banks) @ np.array(frames).T, 1e-5)), -100, 0)


def test_the_log_mel_distance_equals_that_in_float64():
    recipe = Vocoder(front_end=VocoderMel(sample_rate=8000, n_fft=256, win_length=160, hop_length=20, n_mels=16, context=200))
    drawn = torch.Generator().manual_seed(4)
    time = torch.arange(700) / 8000
    one = torch.stack([0.3 * torch.sin(2 * math.pi * 440 * time), 0.2 * torch.randn(700, generator=drawn), torch.zeros(700)])
    other = one.roll(1, 0) * 0.5 + 0.01 * torch.randn(3, 700, generator=drawn)
    found = recipe.log_mel_distance(one, other)
    for place in range(3):
        made = [spectrogram(np.pad(some[place].double().numpy(), 128), rate=8000, size=256, window=160, hop=20, bands=16, low=40.0) for some in (one, other)]
        assert found[place].item() == pytest.approx(np.sqrt(((made[0] - made[1]) ** 2).mean(0)).mean(), rel=1e-4)


@pytest.mark.parametrize("count", [2, 57])
def test_the_energy_distance_of_numbers_equals_scipys_without_its_bias(count):
    drawn = np.random.default_rng(count)
    x, y = drawn.normal(size=count), drawn.normal(loc=0.7, scale=1.5, size=count + 20)
    biased = scipy.stats.energy_distance(x, y) ** 2  # the distance of a number to itself counts here
    bias = sum(np.abs(some[:, None] - some).mean() / (len(some) - 1) for some in (x, y))
    assert energy_distance(torch.tensor(x)[:, None], torch.tensor(y)[:, None]) == pytest.approx(biased - bias, rel=1e-9)
