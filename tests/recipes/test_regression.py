"""Regression: its metrics against scikit-learn's, the data that it takes, and its predictions."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import sklearn.metrics
import torch
from PIL import Image
from samewise_tiny import QUIET
from scipy import stats

from samewise.datasets.number_table import NumberTable
from samewise.recipes.models.mlp import MLP, Standardise, restored
from samewise.recipes.parts.losses import MeanAbsolute
from samewise.recipes.regression import Regression
from samewise.runner.config.compose import compose
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import find
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase

TABLE = ["recipe=regression", "dataset=number_table", "dataset.features=[height,age]", "dataset.targets=[weight]"]


@pytest.mark.parametrize("targets", [1, 2])
def test_metrics_equal_scikit_learns_for_any_batch_size(targets: int) -> None:
    by_name = ["pearson", "spearman", "mape"] if targets == 1 else ["mape"]
    cfg = compose(["recipe=regression", "model=mlp", "dataset=diabetes", "transforms=none", f"metrics=[{','.join(by_name)}]"], project=find()).cfg
    recipe: Regression = instantiate(cfg.recipe, "recipe", allowed=())
    label = 50 + 9 * torch.randn(101, targets, generator=torch.Generator().manual_seed(1))
    outputs = label + torch.randn(101, targets, generator=torch.Generator().manual_seed(2))
    scores = {}
    for size in (101, 7):
        scored = recipe.scores(None)
        for begin in range(0, 101, size):
            part = slice(begin, begin + size)
            scored.add(recipe.measure(torch.nn.Identity(), {"features": outputs[part], "label": label[part]}))
        scores[size] = scored.compute()
    assert scores[7] == pytest.approx(scores[101], rel=1e-6)
    true, predicted = label.double().numpy(), outputs.double().numpy()
    assert scores[101]["loss"] == pytest.approx(sklearn.metrics.mean_squared_error(true, predicted), rel=1e-5)
    assert scores[101]["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(true, predicted), rel=1e-5)
    assert scores[101]["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(true, predicted), rel=1e-5)
    assert scores[101]["r2"] == pytest.approx(sklearn.metrics.r2_score(true, predicted), rel=1e-5)
    assert scores[101]["mape"] == pytest.approx(sklearn.metrics.mean_absolute_percentage_error(true, predicted), rel=1e-4)
    if targets == 2:
        assert scores[101]["r2/target_1"] == pytest.approx(sklearn.metrics.r2_score(true[:, 1], predicted[:, 1]), rel=1e-5)
    else:
        assert scores[101]["pearson"] == pytest.approx(stats.pearsonr(true[:, 0], predicted[:, 0])[0], rel=1e-4)
        assert scores[101]["spearman"] == pytest.approx(stats.spearmanr(true[:, 0], predicted[:, 0])[0], rel=1e-4)


def test_the_loss_counts_in_deviations_of_the_training_split() -> None:
    dataset = SimpleNamespace(columns={"features": torch.tensor([[1.0, 5.0], [3.0, 5.0]]), "label": torch.tensor([[10.0], [30.0]])})
    model, recipe = MLP(inputs=2, outputs=["weight"], widths=[]), Regression(loss=MeanAbsolute())
    recipe.prepare(model, dataset)
    assert (model.scale.mean.tolist(), model.scale.std.tolist()) == ([2.0, 5.0], [1.0, 1.0])
    assert (model.restore.mean.tolist(), model.restore.std.tolist()) == ([20.0], [10.0])
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    batch = {"features": torch.zeros(2, 2), "label": torch.tensor([[15.0], [50.0]])}
    loss = recipe.loss(model, batch, Phase())
    assert (loss.total.item(), loss.count) == (0.5 + 3.0, 2)
    with pytest.raises(ConfigError, match="has no numbers to standardise the model's features by"):
        recipe.prepare(Standardise(3), dataset)
    with pytest.raises(ConfigError, match="does not return one number for each target"):
        recipe.loss(restored(torch.nn.Linear(2, 3), outputs=3), batch, Phase())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """200 people whose weight follows from height and age, exactly."""
    rows = [f"{number},{150 + number % 50},{20 + number % 7},{(150 + number % 50) / 2 + (20 + number % 7)}" for number in range(200)]
    (tmp_path / "people.csv").write_text("\n".join(["name,height,age,weight", *rows]))
    return tmp_path / "people.csv"


def test_a_table_is_learned_and_its_rows_are_predicted(samewise, table: Path, tmp_path: Path) -> None:
    settings = [*TABLE, "model=mlp", "model.widths=[]", "transforms=none", f"dataset.table_path={table}", "optimizer.lr=0.3", "max_epochs=40", "batch_size=32"]
    done = samewise("train", *settings, *QUIET[1:], f"run_root={tmp_path}/runs", "--json", code=0)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["metrics"]["final"]["valid/rmse"] < 0.01
    (tmp_path / "new.csv").write_text("age,height\n20,160\n30,200\n")
    done = samewise("predict", result["folder"], tmp_path / "new.csv", "--output", tmp_path / "out.csv", code=0)
    _, first, second = (tmp_path / "out.csv").read_text().splitlines()
    assert float(first.split(",")[-1]) == pytest.approx(100.0, abs=0.01)
    assert float(second.split(",")[-1]) == pytest.approx(130.0, abs=0.01)
    (tmp_path / "new.csv").write_text("age\n20\n")
    done = samewise("predict", result["folder"], tmp_path / "new.csv", code=2)
    assert "has no column 'height', only age" in done.stderr
    assert "dataset." not in done.stderr


def test_rows_are_split_by_a_hash_of_their_name_and_faults_name_their_line(table: Path) -> None:
    def load(split: str, **settings: object) -> NumberTable:
        columns = {"features": ["height"], "targets": ["weight"], "shares": {"valid": 0.3}}
        return NumberTable(table_path=str(table), split=split, **{**columns, **settings})

    parts = [load(split) for split in ("train", "valid", "test")]
    assert sum(map(len, parts)) == 200
    assert 40 < len(parts[1]) < 80
    assert {len(load(split, id="age")) % 28 in (0, 1, 2, 3, 4) for split in ("train", "valid")} == {True}
    table.write_text("height,weight\n1,2\n3,4 kg\n")
    with pytest.raises(DataError, match=r"people\.csv:3: does not have a finite number in the column 'weight'"):
        load("train", shares={})


def test_images_listed_with_numbers_are_learned_and_predicted(samewise, tmp_path: Path) -> None:
    for number in range(40):
        Image.new("L", (8, 8), 6 * number).save(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{number},{'valid' if number % 4 == 0 else 'train'}" for number in range(40)]
    (tmp_path / "images.csv").write_text("\n".join(["image,brightness,split", *rows]))
    data = [f"dataset.table_path={tmp_path}/images.csv", "dataset.label=[brightness]", "dataset.split_column=split", "dataset.num_classes=1"]
    images = ["dataset=table", "dataset.mode=gray", "dataset.channels=1", "dataset.image_size=8", "dataset.mean=[0.5]", "dataset.std=[0.3]", *data]
    model = ["model=resnet18_regression", "model.model.width=4", "optimizer=adam", "optimizer.lr=0.01", "max_epochs=20", "batch_size=30", "transforms=images"]
    done = samewise("train", "recipe=regression", "recipe.reads=image", *images, *model, *QUIET[1:], f"run_root={tmp_path}/runs", "--json", code=0)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["metrics"]["final"]["valid/r2"] > 0.5
    done = samewise("predict", result["folder"], tmp_path / "3.png", "--json")
    assert json.loads(done.stdout)["brightness"] == pytest.approx(3, abs=12)
