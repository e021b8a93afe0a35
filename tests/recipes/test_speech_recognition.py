"""Speech recognition: the published network, the loss against torch's own, decoding, error rates, and what is refused."""

import math

import pytest
import torch
import torchaudio
from torch import nn

from samewise.recipes.models.wav2letter import Wav2Letter
from samewise.recipes.parts import ctc
from samewise.recipes.speech_recognition import SpeechRecognition
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase

WORDS = ["three", "see all", "a", "it's eleven"]


def make_batch(frames: list[int], texts: list[str] = WORDS) -> dict:
    """A batch as it is after the transforms, with the given number of frames for each utterance."""
    batch = SpeechRecognition(letters=LETTERS).collate([utterance(text, 160 * count) for text, count in zip(texts, frames, strict=True)])
    return {**batch, "features": torch.zeros(len(texts), 13, max(frames)), "feature_length": torch.tensor(frames)}


def utterance(text: str, frames: int = 1600) -> dict:
    return {"waveform": torch.randn(frames), "length": frames, "transcript": text, "name": f"{text}.wav"}


def test_wav2letter_has_the_published_number_of_weights():
    published = torchaudio.models.Wav2Letter(num_classes=29, input_type="mfcc", num_features=13)
    assert sum(weight.numel() for weight in published.parameters()) == 23_282_529
    ours = Wav2Letter(num_classes=29, num_features=13)
    assert [weight.shape for weight in ours.parameters()] == [weight.shape for weight in published.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), published.parameters(), strict=True):
            mine.copy_(theirs)
        features = torch.randn(2, 13, 60)
        scores = published.acoustic_model[:-1](features)  # without the ReLU that torchaudio has after the last layer
        torch.testing.assert_close(ours(features, torch.tensor([60, 60])), scores.log_softmax(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_the_small_network_gives_the_same_output_alone_and_in_a_batch(norm):
    torch.manual_seed(0)
    model = Wav2Letter(num_classes=5, num_features=4, width=8, top_width=16, norm=norm).eval()
    lengths = torch.tensor([40, 7, 23])
    features = torch.where(torch.arange(40) < lengths[:, None, None], torch.randn(3, 4, 40), 0.0)
    together, frames = model(features, lengths), model.output_lengths(lengths)
    for row, length in enumerate(lengths.tolist()):
        single = model(features[row : row + 1, :, :length], lengths[row : row + 1])
        torch.testing.assert_close(together[row, :, : int(frames[row])], single[0])


@pytest.mark.gpu
def test_on_the_gpu_the_loss_equals_the_cpus_and_its_gradient_repeats():
    torch.manual_seed(0)
    frames, scores, recipe = [40, 33, 12, 30], torch.randn(4, 29, 40), SpeechRecognition(letters=LETTERS)
    model = Told(scores)
    expected = recipe.loss(model, make_batch(frames), Phase()).total
    expected.backward()
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            other = Told(scores).cuda()
            batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in make_batch(frames).items()}
            total = recipe.loss(other, batch, Phase()).total
            total.backward()
            torch.testing.assert_close(total.cpu(), expected)
            gradients.append(other.scores.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0].cpu(), model.scores.grad)


