"""Which part of the validation split is evaluated, and when: `evaluate.limit`, and a run of zero steps."""

import json
from pathlib import Path

import mlflow
import pytest
import torch
from PIL import Image

from samewise.runner.config import check
from samewise.runner.config.compose import compose, dump, parse
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError

TINY = [
    *("experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=[progress]"),
    "evaluate.batch_size=16",
]


def train(samewise, root, *overrides):
    done = samewise("train", *TINY, *overrides, f"run_root={root}", code=0)
    return done, next(root.glob("*/*/summary.json")).parent


@pytest.mark.slow
def test_a_run_of_zero_steps_evaluates_and_saves_the_initial_model(samewise, tmp_path) -> None:
    done, folder = train(samewise, tmp_path, "max_steps=0")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["status"], summary["metrics"]["best"]["step"]) == (0, "finished", 0)
    assert {"valid/loss", "valid/accuracy"} <= summary["metrics"]["final"].keys()
    assert torch.load(folder / "checkpoints/step-00000000/state.pt", weights_only=True)["metrics"] == summary["metrics"]["final"]
    assert "0 steps of 16" in done.stderr
    assert "ms per step" not in done.stdout
    again = samewise("eval", folder, "--json", code=0)
    assert json.loads(again.stdout)["metrics"] == summary["metrics"]["final"]
    assert "already finished" in samewise("train", *TINY, "max_steps=0", f"run_root={tmp_path}").stdout
    done = samewise("check", *TINY, "max_steps=0", "--strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert samewise("verify", folder).returncode in (0, 2)  # having no step to compare is reported and does not crash


def test_a_limited_evaluation_uses_the_first_batches_and_its_output_says_so(samewise, tmp_path) -> None:
    done, folder = train(samewise, tmp_path, "max_steps=0", "evaluate.limit=2", "evaluate.every_steps=1")
    said = "the first 32 of 64 samples of valid (evaluate.limit=2)"
    assert f"  evaluates {said}" in done.stderr.splitlines()
    assert said in done.stdout
    limited = json.loads((folder / "summary.json").read_text())["metrics"]
    assert limited["evaluated"] == said
    short = samewise("eval", folder, "--json")
    assert json.loads(short.stdout)["metrics"] == limited["final"]
    assert json.loads(short.stdout)["evaluated"] == said
    whole = json.loads(samewise("eval", folder, "evaluate.limit=null", "--json").stdout)
    assert whole["evaluated"] == ""
    assert whole["metrics"]["valid/loss"] != limited["final"]["valid/loss"]
    other = json.loads(samewise("eval", folder, "--split", "train", "--json").stdout)
    assert other["evaluated"] == "", "only the validation split is cut short"
    refused = samewise("eval", folder, "--split", "train", "evaluate.limit=1", code=2)
    assert "evaluate.limit: limits the validation split, not train" in refused.stderr


@pytest.mark.slow
def test_several_validation_sets_are_measured_monitored_and_recorded_by_their_names(samewise, tmp_path) -> None:
    shifted = "{_target_: samewise.datasets.generated.GeneratedClassification, size: 32, length: 40, split: other}"
    store, monitor = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "evaluate.monitor=ema/valid_shifted/accuracy"
    overrides = [
        *(f"+dataset.valid_shifted={shifted}", f"+dataset.test_far={shifted.replace('other', 'far')}", "callbacks=ema", monitor, "max_steps=8"),
        *("tracking=mlflow", store),
    ]
    _, folder = train(samewise, tmp_path, *overrides)
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    assert {f"{weights}{split}/loss" for weights in ("", "ema/") for split in ("valid", "valid_shifted")} <= metrics["final"].keys()
    for split, *change in (["valid_shifted"], ["valid", f"dataset.valid={shifted}"], ["test_far", f"dataset.test_far={shifted}"]):
        measured = json.loads(samewise("eval", folder, "--split", split, "--checkpoint", "last", "--json", *change).stdout)
        assert measured["samples"] == 40
        assert {name.replace(split, "valid_shifted"): value for name, value in measured["metrics"].items()}.items() <= metrics["final"].items()
    (run,) = mlflow.MlflowClient(store.partition("=")[2]).search_runs(["1"])
    assert run.data.metrics["valid_shifted/accuracy"] == metrics["final"]["valid_shifted/accuracy"]
    assert {tag.value for x in run.inputs.dataset_inputs for tag in x.tags} == {"training", "validation", "valid_shifted", "test_far"}
    unknown = samewise("eval", folder, "--split", "valid_shiftd")
    assert (unknown.returncode, "did you mean 'valid_shifted'?" in unknown.stderr) == (2, True)
    wrong = samewise("train", *TINY, overrides[0], "evaluate.monitor=valid_shifted/acuracy", "evaluate.mode=max", f"run_root={tmp_path}")
    assert (wrong.returncode, "did you mean 'valid_shifted/accuracy'?" in wrong.stderr) == (2, True)


COLOURS = {"airplane": (200, 30, 30), "cat": (30, 200, 30), "ship": (30, 30, 200), "truck": (200, 200, 30)}


def draw(folder, classes, count=8):
    """Write FOLDER/CLASS/N.png in each class's colour, and FOLDER.csv, which lists them."""
    rows = ["image,label,part"]
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (12, 12), tuple(value + number for value in COLOURS[name])).save(folder / name / f"{number}.png")
            rows.append(f"{folder.name}/{name}/{number}.png,{name},{'test' if number % 2 else 'valid'}")
    table = folder.with_suffix(".csv")
    table.write_text("\n".join(rows))
    return table


