"""Several monitored metrics: each keeps its best checkpoint, and is shown at the end and in MLflow; invalid monitors are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.config import check
from samewise.runner.config.compose import compose, dump, parse
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.training.dry_run import dry_run

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
        (["evaluate.monitor=[valid/accuracy,valid/los]"], "evaluate.monitor", "did you mean 'valid/loss'?"),
        (["evaluate.monitor=valid/spread"], "evaluate.monitor", "write evaluate.mode=max, or min"),
        (["evaluate.monitor=valid/loss", "evaluate.mode=max"], "evaluate.mode", "min"),
        (["evaluate.monitor=[valid/loss,valid/loss]"], "evaluate.monitor", "[SPLIT/METRIC, ...]"),
        (["evaluate.monitor=[]"], "evaluate.monitor", "[SPLIT/METRIC, ...]"),
        (["evaluate.also=[valid/loss]"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["evaluate.also={valid/loss: lowest}"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["+evaluate.also={valid/loss: max}"], "evaluate.also.valid/loss", "min"),
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


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        (["scheduler=plateau", "scheduler.metric=valid/los"], ["scheduler.metric"]),
        (["callbacks=[default,early_stopping]", "callbacks.early_stopping.monitor=ema/valid/accuracy"], ["callbacks.early_stopping.monitor"]),
        (["scheduler=plateau", "evaluate.monitor=valid/accurac"], ["evaluate.monitor"]),
        (["callbacks=[ema,early_stopping]", "callbacks.early_stopping.monitor=ema/valid/accuracy"], []),
    ],
)
def test_a_metric_that_no_evaluation_computes_is_found_before_training_in_every_part_that_decides_by_one(given: list[str], paths: list[str]) -> None:
    found = compose([*DIGITS, "debug=tiny", "tracking=none", "model.width=4", "evaluate.mode=max", *given], project=BARE)
    with pytest.raises(ConfigError) if paths else nullcontext() as caught:
        dry_run(found, BARE)
    problems = caught.value.problems if caught else ()
    assert [one.path for one in problems] == paths
    assert all(one.message == "no such metric is computed" and one.hint.startswith("did you mean 'valid/") for one in problems)


@pytest.mark.slow
def test_the_best_by_each_metric_is_in_the_end_line_the_summary_and_mlflow(
    samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    given = ("train", *DIGITS, "debug=tiny", "model.width=4", "max_steps=6", "evaluate.every_steps=2", "optimizer.lr=1.0")
    done = samewise(*given, "evaluate.monitor=[valid/accuracy,valid/loss]")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "resnet18_digits").iterdir()
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["metrics"]["valid/loss"] for entry in entries if "valid/loss" in entry.get("metrics", {})}
    accuracies = {entry["step"]: entry["metrics"]["valid/accuracy"] for entry in entries if "valid/accuracy" in entry.get("metrics", {})}
    lowest, highest = min(losses, key=losses.__getitem__), max(accuracies, key=accuracies.__getitem__)
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    assert (metrics["also"]["valid/loss"]["step"], metrics["also"]["valid/loss"]["valid/loss"]) == (lowest, losses[lowest])
    assert metrics["best"]["step"] == highest
    first, second = done.stdout.splitlines()[1:3]
    assert first.split()[0] == "valid/accuracy"
    assert second.split() == ["valid/loss", f"{losses[6]:.4f}", "(best", f"{losses[lowest]:.4f}", "at", "step", f"{lowest})"]
    assert (run / "checkpoints" / "best-valid-loss").resolve().name == f"step-{lowest:08d}"
    for metric, step in (("valid/accuracy", highest), ("valid/loss", lowest)):
        assert json.loads(samewise("eval", run, "--checkpoint", metric, "--json").stdout)["step"] == step

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (stored,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert stored.data.metrics["best/valid/loss"] == pytest.approx(losses[lowest])
    assert stored.data.metrics["best/valid/accuracy"] == pytest.approx(accuracies[highest])
