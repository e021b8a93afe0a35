"""Speech separation: its loss against independent formulas, exact evaluation, the audio files that it saves, and refusals."""

import math

import pytest
import torch
from torch import nn
from torchaudio.models import ConvTasNet
from torchmetrics.functional.audio import permutation_invariant_training, signal_noise_ratio

from samewise.recipes.parts.losses import MeanAbsolute, MeanSquared, SignalToNoise
from samewise.recipes.separation import Separation
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase


class Given(nn.Module):
    """Returns the same estimates for any input, cut to the mixture's length."""

    def __init__(self, estimates: torch.Tensor) -> None:
        super().__init__()
        self.estimates = nn.Parameter(estimates)

    def forward(self, mixture):
        return self.estimates[: len(mixture), :, : mixture.shape[-1]]


def signals(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(lengths: list[int], speakers: int = 2) -> list[dict]:
    made = []
    for number, length in enumerate(lengths):
        sources = 0.1 * signals(speakers, length, seed=number) + 0.02
        made.append({"mixture": sources.sum(0), "sources": sources, "length": length, "name": f"mixture {number}"})
    return made


def naive_si_sdr(estimate: list[float], reference: list[float]) -> float:
    """Term by term, in Python's floats (arXiv 1811.02508, equation 3)."""
    estimate = [value - math.fsum(estimate) / len(estimate) for value in estimate]
    reference = [value - math.fsum(reference) / len(reference) for value in reference]
    scale = math.fsum(e * r for e, r in zip(estimate, reference, strict=True)) / math.fsum(r * r for r in reference)
    distortion = math.fsum((e - scale * r) ** 2 for e, r in zip(estimate, reference, strict=True))
    return 10 * math.log10(scale**2 * math.fsum(r * r for r in reference) / distortion)


def test_the_published_network_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in ConvTasNet().parameters()) == 4_984_881


@pytest.mark.parametrize("loss", [None, MeanAbsolute(), SignalToNoise()])
def test_padding_does_not_affect_the_loss(loss):
    recipe, rest = Separation(loss=loss), samples([300, 500])
    estimates = signals(2, 2, 500, seed=3)
    whole = recipe.loss(Given(estimates), recipe.collate(rest), Phase()).total
    alone = sum(recipe.loss(Given(estimates[place : place + 1]), recipe.collate([rest[place]]), Phase()).total for place in range(2))
    assert whole.item() == pytest.approx(alone.item(), rel=1e-5)
    model = Given(estimates)
    recipe.loss(model, recipe.collate(rest), Phase()).total.backward()
    assert not model.estimates.grad[0, :, 300:].any()
    assert model.estimates.grad[0, :, :300].any()


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (MeanAbsolute(), lambda estimate, source: (estimate - source).abs().mean(-1)),
        (MeanSquared(), lambda estimate, source: (estimate - source).square().mean(-1)),
        (SignalToNoise(), lambda estimate, source: -signal_noise_ratio(estimate, source)),
    ],
)
def test_a_chosen_loss_is_that_of_the_best_assignment_and_is_reported(loss, formula):
    recipe, rest = Separation(loss=loss, sdr=False), samples([300, 300], speakers=3)
    batch, estimates = recipe.collate(rest), 0.1 * signals(2, 3, 300, seed=3)
    expected, _ = permutation_invariant_training(estimates, batch["sources"], formula, eval_func="min")
    assert recipe.loss(Given(estimates), batch, Phase()).total.item() == pytest.approx(expected.sum().item(), rel=1e-4)
    scores = recipe.scores(None)
    with torch.no_grad():
        scores.add(recipe.measure(Given(batch["sources"].flip(1) + 0.01), batch))
    reported = formula(batch["sources"] + 0.01, batch["sources"]).mean().item()
    assert scores.compute()["loss"] == pytest.approx(reported, rel=1e-3)


def test_loss_and_gradient_are_finite_for_silence_and_perfect_estimates():
    batch = Separation().collate(samples([200]))
    for estimates in (torch.zeros(1, 2, 200), batch["sources"].clone()):
        model = Given(estimates)
        loss = Separation().loss(model, batch, Phase()).total
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(model.estimates.grad).all()


def small_network() -> ConvTasNet:
    torch.manual_seed(0)
    return ConvTasNet(enc_num_feats=16, msk_num_feats=8, msk_num_hidden_feats=16, msk_num_layers=2, msk_num_stacks=1).eval()


@torch.no_grad()
def evaluate(model: nn.Module, given: list[dict], batch_size: int, **settings):
    recipe = Separation(**settings)
    scores = recipe.scores(None)
    for start in range(0, len(given), batch_size):
        scores.add(recipe.measure(model, recipe.collate(given[start : start + batch_size])))
    return scores


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4, 1e-5])
def test_evaluated_si_sdr_is_the_same_at_any_loudness(scale):
    """Held against the formula without the constant that keeps silence finite."""
    (given,) = samples([1200])
    estimates = given["sources"] + 0.05 * signals(2, 1200, seed=9)
    quiet = {**given, "mixture": scale * given["mixture"], "sources": scale * given["sources"]}
    reported = evaluate(Given((scale * estimates)[None]), [quiet], 1, sdr=False).compute()
    reached, before = (
        sum(naive_si_sdr(one.tolist(), source.tolist()) for one, source in zip(found, given["sources"], strict=True)) / 2
        for found in (estimates, given["mixture"].expand(2, -1))
    )
    assert reported["si_sdr"] == pytest.approx(reached, abs=1e-4)
    assert reported["si_sdri"] == pytest.approx(reached - before, abs=1e-4)


@pytest.mark.parametrize("sdr", [True, False])
def test_a_mixture_with_a_silent_source_is_named_whichever_metrics_are_on(sdr):
    given = samples([400, 400, 400])
    given[1]["sources"][0] = 0.0
    scores = evaluate(small_network(), given, 2, sdr=sdr)
    (doubt,) = scores.doubts()
    assert (doubt.path, doubt.message) == ("si_sdr", f"counts the silent source of 1 mixture as badly separated: {given[1]['name']}")
    assert scores.compute()["si_sdr"] < evaluate(small_network(), given[::2], 2, sdr=sdr).compute()["si_sdr"]
    assert evaluate(small_network(), given[::2], 2, sdr=sdr).doubts() == []


def test_unsuitable_samples_models_and_settings_are_refused():
    recipe = Separation()
    with pytest.raises(DataError, match="not a mixture with its sources"):
        recipe.collate([{"waveform": torch.zeros(5)}])
    with pytest.raises(DataError, match="sources of mixture 0 do not fit"):
        recipe.collate([{**samples([50])[0], "mixture": torch.zeros(49)}])
    with pytest.raises(ConfigError, match="gives 3 signals, but the data set's mixtures have 2 speakers"):
        recipe.loss(Given(torch.zeros(1, 3, 50)), recipe.collate(samples([50])), Phase())
    with pytest.raises(ConfigError, match="does not return one signal per speaker"):
        recipe.loss(nn.Flatten(), recipe.collate(samples([50])), Phase())
    with pytest.raises(ConfigError, match=r"recipe.sample_rate"):
        Separation(sample_rate=0)
