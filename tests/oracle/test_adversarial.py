"""The adversarial recipe against a plain script: two networks of torch's layers, two optimizers, the loss of Goodfellow et al."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from samewise_oracle_curves import Task, Trained
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from samewise.recipes.adversarial import GenerativeAdversarial

BATCH, NOISE = 32, 16
OVERRIDES = [
    *("experiment=gan_digits", "~callbacks.ema", "model.width=8", f"recipe.noise={NOISE}", "recipe.compared=400"),
    *("optimizer.generator.lr=0.002", "optimizer.discriminator.weight_decay=0.01", f"batch_size={BATCH}"),
    "evaluate.monitor=valid/energy_distance",
]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, 64, bias=False), nn.Unflatten(1, (16, 2, 2)), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
        )


def noises() -> Iterator[Tensor]:
    """Noise float32[BATCH, NOISE], the same each time, two for each step."""
    drawn = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(BATCH, NOISE, generator=drawn)


def plain(model: Pair, steps: int, shuffle: bool) -> Trained:
    precision, noise = next(model.parameters()).dtype, noises()
    learnt, held = (some.to(precision) for some in digits())
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=0.001, betas=(0.5, 0.999), weight_decay=0.01, foreach=False)
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=0.002, betas=(0.5, 0.999), foreach=False)
    losses = []
    for step in range(steps):
        first = step * BATCH % (len(learnt) // BATCH * BATCH)
        generated = model.generator(next(noise).to(precision)).detach()
        true, false = F.softplus(-model.discriminator(learnt[first : first + BATCH])).mean(), F.softplus(model.discriminator(generated)).mean()
        of_discriminator.zero_grad()
        (true + false).backward()
        of_discriminator.step()
        fooled = F.softplus(-model.discriminator(model.generator(next(noise).to(precision)))).mean()
        of_generator.zero_grad()
        fooled.backward()
        of_generator.step()
        losses.append((2 * (true + false) + fooled).item())  # the trace adds the discriminator's loss, its two parts and the generator's loss
    model.eval()
    with torch.no_grad():
        made = model.generator(torch.zeros(len(held), NOISE, dtype=precision))
        metrics = {
            "energy_distance": energy_distance(held.flatten(1), made.flatten(1)),
            "real_accuracy": (model.discriminator(held) > 0).double().mean().item(),
            "fake_accuracy": (model.discriminator(made) <= 0).double().mean().item(),
        }
    return Trained(losses, metrics, model.state_dict())


def energy_distance(first: Tensor, second: Tensor) -> float:
    """Twice the mean distance across, less the mean distances within, of pairs of different images; in root mean squares over pixels."""

    def mean(some: Tensor, others: Tensor, *, within: bool) -> float:
        total = sum(float((one - others).square().mean(1).sqrt().sum()) for one in some)
        return total / (len(some) * (len(others) - within))

    return 2 * mean(first, second, within=False) - mean(first, first, within=True) - mean(second, second, within=True)


def digits() -> tuple[Tensor, Tensor]:
    """Images float32[N, 1, 8, 8] in [-1, 1] to learn from, and those held out: every fifth of each class."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        held[torch.tensor(labels == digit).nonzero()[4::5, 0]] = True
    images = functional.to_dtype(torch.tensor(pixels * 255 // 16, dtype=torch.uint8).view(-1, 1, 8, 8), torch.float32, scale=True) * 2 - 1
    return images[~held], images[held]


ROUNDING = {"double": {"losses": 1e-6, "weights": 1e-5, "metrics": 1e-6}}  # the recipe takes logits as float32
TASK = Task(OVERRIDES, GenerativeAdversarial, Pair, plain, rounding=ROUNDING)


@pytest.fixture(autouse=True)
def same_noise(monkeypatch) -> None:
    """In training the run gets the same noise as the plain script, and in evaluation zeros."""
    drawn = noises()

    def noise(recipe: GenerativeAdversarial, images: Tensor) -> Tensor:
        return next(drawn) if torch.is_grad_enabled() else torch.zeros(len(images), recipe.noise)

    monkeypatch.setattr(GenerativeAdversarial, "_noise", noise)


@pytest.mark.parametrize(("steps", "precision"), [(3, "single"), (12, "double")])
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@pytest.mark.parametrize("fault", ["optimizer.discriminator.weight_decay=0", "gradients are not cleared"])
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 4, "double", fault)
