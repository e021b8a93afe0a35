"""Regression against a plain script: scikit-learn's diabetes data and scaler, torch's layers, loss and optimizer."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samewise_oracle_curves import Task, Trained, batches
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from samewise.recipes.regression import Regression

BATCH = 64
OVERRIDES = [
    *("recipe=regression", "model=mlp", "dataset=diabetes", "dataset.held_out=42", "transforms=none", "optimizer=adam", "optimizer.lr=0.01"),
    *("model.widths=[16,8]", "model.activation=silu", "loss=huber", "recipe.loss.delta=0.5", f"batch_size={BATCH}", "evaluate.batch_size=10"),
]


def data() -> tuple[Tensor, Tensor]:
    features, progression = load_diabetes(return_X_y=True, scaled=False)
    return torch.tensor(features, dtype=torch.float32), torch.tensor(progression, dtype=torch.float32)[:, None]


class Scaled(nn.Module):
    """scikit-learn's scaler, as buffers."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        scaler = StandardScaler().fit(values.double())
        self.register_buffer("mean", torch.tensor(scaler.mean_).float())
        self.register_buffer("std", torch.tensor(scaler.scale_).float())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features, label = (values[:-42] for values in data())
        self.scale, self.restore = Scaled(features), Scaled(label)
        self.hidden = nn.Sequential(nn.Sequential(nn.Linear(10, 16), nn.SiLU()), nn.Sequential(nn.Linear(16, 8), nn.SiLU()))
        self.head = nn.Linear(8, 1)

    def forward(self, features: Tensor) -> Tensor:
        """In units of the target's deviation from its mean."""
        return self.head(self.hidden((features - self.scale.mean) / self.scale.std))


def plain(model: Network, steps: int, shuffle: bool) -> Trained:
    precision = next(model.parameters()).dtype
    features, label = (values.to(precision) for values in data())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for batch in batches(400, BATCH, steps, shuffle=shuffle):
        optimizer.zero_grad()
        loss = F.huber_loss(model(features[batch]), (label[batch] - model.restore.mean) / model.restore.std, delta=0.5)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        predicted = (model(features[400:]) * model.restore.std + model.restore.mean).double()
    true = label[400:].double()
    metrics = {"mae": mean_absolute_error(true, predicted), "rmse": root_mean_squared_error(true, predicted), "r2": r2_score(true, predicted)}
    return Trained(losses, metrics, model.state_dict())


TASK = Task(OVERRIDES, Regression, Network, plain)


@pytest.mark.parametrize(("steps", "precision"), [(5, "single"), (20, "double")])  # an epoch has 6 steps
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@pytest.mark.parametrize("fault", ["recipe.loss.delta=1.0", "labels are shifted", "model.activation=relu"])
def test_a_fault_makes_it_differ(oracle, fault):
    oracle.require_parted(TASK, 6, "double", fault)


@pytest.mark.slow
def test_a_linear_model_trains_to_least_squares(oracle):
    """As scikit-learn solves them; its tutorial has a mean squared error of 2004.57 and R2 0.585."""
    task = replace(TASK, overrides=["experiment=linear_diabetes", "max_epochs=250", "evaluate.every_epochs=250"])
    trained = oracle.run(task)
    features, label = (values.double().numpy() for values in data())
    solved = LinearRegression().fit(features[:-20], label[:-20])
    assert trained.metrics["rmse"] ** 2 == pytest.approx(root_mean_squared_error(label[-20:], solved.predict(features[-20:])) ** 2, rel=1e-3)
    assert trained.metrics["rmse"] ** 2 == pytest.approx(2004.57, rel=1e-3)
    assert trained.metrics["r2"] == pytest.approx(0.585, abs=1e-3)
