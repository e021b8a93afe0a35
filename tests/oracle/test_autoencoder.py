"""An autoencoder against a plain script: torch's layers, loss and optimizer on scikit-learn's digits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samewise_oracle_curves import Task, Trained, batches
from torch import Tensor, nn

from samewise.recipes.autoencoder import Autoencoding

BATCH = 64
OVERRIDES = [
    *("experiment=autoencoder_digits", "loss=bce", "model.widths=[4]", "model.hidden=12", "model.code=5", "model.activation=elu"),
    *(f"batch_size={BATCH}", "evaluate.batch_size=100", "evaluate.every_epochs=1"),
]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(64, 12), nn.ELU(), nn.Linear(12, 5))
        self.decoder = nn.Sequential(*(nn.Linear(5, 12), nn.ELU(), nn.Linear(12, 64), nn.Unflatten(1, (4, 4, 4)), nn.ELU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)))


def digits() -> tuple[Tensor, Tensor]:
    """Images to learn from, and every fifth of each class."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    held = np.concatenate([np.nonzero(labels == digit)[0][4::5] for digit in range(10)])
    images = torch.tensor(pixels * 255 // 16 / 255, dtype=torch.float32).view(-1, 1, 8, 8)
    return images[np.setdiff1d(np.arange(len(labels)), held)], images[np.sort(held)]


def plain(model: Network, steps: int, shuffle: bool) -> Trained:
    precision = next(model.parameters()).dtype
    images, held = (values.to(precision) for values in digits())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    losses = []
    for batch in batches(len(images), BATCH, steps, shuffle=shuffle):
        optimizer.zero_grad()
        logits = model.decoder(model.encoder(images[batch]))
        loss = F.binary_cross_entropy(logits.sigmoid(), images[batch], reduction="sum") / BATCH
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        made = model.decoder(model.encoder(held)).sigmoid()
    errors = ((made - held) ** 2).mean((1, 2, 3)).tolist()
    psnr = [-10 * math.log10(error) for error in errors]
    return Trained(losses, {"mse": np.mean(errors), "psnr": np.mean(psnr)}, model.state_dict())


TASK = Task(OVERRIDES, Autoencoding, Network, plain, rounding={"double": {"losses": 1e-8, "metrics": 1e-6}})  # errors are reported in float32


@pytest.mark.parametrize(("steps", "precision"), [(4, "single"), (25, "double")])  # an epoch has 22 steps
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@pytest.mark.parametrize("fault", ["loss=mse", "the loss is divided by the batch twice"])
def test_a_fault_makes_it_differ(oracle, fault):
    oracle.require_parted(TASK, 6, "double", fault)