def test_rates_and_losses_of_a_model_without_lengths_do_not_depend_on_the_batch_size():
    """In a padded batch, the biases of torchaudio's network spread from the padding into the last frames."""
    torch.manual_seed(0)
    recipe, model, frames, reported = SpeechRecognition(letters=LETTERS), torchaudio.models.Wav2Letter(29, "mfcc", 13).eval(), [23, 60, 4, 41], []
    features = [5 * torch.randn(13, count) for count in frames]
    for cuts in ([(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        counted = recipe.scores(None)
        for start, stop in cuts:
            batch = make_batch(frames[start:stop], WORDS[start:stop])
            for row, one in enumerate(features[start:stop]):
                batch["features"][row, :, : one.shape[1]] = one
            with torch.no_grad():
                measured = recipe.measure(model, batch)
                assert [one.values()["text"] for one in recipe.predict(model, batch)] == [line.hypothesis for line in measured.lines]
            counted.add(measured)
        reported.append(counted.compute())
    assert reported[0] == reported[1] == reported[2]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (utterance("naïve"), "naïve.wav: the transcript has an unknown letter"),
        ({"waveform": torch.zeros(10), "transcript": 7}, "not a string"),
        ({"image": torch.zeros(3, 4, 4), "label": 1}, "not an utterance"),
        ((torch.zeros(10), "a"), "not an utterance"),
        ({"waveform": torch.zeros(2, 10), "transcript": "a"}, "not an utterance"),
    ],
)
def test_a_sample_that_is_not_an_utterance_is_refused(sample, message):
    with pytest.raises(DataError, match=message):
        SpeechRecognition(letters=LETTERS).collate([sample])


def test_a_transcript_that_does_not_fit_into_its_frames_is_named():
    recipe, scores = SpeechRecognition(letters=LETTERS), torch.randn(1, 29, 5)
    with pytest.raises(DataError, match=r"three.wav: its transcript needs 6 frames, but the model gives only 5"):
        recipe.loss(Told(scores), make_batch([5], ["three"]), Phase())
    with pytest.raises(DataError, match=r"three\.wav"):
        recipe.measure(Told(scores), make_batch([5], ["three"]))


def test_an_evaluation_leaves_skipped_transcripts_out_of_its_loss(tmp_path):
    """As if they were not there, but for their share and their error rate."""
    torch.manual_seed(0)
    recipe, logits = SpeechRecognition(letters=LETTERS, impossible="skip"), torch.randn(3, 29, 5)
    scores = recipe.scores(None)
    for place, text in enumerate(["three", "a", "bc"]):
        scores.add(recipe.measure(Told(logits[place : place + 1]), make_batch([5], [text])))
    batch = make_batch([5, 5], ["a", "bc"])
    by_torch = nn.CTCLoss()(logits[1:].log_softmax(1).permute(2, 0, 1), batch["target"], batch["feature_length"], batch["target_length"])
    assert scores.compute()["loss"] == pytest.approx(by_torch.item())
    assert scores.compute()["skipped"] == pytest.approx(1 / 3)
    scores.save_pictures(tmp_path)
    assert [line.rpartition(",")[2] == "" for line in (tmp_path / "transcripts.csv").read_text().splitlines()] == [False, True, False, False]
    nothing = recipe.scores(None)
    nothing.add(recipe.measure(Told(logits[:1]), make_batch([5], ["three"])))
    assert nothing.compute()["loss"] == math.inf


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wav2Letter(num_classes=28, num_features=13, width=8, top_width=8), "model.num_classes"),
        (nn.Sequential(nn.Conv1d(13, 29, 1), nn.AvgPool1d(2)), "output_lengths"),
        (nn.Flatten(), "does not return a score for every letter"),
    ],
)
def test_an_unsuitable_model_is_reported(model, message):
    with pytest.raises(ConfigError, match=message):
        SpeechRecognition(letters=LETTERS).loss(model, make_batch([20], ["a"]), Phase())


def test_beam_search_finds_a_likelier_text_than_the_best_path():
    pytest.importorskip("flashlight.lib.text")
    recipe = SpeechRecognition(letters="ab", decoder="beam", beam={"size": 20})
    # Blank is each frame's best, yet "a" gathers three paths: a*, *a, aa (the example of Hannun 2017, distill.pub/2017/ctc).
    scores = torch.tensor([[[0.6, 0.6], [0.4, 0.4], [1e-6, 1e-6]]]).log()
    assert understood(recipe, Told(scores), [2]) == ["a"]
    assert understood(SpeechRecognition(letters="ab"), Told(scores), [2]) == [""]


def test_beam_search_with_a_lexicon_gives_words_from_it(tmp_path):
    pytest.importorskip("flashlight.lib.text")
    (tmp_path / "words.txt").write_text("sea s e a |\nsee s e e |\nball b a l l |\n")
    recipe = SpeechRecognition(letters=LETTERS, decoder="beam", beam={"lexicon": str(tmp_path / "words.txt")})
    assert understood(recipe, Told(saying(["se*o  bal*l"], 20)), [20])[0] in ("sea ball", "see ball")


def test_a_missing_lexicon_or_decoder_for_beam_search_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"recipe.decoder|recipe.beam.lexicon"):
        SpeechRecognition(letters=LETTERS, decoder="beam", beam={"lexicon": str(tmp_path / "nowhere.txt")})
    ctc.beam_decoder.cache_clear()
    find = ctc.importlib.util.find_spec
    monkeypatch.setattr(ctc.importlib.util, "find_spec", lambda name: None if name == "flashlight" else find(name))
    with pytest.raises(ConfigError, match=r"pip install '\.\[beam\]'"):
        SpeechRecognition(letters=LETTERS, decoder="beam")


LETTERS = " 'abcdefghijklmnopqrstuvwxyz"


class Told(nn.Module):
    """Returns prescribed scores float32[B, K, N], one frame for each frame of features, whatever its input is."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, features: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.scores

    def output_lengths(self, length: torch.Tensor) -> torch.Tensor:
        return length


def saying(paths: list[str], frames: int) -> torch.Tensor:
    """Scores float32[B, 29, frames] whose best path is as written, with `*` for the blank, and blanks after that."""
    scores = torch.zeros(len(paths), 29, frames)
    for row, path in enumerate(paths):
        for place in range(frames):
            label = 0 if place >= len(path) or path[place] == "*" else 1 + LETTERS.index(path[place])
            scores[row, label, place] = 8.0
    return scores


def understood(recipe: SpeechRecognition, model: nn.Module, frames: list[int]) -> list[str]:
    """What the recipe predicts for utterances without a transcript."""
    batch = {**recipe.collate([{"waveform": torch.randn(160 * count), "transcript": ""} for count in frames])}
    batch |= {"features": torch.zeros(len(frames), 13, max(frames)), "feature_length": torch.tensor(frames)}
    return [prediction.values()["text"] for prediction in recipe.predict(model, batch)]
