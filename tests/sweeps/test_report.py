"""`samewise report`: the results of a sweep, read from its runs' folders."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_forked import run

from samewise.runner.commands import sweep
from samewise.runner.config.project import Project
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweeps.results import LOCAL, PointResult, State
from samewise.runner.sweeps.settings import rivals

BARE = Project(Path(__file__).parent)
TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=4", "optimizer.lr=0.01,0.2", "seed=range(2)", "launcher.jobs=2")

SUMMARY = {"status": "finished", "level": "R2", "weights_sha256": "0" * 64, "steps": 1, "timings": {"training_s": 1.0, "step_ms": 1.0}}
SEEDS = {"0.1": [(0.9, 1.0), (0.1, 5.0)], "0.2": [(0.8, 2.0), (0.8, 2.0)], "0.3": [(0.7, 1.0), (0.5, 2.0)]}
"""By learning rate and seed: the accuracy at the best step, and the loss at the last. By the means 0.2 beats 0.1, which has the best single seed."""


@pytest.mark.parametrize(
    ("objectives", "best", "front"),
    [
        (None, ["0.2", "0.3", "0.1"], []),
        ({"final/valid/loss": "min"}, ["0.3", "0.2", "0.1"], []),
        ({"valid/accuracy": "max", "final/valid/loss": "min"}, ["0.2", "0.3", "0.1"], ["0.2", "0.3"]),
        ({"final/valid/loss": "min", "valid/accuracy": "max"}, ["0.3", "0.2", "0.1"], ["0.3", "0.2"]),
    ],
)
def test_settings_are_ranked_by_the_sweepers_objectives_in_their_means_over_seeds(tmp_path: Path, samewise, capfd, objectives, best, front) -> None:
    folder = SweepFolder(tmp_path / "sweeps" / "some-1")
    facts = {"id": "some-1", "name": "some", "overrides": [], "root": "", "packages": [], "configs": [], "run_root": str(tmp_path)}
    parts = {"launcher": {"_target_": LOCAL}, "sweeper": {"_target_": "", "objectives": objectives}, "tracking": {"enabled": False, "uri": ""}}
    folder.write_facts({**facts, **parts})
    for setting, (rate, seeds) in enumerate(SEEDS.items()):
        for seed, (accuracy, loss) in enumerate(seeds):
            home = tmp_path / f"{rate}-{seed}"
            point = Point(2 * setting + seed, setting, str(seed), {"lr": rate}, [], "some", "f" * 64, str(home), "valid/accuracy", "max", {})
            folder.add_points([point])
            home.mkdir()
            metrics = {
                "best": {"valid/accuracy": accuracy, "valid/loss": 9.0},
                "final": {"valid/accuracy": 0.0, "valid/loss": loss},
                "monitor": "valid/accuracy",
            }
            (home / "summary.json").write_text(json.dumps({**SUMMARY, "metrics": metrics}))
    told = json.loads(samewise("report", folder.path, "--json").stdout)
    means = {rate: {"valid/accuracy": sum(a for a, _ in seeds) / 2, "final/valid/loss": sum(b for _, b in seeds) / 2} for rate, seeds in SEEDS.items()}
    judged = list(objectives or ["valid/accuracy"])
    assert [one["values"]["lr"] for one in told["settings"]] == best
    assert [one["mean"] for one in told["settings"]] == [pytest.approx(means[rate][judged[0]]) for rate in best]
    assert [one["lr"] for one in told["undecided"]] == best[1:]
    assert [one["values"]["lr"] for one in told["pareto"]] == front
    assert [one["objectives"] for one in told["pareto"]] == [pytest.approx({name: means[rate][name] for name in judged}) for rate in front]
    values = dict(zip(("valid/accuracy", "final/valid/loss"), SEEDS["0.1"][0], strict=True))
    assert (told["points"][0]["monitor"], told["points"][0]["value"]) == (judged[0], values[judged[0]])
    assert told["points"][0]["objectives"] == {name: values[name] for name in objectives or ()}

    sweep._report(folder, BARE, as_json=True)  # pyright: ignore[reportPrivateUsage]
    assert json.loads(capfd.readouterr().out)["pareto"] == told["pareto"]
    printed = samewise("report", folder.path).stdout
    assert f"ranked   by {judged[0]} " in printed
    assert f"best     not distinguishable: lr={best[0]} has the best mean, but 2 others may be as good, first lr={best[1]}" in printed
    assert re.search(rf"^lr +{judged[0]} +std .*{judged[-1] if len(judged) > 1 else ''} +state", printed, re.M)
    shown = [line.split() for line in printed.partition("Pareto set")[2].splitlines()[2 : 2 + len(front)]]
    assert shown == [[rate, *(f"{means[rate][name]:.4g}" for name in judged)] for rate in front]
    assert printed.count("Pareto set") == bool(front)
    assert re.search(rf"^ +point +state +step +{judged[0]}", samewise("sweep", "--status", folder.path).stdout, re.M)


def test_settings_that_may_be_as_good_as_the_best_are_told_by_pairs_of_seeds() -> None:
    noise = (0.0, 0.04, -0.02, 0.05, 0.01)
    offsets = {"a": (0.5,) * 5, "b": (0.49, 0.5, 0.495, 0.5, 0.489), "c": (0.4, 0.401, 0.402, 0.4, 0.399)}
    settings = []
    for setting, (name, seeds) in enumerate(offsets.items()):
        points = [Point(x, setting, str(x), {"x": name}, [], "some", "f" * 64, f"{name}{x}", "valid/accuracy", "max", {}) for x in range(5)]
        settings.append([PointResult(x, State.finished, best={"valid/accuracy": seeds[x.number] + noise[x.number]}) for x in points])
    ((rival, needed),) = rivals(settings)
    assert rival == settings[1]
    assert 0 < (needed or 0) < 100
    assert rivals([settings[0], settings[2]]) == []
    assert rivals([x[:1] for x in settings]) == [(settings[1][:1], None), (settings[2][:1], None)]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A sweep of two rates and two seeds with MLflow on: its folder, its id, and its final output."""
    folder = tmp_path_factory.mktemp("reported")
    done = run("sweep", *TINY, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, next((folder / "runs" / "sweeps").iterdir()).name, done.stdout


@pytest.mark.slow
def test_the_report_and_the_csv_hold_the_runs_values(reported: tuple[Path, str, str], samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name, said = reported
    monkeypatch.chdir(folder)
    told = json.loads(samewise("report", name, "--json").stdout)
    summaries = {str(file.parent.relative_to(folder)): json.loads(file.read_text()) for file in folder.glob("runs/*/*/summary.json")}
    assert len(summaries) == 4
    assert {one["folder"]: one["weights_sha256"] for one in told["points"]} == {run: one["weights_sha256"] for run, one in summaries.items()}
    means = [[summaries[one["folder"]]["metrics"]["best"]["valid/accuracy"] for one in told["points"] if one["setting"] == setting] for setting in range(2)]
    assert told["settings"][0]["mean"] == pytest.approx(max(sum(each) / 2 for each in means))
    assert sum(one["steps"] for one in told["points"]) == 16

    written = folder / "runs" / "sweeps" / name / "report"
    rows = list(csv.DictReader(io.StringIO((written / "points.csv").read_text())))
    assert [float(row["valid/accuracy"]) for row in rows] == [one["value"] for one in told["points"]]
    assert [row["weights sha256"] for row in rows] == [one["weights_sha256"] for one in told["points"]]
    assert "best     not distinguishable: lr=" in said


def test_a_missing_sweep_is_reported(samewise, tmp_path) -> None:
    done = samewise("report", "nothing", "--run-root", str(tmp_path), code=2)
    assert "no such sweep" in done.stderr
