"""The vocoder against a plain script: torchaudio's WaveRNN, spectra frame by frame, mu-law and logistics by their formulas."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchaudio
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor, nn
from torchaudio.models import WaveRNN

from samewise.datasets.generated_clips import GeneratedClips
from samewise.recipes.vocoder import Vocoder

CLIPS, HELD, BATCH, SAMPLES, CONTEXT, HOP, BANDS = 20, 6, 4, 60, 168, 20, 16
SIZES = {"n_res_block": 1, "n_rnn": 12, "n_fc": 12, "n_hidden": 8, "n_output": 8}
OVERRIDES = [
    *("recipe=vocoder", "model=wavernn_small", "model.upsample_scales=[5,2,2]"),
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    *("dataset=generated_vocoder", "dataset.sample_rate=8000", f"dataset.clips={CLIPS}", f"dataset.valid_clips={HELD}"),
    *(f"dataset.samples={SAMPLES}", f"dataset.valid_samples={SAMPLES}", "transforms=mel_vocoder"),
    *("transforms.front_end.n_fft=256", "transforms.front_end.win_length=160"),
    *(f"transforms.front_end.hop_length={HOP}", f"transforms.front_end.n_mels={BANDS}"),
    *(f"transforms.front_end.context={CONTEXT}", "optimizer=adam", "optimizer.lr=0.003", "optimizer.betas=[0.8,0.99]"),
    *("optimizer.weight_decay=0.1", "scheduler=one_cycle", "scheduler.cycle_momentum=false", "clip_norm=0.02"),
    *(f"batch_size={BATCH}", "evaluate.every_epochs=null", "evaluate.batch_size=4"),
]


def network(outputs: int) -> WaveRNN:
    return WaveRNN(upsample_scales=[5, 2, 2], n_classes=outputs, hop_length=HOP, n_freq=BANDS, **SIZES)


def generated(split: str, count: int) -> list[Tensor]:
    """float32[SAMPLES + 2 * CONTEXT] each."""
    return [GeneratedClips(length=count, samples=SAMPLES, context=CONTEXT, split=split)[place]["waveform"] for place in range(count)]


def plain(
    model: WaveRNN,
    steps: int,
    shuffle: bool,
    *,
    surprise: Callable[[Tensor, Tensor], Tensor],
    levels: Callable[[Tensor], Tensor],
    top: int,
    data: Callable[[str, int], list[Tensor]] = generated,
) -> Trained:
    def nats(chosen: list[Tensor]) -> Tensor:
        """The nats of each next sample, one after the other."""
        waveforms = torch.stack([one[CONTEXT : 1 - CONTEXT] for one in chosen])
        read = 2.0 * levels(waveforms).float() / top - 1.0
        mel = torch.stack([log_mel(one) for one in chosen])
        outputs = model(read[:, None, :-1], mel[:, None])[:, 0]
        return surprise(outputs.flatten(0, 1), levels(waveforms)[:, 1:].flatten())

    clips, held = data("train", CLIPS), data("valid", HELD)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, betas=(0.8, 0.99), weight_decay=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=steps, cycle_momentum=False)
    losses = []
    for batch in batches(CLIPS, BATCH, steps, shuffle=shuffle):
        loss = nats([clips[place] for place in batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = nats(held).double().mean().item()
    return Trained(losses, {"loss": found, "bits_per_sample": found / math.log(2)}, model.state_dict())


def log_mel(waveform: Tensor) -> Tensor:
    """float32[bands, frames]: from two frames before the clip on, each centred at a multiple of the hop; 100 dB to [0, 1]."""
    banks = torchaudio.functional.melscale_fbanks(129, 40.0, 4000.0, BANDS, 8000, norm="slaney", mel_scale="slaney").double()
    window, frames = F.pad(torch.hann_window(160, dtype=torch.float64), (48, 48)), []
    for frame in range(-2, (len(waveform) - 2 * CONTEXT) // HOP + 2):
        centre = CONTEXT + frame * HOP
        frames.append(torch.fft.rfft(waveform[centre - 128 : centre + 128].double() * window).abs() @ banks)
    decibels = 20 * torch.stack(frames, 1).clamp(min=1e-5).log10()
    return ((decibels + 100) / 100).clamp(0, 1).float()


def mu_law(waveform: Tensor) -> Tensor:
    """int64, steps from 0 to 255 of ITU-T G.711's curve."""
    curve = waveform.sign() * (1 + 255 * waveform.double().abs()).log() / math.log(256)
    return ((curve + 1) / 2 * 255 + 0.5).floor().long()


def logistics(outputs: Tensor, level: Tensor) -> Tensor:
    """Minus the log of the mass between a level's neighbours' middles, of three logistic distributions with their weights."""
    weight, mean, log_scale = outputs.double().chunk(3, 1)
    value = (2 * level.double() / 65535 - 1)[:, None]
    mass = ((value + 1 / 65535 - mean) / log_scale.exp()).sigmoid() - ((value - 1 / 65535 - mean) / log_scale.exp()).sigmoid()
    return -(weight.softmax(1) * mass).sum(1).log()


ROUNDING = {"single": {"losses": 1e-5, "weights": 2e-3, "metrics": 1e-5}}
TASKS = {
    "mu_law": Task(
        OVERRIDES, Vocoder, partial(network, 256), partial(plain, surprise=partial(F.cross_entropy, reduction="none"), levels=mu_law, top=255), ROUNDING
    ),
    "logistics": Task(
        [*OVERRIDES, "recipe.output=logistics", "recipe.n_classes=9"],
        Vocoder,
        partial(network, 9),
        partial(plain, surprise=logistics, levels=lambda waveform: ((waveform.double() + 1) / 2 * 65535).round().long(), top=65535),
        ROUNDING,
    ),
}


@pytest.mark.parametrize("output", TASKS)
def test_it_trains_like_the_plain_script_step_by_step(oracle, output):
    oracle.require_alike(TASKS[output], 7, "single")


@planted(
    *("optimizer.betas=[0.9,0.999]", "transforms.front_end.f_min=100", "gradients are not cleared", "evaluation is in training mode"),
    quick="optimizer.weight_decay=0",
    elsewhere=("optimizer.lr=0.006", "clip_norm=null", "loader.shuffle=true", "the loss is divided by the batch twice", "the schedule is a step late"),
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASKS["mu_law"], 5, "single", fault)