def overrides(root, name):
    data = [f"dataset.table_path={root}/same.csv", "dataset.shares.test=0.5"] if name == "table" else [f"dataset.root={root}/same"]
    model = ["model=resnet18_small", "model.width=4", "transforms=cifar", "transforms.size=12", "transforms.padding=0", "max_steps=4", "evaluate.every_steps=4"]
    quiet = ["tracking=none", "callbacks=none", "evaluate.pictures=false"]
    return ["recipe=classification", f"dataset={name}", "dataset.num_classes=3", f"name={name}", "batch_size=4", *data, *model, *quiet]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Data with the classes of the run, a part of them, others of the same number, and one more; and its runs, on a table and on folders."""
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("pictures")
    draw(root / "same" / "train", ["airplane", "cat", "ship"])
    for name, classes in {"same": ["airplane", "cat", "ship"], "fewer": ["cat", "ship"], "one": ["airplane"], "others": ["cat", "ship", "truck"]}.items():
        draw(root / name / "valid", classes)
        draw(root / name, classes).write_text((root / name / "valid.csv").read_text().replace("valid/", f"{name}/valid/"))
    for name in ("table", "image_folder"):
        assert main(["train", *overrides(root, name), f"run_root={root}/runs"]) == 0
    return root


WHOLE = ("dataset.shares.valid=1", "dataset.shares.test=0")


@pytest.mark.parametrize("name", ["table", "image_folder"])
def test_other_data_are_evaluated_with_the_classes_of_the_run(samewise, pictures, name) -> None:
    def evaluate(data):
        given = [f"dataset.table_path={pictures}/{data}.csv", *WHOLE] if name == "table" else [f"dataset.root={pictures}/{data}"]
        (folder,) = pictures.glob(f"runs/{name}/*/")
        return samewise("eval", folder, *given, "--json")

    found = {data: json.loads(evaluate(data).stdout) for data in ("same", "fewer", "one")}
    assert {data: one["samples"] for data, one in found.items()} == {"same": 24, "fewer": 16, "one": 8}
    of_each = [one["samples"] * one["metrics"]["valid/loss"] for one in found.values()]
    assert of_each[0] == pytest.approx(of_each[1] + of_each[2]), "each image has the label that it has among all"
    wrong = evaluate("others")
    assert (wrong.returncode, "truck" in wrong.stderr) == (2, True)


BARE = Project(Path(__file__).resolve().parents[2])
DIGITS = ("experiment=resnet18_digits", "device=cpu")


def test_the_first_of_several_monitors_decides_and_only_it_counts() -> None:
    alone = compose([*DIGITS, "callbacks=[default,early_stopping]"], project=BARE)
    several = compose([*DIGITS, "callbacks=[default,early_stopping]", "evaluate.monitor=[valid/accuracy,valid/loss,valid/accuracy_top5]"], project=BARE)
    assert several.cfg.evaluate.monitor == several.cfg.callbacks.early_stopping.monitor == "valid/accuracy"
    assert {name: str(mode) for name, mode in several.cfg.evaluate.also.items()} == {"valid/loss": "min", "valid/accuracy_top5": "max"}
    assert several.fingerprint == alone.fingerprint
    assert several.folder.path == alone.folder.path
    again = parse(dump(several))
    assert again.cfg.evaluate == several.cfg.evaluate
    assert check.problems(several, BARE) == []


@pytest.mark.parametrize(
    ("given", "path", "advice"),
    [
        (["evaluate.monitor=[valid/accuracy,valid/spread]"], "evaluate.monitor", "'evaluate.also={valid/spread: max}'"),
        (["evaluate.monitor=valid/spread"], "evaluate.monitor", "write evaluate.mode=max, or min"),
        (["evaluate.monitor=[valid/loss,valid/loss]"], "evaluate.monitor", "[SPLIT/METRIC, ...]"),
        (["evaluate.also=[valid/loss]"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["evaluate.also={valid/loss: lowest}"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["+evaluate.also={loss: min}"], "evaluate.also", "valid/loss"),
        (["callbacks=[default,early_stopping]", "callbacks.early_stopping.monitor=valid/loss"], "callbacks.early_stopping.mode", "min"),
        (["scheduler=plateau", "scheduler.metric=valid/loss"], "scheduler.mode", "min"),
    ],
)
def test_an_invalid_monitor_is_reported(given: list[str], path: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check.check(compose([*DIGITS, *given], project=BARE), BARE)
    problem = next(one for one in caught.value.problems if one.path == path)
    assert len(caught.value.problems) == 1 or path.startswith("scheduler")  # which the trial step reports too
    assert advice in f"{problem.expected} {problem.hint}"
