"""`samewise compare`: pairs of runs by seed, whatever names them; tables and pictures; training of what is missing."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import DIGITS

import samewise as package
from samewise.runner import paired
from samewise.runner.config import compose, project
from samewise.runner.records.json_text import to_json

SHARED = [*DIGITS, "model.width=4", "max_steps=2"]
ACCURACY = {"0.1": [0.91, 0.93, 0.92, 0.95, 0.94], "0.2": [0.80, 0.81, 0.80, 0.83, 0.815], "0.3": [0.90, 0.94, 0.91, 0.95, 0.945]}
"""By learning rate and seed."""


def finish(setting: str, seed: int, accuracy: float, loss: float) -> Path:
    """Write a run's folder as a finished training leaves it, without a training."""
    config = compose.compose([*SHARED, setting, f"seed={seed}"], project=project.find())
    config.folder.create()
    config.folder.config.write_text(compose.dump(config))
    best = {"step": 1, "valid/accuracy": accuracy, "valid/loss": loss}
    test = {"step": 1, "samples": 9, "time_ms": 1, "metrics": {"test/accuracy": accuracy - 0.1}}
    summary = {
        "status": "finished",
        "level": "R2",
        "weights_sha256": "0" * 64,
        "steps": 2,
        "timings": {"training_s": 10.0 + seed, "step_ms": 1.0},
        "metrics": {"best": best, "final": {"valid/accuracy": 0.5, "valid/loss": loss}, "monitor": "valid/accuracy"},
        "evaluations": {"test": test},
    }
    config.folder.summary.write_text(to_json(summary))
    return config.folder.path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Path]]]:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, {rate: [finish(f"optimizer.lr={rate}", seed, x, 1 - x) for seed, x in enumerate(values)] for rate, values in ACCURACY.items()}


