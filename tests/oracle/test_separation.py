"""Separation against a plain script: torchaudio's ConvTasNet, SI-SDR by its definition over all permutations, torch's plateau schedule."""

import itertools
from collections.abc import Callable

import pytest
import torch
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchaudio.models import ConvTasNet

from samewise.datasets.generated_mixtures import GeneratedMixtures
from samewise.recipes.separation import Separation

SAMPLES, HELD, BATCH = 20, 8, 4
SIZES = {"enc_kernel_size": 16, "enc_num_feats": 24, "msk_num_feats": 12, "msk_num_hidden_feats": 24, "msk_num_layers": 2, "msk_num_stacks": 1}
OVERRIDES = [
    *("recipe=separation", "recipe.sdr=false", "model=conv_tasnet_small"),
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    *("dataset=generated_separation", f"dataset.samples={SAMPLES}", f"dataset.valid_samples={HELD}"),
    *("dataset.seconds=0.2", "transforms=none", "optimizer=adam", "optimizer.lr=0.005", "optimizer.weight_decay=0.01"),
    *("scheduler=plateau", "scheduler.patience=0", "scheduler.factor=0.5", "scheduler.threshold=0.9", "clip_norm=5.0"),
    *(f"batch_size={BATCH}", "evaluate.every_epochs=null", "evaluate.every_steps=3", "evaluate.batch_size=3"),
    *("evaluate.monitor=valid/loss", "checkpoint.keep_best=0"),
]


def network() -> ConvTasNet:
    return ConvTasNet(num_sources=2, msk_activate="relu", **SIZES)


def generated(split: str, count: int) -> list[Tensor]:
    """The sources of each mixture, float32[2, T]."""
    return [GeneratedMixtures(length=count, seconds=0.2, split=split)[place]["sources"] for place in range(count)]


def plain(model: ConvTasNet, steps: int, shuffle: bool, *, data: Callable[[str, int], list[Tensor]] = generated) -> Trained:
    precision = next(model.parameters()).dtype
    spoken = [sources.to(precision) for sources in data("train", SAMPLES)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.01, foreach=False)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    losses, metrics = [], dict[str, float]()
    for step, batch in enumerate(batches(SAMPLES, BATCH, steps, shuffle=shuffle), start=1):
        chosen = [spoken[place] for place in batch]
        estimates = model(pad_sequence([sources.sum(0) for sources in chosen], batch_first=True)[:, None])
        loss = -torch.stack([best(one[:, : sources.shape[1]], sources) for one, sources in zip(estimates, chosen, strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 3 == 0 or step == steps:
            metrics = held_out(model, data("valid", HELD))
            schedule.step(metrics["loss"])
    return Trained(losses, metrics, model.state_dict())


def best(estimates: Tensor, sources: Tensor) -> Tensor:
    """The mean SI-SDR over the speakers, for the assignment with the largest one."""
    orders = itertools.permutations(range(len(sources)))
    return torch.stack([torch.stack([si_sdr(estimates[one], source) for one, source in zip(order, sources, strict=True)]).mean() for order in orders]).max()


def si_sdr(estimate: Tensor, source: Tensor) -> Tensor:
    """Le Roux et al. 2019, equation 5, of signals without their means, in dB; the usual 1e-8 keeps silence finite."""
    estimate, source = estimate - estimate.mean(), source - source.mean()
    target = (estimate @ source) / (source @ source + 1e-8) * source
    return 10 * torch.log10((target @ target + 1e-8) / ((estimate - target) @ (estimate - target) + 1e-8))


@torch.no_grad()
def held_out(model: ConvTasNet, spoken: list[Tensor]) -> dict[str, float]:
    model.eval()
    reached, before = 0.0, 0.0
    for sources in spoken:
        mixture, true = sources.sum(0), sources.double()
        estimates = model(mixture.to(next(model.parameters()).dtype)[None, None])[0].double()
        reached += best(estimates, true).item() / len(spoken)
        before += torch.stack([si_sdr(mixture.double(), source) for source in true]).mean().item() / len(spoken)
    model.train()
    return {"loss": -reached, "si_sdr": reached, "si_sdri": reached - before}


TASK = Task(OVERRIDES, Separation, network, plain)


@pytest.mark.parametrize(("steps", "precision"), [(4, "single"), (10, "double")])
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@planted(
    *("clip_norm=null", "the loss is divided by the batch twice", "sources are not assigned"),
    quick="scheduler.patience=1",
    elsewhere=("optimizer.lr=0.01", "optimizer.weight_decay=0", "loader.shuffle=true", "gradients are not cleared"),
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 7, "double", fault)


@pytest.mark.slow
def test_over_seeds_it_learns_like_the_plain_script(oracle):
    oracle.require_same_distribution(TASK, 40, "si_sdri")
