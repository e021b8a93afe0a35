"""The vocoder: its inputs and targets, its two encodings of samples, sampling, and what it reports."""

import math

import pytest
import soundfile
import torch
import torch.nn.functional as F
from torch import nn
from torchaudio.models import WaveRNN

from samewise.datasets.transforms.vocoder_mel import VocoderMel
from samewise.recipes.models.wavernn import speak
from samewise.recipes.parts.amplitudes import LogisticMixture, MuLaw
from samewise.recipes.vocoder import Vocoder
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase

PUBLISHED = {"upsample_scales": [5, 5, 11], "n_classes": 256, "hop_length": 275, "n_freq": 80}
SIZES = {"sample_rate": 8000, "n_fft": 64, "win_length": 40, "hop_length": 10, "n_mels": 6, "context": 52}


def front_end() -> VocoderMel:
    return VocoderMel(**SIZES)


def network(n_classes: int = 256) -> WaveRNN:
    torch.manual_seed(1)
    sizes = {"n_res_block": 1, "n_rnn": 16, "n_fc": 12, "n_hidden": 8, "n_output": 8, "n_freq": 6}
    return WaveRNN(upsample_scales=[5, 2], hop_length=10, n_classes=n_classes, **sizes).eval()


def clip(samples: int = 60, index: int = 0) -> dict:
    waveform = 0.3 * torch.randn(samples + 104, generator=torch.Generator().manual_seed(index)).clamp(-3, 3)
    return {"waveform": waveform, "name": f"clip {index}", "index": index}


def batch_of(recipe: Vocoder, count: int = 3, samples: int = 60) -> dict:
    return recipe.front_end(recipe.collate([clip(samples, index) for index in range(count)]))


def test_the_published_network_has_the_published_parameters_and_output_length():
    model = WaveRNN(**PUBLISHED)
    assert sum(p.numel() for p in model.parameters()) == 4_349_613
    frames = 9
    waveform, mel = torch.zeros(1, 1, 1375), torch.zeros(1, 1, 80, frames)
    assert (frames - 5 + 1) * 275 == 1375
    assert model(waveform, mel).shape == (1, 1, 1375, 256)


@pytest.mark.parametrize("output", [MuLaw(), LogisticMixture()])
def test_speaking_step_by_step_equals_reading_the_spoken_samples_at_once(output):
    model, mel, seen = network(output.n_classes), torch.rand(2, 6, 9), []

    def drawn(outputs):
        seen.append(outputs)
        return output.drawn_by(outputs, torch.rand(len(outputs), 2))

    torch.manual_seed(3)
    spoken = speak(model, mel, drawn)
    assert spoken.shape == (2, 50)
    read = torch.cat([torch.zeros(2, 1), spoken[:, :-1]], 1)
    with torch.no_grad():
        at_once = model(read[:, None], mel[:, None]).squeeze(1)
    assert torch.allclose(torch.stack(seen, 1), at_once, atol=1e-5)
    torch.manual_seed(3)
    assert torch.equal(speak(model, mel, drawn), spoken)


def test_speaking_equals_torchaudios_infer():
    model, mel = network(), torch.rand(2, 6, 9)
    torch.manual_seed(4)
    with torch.no_grad():
        theirs, _ = model.infer(mel)
    torch.manual_seed(4)
    ours = speak(model, F.pad(mel, (2, 2)), lambda outputs: MuLaw()._scaled(torch.multinomial(outputs.softmax(1), 1)[:, 0]))
    assert torch.allclose(ours, theirs[:, 0])


@torch.no_grad()
def evaluate(recipe: Vocoder, model: nn.Module, batches: list[dict]):
    scores = recipe.scores(None)
    for batch in batches:
        scores.add(recipe.measure(model, batch))
    return scores


@pytest.mark.parametrize(("output", "n_classes"), [("mu_law", 256), ("logistics", 30)])
def test_resynthesised_clips_are_the_same_bits_in_any_batch(output, n_classes):
    recipe, model = Vocoder(front_end=front_end(), output=output, n_classes=n_classes, resynthesise=5), network(n_classes)
    whole = batch_of(recipe, 6, samples=500)
    (spoken, *others) = [
        [(one.name, one.spoken.tolist(), one.distance) for one in scores._spoken]
        for size in (6, 4, 3, 1)
        for scores in [evaluate(recipe, model, [{name: value[start : start + size] for name, value in whole.items()} for start in range(0, 6, size)])]
    ]
    assert len(spoken) == 5
    assert all(other == spoken for other in others)


@pytest.mark.parametrize(("output", "n_classes"), [("mu_law", 256), ("logistics", 30)])
def test_a_recording_is_resynthesised(tmp_path, output, n_classes):
    soundfile.write(tmp_path / "a.wav", (0.2 * torch.randn(2 * 777)).numpy(), 16000)
    recipe = Vocoder(front_end=front_end(), output=output, n_classes=n_classes)
    with torch.no_grad():
        (spoken,) = recipe.predict(network(n_classes), recipe.front_end(recipe.collate([recipe.read(tmp_path / "a.wav")])))
    assert spoken.values()["seconds"] == round(777 / 8000, 3)
    files = spoken.save(tmp_path, "a")
    assert [file.name for file in files] == ["a_resynthesised.wav", "a_spectrograms.png"]
    assert len(soundfile.read(files[0])[0]) == 777


def test_unsuitable_clips_models_and_settings_are_refused():
    recipe = Vocoder(front_end=front_end())
    with pytest.raises(DataError, match="not a clip"):
        recipe.collate([{"image": torch.zeros(3)}])
    with pytest.raises(DataError, match="differ in length"):
        recipe.collate([clip(60), clip(70)])
    with pytest.raises(ConfigError, match=r"set recipe\.n_classes"):
        recipe.loss(network(30), batch_of(recipe), Phase())
    with pytest.raises(ConfigError, match="cannot generate"):
        speak(nn.Identity(), torch.zeros(1, 6, 5), lambda outputs: outputs[:, 0])
    for settings, message in (({"n_classes": 1}, "n_classes"), ({"resynthesise": -1}, "resynthesise")):
        with pytest.raises(ConfigError, match=message):
            Vocoder(front_end=front_end(), **settings)
    with pytest.raises(ConfigError, match="three for each component"):
        Vocoder(front_end=front_end(), output="logistics", n_classes=256)


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