@pytest.fixture
def runs(finished: tuple[Path, dict[str, list[Path]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Path]]:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return finished[1]


def gains(first: str, second: str, seeds: Sequence[int] = range(5)) -> tuple[list[float], list[float]]:
    return [ACCURACY[first][x] for x in seeds], [ACCURACY[second][x] for x in seeds]


def test_runs_pair_by_seed_whatever_names_the_settings(runs: dict[str, list[Path]], samewise: Callable[..., Any]) -> None:
    shutil.rmtree(runs["0.2"][4])
    reference = paired.estimate(*gains("0.1", "0.2", range(4)), ((4, paired.PLANNED),), bounds=(0.0, 1.0))
    names = [("optimizer.lr=0.1", "optimizer.lr=0.2", *SHARED), (runs["0.1"][3], runs["0.2"][0].name)]
    results = [json.loads(samewise("compare", *x, "--json").stdout) for x in names]
    for (result,) in results:
        assert result["seeds"] == [0, 1, 2, 3]
        assert result["values"] == [list(pair) for pair in zip(*gains("0.1", "0.2", range(4)), strict=True)]
        assert (result["low"], result["mean"], result["high"]) == (reference.low, reference.mean, reference.high)
        assert (result["verdict"], result["more"], result["notes"]) == ("better", None, ["without a pair: seed 4"])
    text = "optimizer.lr=0.1 is 11.75 points better than optimizer.lr=0.2, 95 % interval 10.74 to 12.58, from 4 pairs"
    assert results[0][0]["sentence"] == f"valid/accuracy: {text}"
    printed = samewise("compare", "optimizer.lr=0.2", "optimizer.lr=0.1", *SHARED).stdout
    assert "optimizer.lr=0.2 is 11.75 points worse than optimizer.lr=0.1, 95 % interval 10.74 to 12.58, from 4 pairs" in printed
    assert package.compare("optimizer.lr=0.1", runs["0.2"][0], *SHARED)[0].estimate == reference


def test_close_settings_are_not_distinguishable_and_looks_are_counted(runs: dict[str, list[Path]], samewise: Callable[..., Any]) -> None:
    sides = ("optimizer.lr=0.3", "optimizer.lr=0.1", *SHARED)
    held_back = {run: Path(run.name) for run in runs["0.3"][3:]}
    for run, place in held_back.items():
        run.rename(place)
    first = package.compare(*sides)[0]
    assert (first.verdict, first.estimate.pairs) == ("not distinguishable", 3)
    assert str(first).startswith("valid/accuracy: optimizer.lr=0.3 is 0.3 points worse than optimizer.lr=0.1, 95 % interval ")
    assert f"from 3 pairs; not distinguishable: about {first.more} more would settle it" in str(first)
    assert package.compare(*sides)[0] == first
    for run, place in held_back.items():
        place.rename(run)
    looks = paired.add_look(((3, paired.PLANNED),), 5, (3, paired.PLANNED))
    second = paired.estimate(*gains("0.3", "0.1"), looks, bounds=(0.0, 1.0))
    assert package.compare(*sides)[0].estimate == second
    (record,) = Path("runs/comparisons").glob("*.json")
    assert json.loads(record.read_text()) == {"looks": [{"pairs": pairs, "spent": spent} for pairs, spent in looks]}


def test_metrics_costs_and_settings_are_compared_and_written_for_a_paper(runs: dict[str, list[Path]], samewise: Callable[..., Any], tmp_path: Path) -> None:
    metrics = ("valid/loss", "final/valid/accuracy", "test/accuracy", "seconds")
    options = [word for name in metrics for word in ("--metric", name)]
    sides = ("optimizer.lr=0.1", "optimizer.lr=0.2", *SHARED)
    assert "written  paper/comparison.md" in samewise("compare", *sides, *options, "--out", "paper").stdout
    loss, last, test, seconds = package.compare(*sides, metrics=metrics)
    gain = paired.estimate(*gains("0.1", "0.2"), ((5, paired.PLANNED),))
    assert (loss.mode, loss.verdict, loss.unit) == ("min", "better", "")
    assert loss.estimate.mean == pytest.approx(gain.mean)
    assert test.estimate.mean == pytest.approx(gain.mean)
    assert {last.verdict, seconds.verdict} == {"the same"}
    assert str(seconds) == "seconds: optimizer.lr=0.1 and optimizer.lr=0.2 have equal values in 5 pairs"
    table = (tmp_path / "paper" / "comparison.md").read_text().splitlines()
    assert [line.count("|") for line in table if line.startswith("|")] == [11] * 6
    latex = (tmp_path / "paper" / "comparison.tex").read_text()
    assert (latex.count(r" \\"), latex.count(r"$\pm$"), latex.count(r"95 \%")) == (5, 0, 1)
    for name in ("comparison.svg", "comparison.pdf"):
        first = (tmp_path / "paper" / name).read_bytes()
        samewise("compare", *sides, *options, "--out", "again")
        assert (tmp_path / "again" / name).read_bytes() == first
    assert "gain in valid/loss" in (tmp_path / "paper" / "comparison.svg").read_text()


def test_what_cannot_be_compared_is_said(runs: dict[str, list[Path]], samewise: Callable[..., Any]) -> None:
    messages = {
        ("optimizer.lr=0.1", "optimizer.lr=0.4"): "have no finished runs with one seed",
        ("optimizer.lr=0.1", "optimizer.lr=0.1"): "is the same setting as",
        ("optimizer.lr=0.1", "optimizer.lr=0.2", "--metric", "valid/f1"): "has no such metric at its best step",
        ("optimizer.lr=0.1", "optimizer.lr=0.2", "--metric", "valid/quality"): "does not tell whether less or more is better",
        ("optimizer.lr=0.1", "none"): "no such run",
    }
    for arguments, message in messages.items():
        assert message in samewise("compare", *arguments[:2], *SHARED, *arguments[2:], code=2).stderr


@pytest.mark.slow
def test_missing_pairs_are_trained_as_a_sweep_and_existing_runs_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]) -> None:
    monkeypatch.chdir(tmp_path)
    samewise("train", *SHARED, "optimizer.lr=0.1", "seed=3")
    (result,) = json.loads(samewise("compare", "optimizer.lr=0.1", "optimizer.lr=0.2", *SHARED, "--seeds", "2", "--json").stdout)
    assert result["seeds"] == [0, 3]
    assert result["notes"][0].startswith("of 2 pairs, 2 have the same first batch, and 2 the same augmentation of it; 122 of 122")
    trained = sorted(tmp_path.glob("runs/resnet18_digits/*/summary.json"))
    assert len(trained) == 4
    # Of recorded runs: the budget is enough for one side; then `--until` ends at the first look
    run = trained[0].parent
    other = next(x.parent for x in trained if _rate(x.parent) != _rate(run))
    samewise("compare", run, other, "--seeds", "3", "--budget", "3")
    assert len(list(tmp_path.glob("runs/resnet18_digits/*/summary.json"))) == 5
    samewise("compare", run, other, "--seeds", "4", "--until", "100")
    assert len(list(tmp_path.glob("runs/resnet18_digits/*/summary.json"))) == 6


def _rate(run: Path) -> float:
    return float(compose.load(run / "config.yaml").cfg.optimizer.lr)
