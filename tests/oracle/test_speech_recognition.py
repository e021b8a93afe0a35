"""Speech recognition against a plain script: torchaudio's features, one utterance at a time without padding, torch's CTC, torchmetrics' error rates."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import soundfile
import torch
import torch.nn.functional as F
import torchaudio
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor, nn

from samewise.datasets.generated_speech import GeneratedSpeech
from samewise.recipes.speech_recognition import SpeechRecognition

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
SAMPLES, BATCH, WIDTH, TOP = 40, 8, 24, 48
OVERRIDES = [
    *("recipe=speech_recognition", "model=wav2letter_small", f"model.width={WIDTH}", f"model.top_width={TOP}"),
    *("model.depth=2", "dataset=generated_speech_recognition", f"dataset.samples={SAMPLES}"),
    *("dataset.characters=[1,4]", "transforms=mfcc", "optimizer=adamw", "optimizer.lr=0.002"),
    *("optimizer.weight_decay=5.0", "param_groups=no_decay_on_norms_and_biases", "scheduler=one_cycle"),
    *("clip_norm=1.0", f"batch_size={BATCH}", "evaluate.every_epochs=null", "evaluate.batch_size=16"),
]


class Letters(nn.Module):
    """Wav2Letter with layer norm, for one utterance float[1, 13, N] without padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        sizes = [(13, WIDTH, 16, 2, 7), (WIDTH, WIDTH, 7, 1, 3), (WIDTH, WIDTH, 7, 1, 3), (WIDTH, TOP, 16, 1, 8), (TOP, TOP, 1, 1, 0)]
        self.layers = nn.ModuleList(nn.Conv1d(*one) for one in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(one[1]) for one in sizes)
        self.last = nn.Conv1d(TOP, 1 + len(LETTERS), 1)

    def forward(self, features: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            top = layer in self.layers[-2:]
            features = norm(layer(self.dropout(features) if top else features).mT).mT.relu()
        return self.last(features)


def generated(split: str) -> Iterator[tuple[Tensor, str]]:
    for place in range(SAMPLES):
        one = GeneratedSpeech(length=SAMPLES, split=split, characters=(1, 4))[place]
        yield one["waveform"], one["transcript"]


def plain(model: Letters, steps: int, shuffle: bool, *, data: Callable[[str], Iterator[tuple[Tensor, str]]] = generated, rate: int = 16000) -> Trained:
    spoken, decayed = utterances(data("train"), rate), [one.weight for one in (*model.layers, model.last)]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in decayed)]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.002, weight_decay=5.0, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=steps)
    losses = []
    for batch in batches(len(spoken), BATCH, steps, shuffle=shuffle):
        loss = torch.stack([nats_a_letter(model(spoken[place][0]), spoken[place][1]) for place in batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return Trained(losses, held_out(model, utterances(data("valid"), rate)), model.state_dict())


def nats_a_letter(scores: Tensor, text: str) -> Tensor:
    target = torch.tensor([[LETTERS.index(letter) + 1 for letter in text]])
    frames_first = scores.log_softmax(1).permute(2, 0, 1)
    return F.ctc_loss(frames_first, target, torch.tensor([len(frames_first)]), torch.tensor([len(text)]), reduction="sum") / len(text)


@torch.no_grad()
def held_out(model: Letters, spoken: list[tuple[Tensor, str]]) -> dict[str, float]:
    from torchmetrics.text import CharErrorRate, WordErrorRate

    read, said, total = [], [], 0.0
    for features, text in spoken:
        scores = model.eval()(features)
        path = [label for label, _ in itertools.groupby(scores[0].argmax(0).tolist())]
        read.append("".join(LETTERS[label - 1] for label in path if label))
        said.append(text)
        total += nats_a_letter(scores, text).item()
    return {"loss": total / len(said), "cer": CharErrorRate()(read, said).item(), "wer": WordErrorRate()(read, said).item()}


def utterances(spoken: Iterator[tuple[Tensor, str]], rate: int) -> list[tuple[Tensor, str]]:
    """Normalised MFCC float32[1, 13, N], of windows of 25 ms, and what was said."""
    mfcc = torchaudio.transforms.MFCC(rate, n_mfcc=13, melkwargs={"n_fft": rate // 40, "hop_length": rate // 100, "n_mels": 13})
    made = []
    for waveform, text in spoken:
        features = mfcc(waveform)
        made.append((((features - features.mean(1, keepdim=True)) / features.std(1, keepdim=True))[None], text))
    return made


ROUNDING = {"single": {"losses": 1e-4, "weights": 8e-3, "metrics": 1e-3}}
ALIKE = Task([*OVERRIDES, "model.dropout=0.0"], SpeechRecognition, partial(Letters, 0.0), plain, rounding=ROUNDING)


def test_it_trains_like_the_plain_script_step_by_step(oracle):
    oracle.require_alike(ALIKE, 10, "single")


@planted(
    *("loader.shuffle=true", "model.dropout=0.1", "scheduler.cycle_momentum=false", "transforms.n_fft=512", "the schedule is a step late"),
    quick="optimizer.weight_decay=0",
    elsewhere=("optimizer.lr=0.004", "param_groups=none", "clip_norm=null", "the loss is divided by the batch twice", "gradients are not cleared"),
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(ALIKE, 8, "single", fault)


@pytest.mark.slow
@pytest.mark.data
def test_it_trains_like_the_plain_script_on_real_recordings(oracle, data_root):
    folder, words = data_root / "free_spoken_digits" / "recordings", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

    def recordings(split: str) -> Iterator[tuple[Tensor, str]]:
        named = [(int(digit), speaker, int(take)) for digit, speaker, take in (path.stem.split("_") for path in folder.glob("*_jackson_*.wav"))]
        for digit, speaker, take in sorted(named):
            if (take < 5) == (split == "valid"):
                samples, _ = soundfile.read(folder / f"{digit}_{speaker}_{take}.wav", dtype="float32")
                yield torch.from_numpy(samples), words[digit]

    sizes = ["transforms.n_fft=200", "transforms.hop_length=80", "dataset=spoken_digits", f"dataset.root={folder}", "dataset.speakers=[jackson]"]
    kept = [one for one in ALIKE.overrides if not one.startswith("dataset")]
    oracle.require_alike(replace(ALIKE, overrides=[*kept, *sizes], plain=partial(plain, data=recordings, rate=8000)), 6, "single")
