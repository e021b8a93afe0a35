from __future__ import annotations

from typing import Any

import pytest

from samewise.runner.tracking.views import StoredRun, note, parts, view


def run(
    number: int, best: float | None, *, experiment: str = "digits", monitor: str = "valid/accuracy", mode: str = "max", sweep: str = "", **values: Any
) -> StoredRun:
    params = {"choices.experiment": experiment, "evaluate.monitor": monitor, "evaluate.mode": mode, "run_root": str(number), **values}
    metrics = {"train/loss": 0.5, "speed/step_ms": 3.0, "epoch": 1.0, **({} if best is None else {f"best/{monitor}": best, monitor: best - 0.1})}
    return StoredRun(
        {
            "info": {"run_id": f"id{number}", "run_name": f"run {number}", "start_time": number},
            "data": {
                "params": [{"key": key, "value": value} for key, value in params.items()],
                "metrics": [{"key": key, "value": value} for key, value in metrics.items()],
                "tags": [{"key": "sweep", "value": sweep}] if sweep else [],
            },
        }
    )


RUNS = [
    run(1, 0.7, **{"optimizer.lr": "0.1", "seed": "0"}),
    run(2, 0.9, sweep="wide-1", **{"optimizer.lr": "0.03", "seed": "0"}),
    run(3, 0.8, sweep="wide-1", **{"optimizer.lr": "0.3", "seed": "1"}),
    run(4, None, **{"optimizer.lr": "1", "seed": "0"}),
    run(5, 0.2, experiment="faces", monitor="valid/distance", mode="min", **{"optimizer.lr": "0.1"}),
    run(6, 0.4, experiment="faces", monitor="valid/distance", mode="min", **{"optimizer.lr": "0.2"}),
]


def test_experiment_files_and_sweeps_have_their_own_views_and_the_latest_is_first() -> None:
    found = parts(RUNS)
    assert [(one.key, one.where, len(one.runs)) for one in found] == [
        ("samewise-faces", "params.`choices.experiment` = 'faces'", 2),
        ("samewise-digits", "params.`choices.experiment` = 'digits'", 4),
        ("samewise", "", 6),
        ("samewise-sweep-wide-1", "tags.`sweep` = 'wide-1'", 2),
    ]
    assert [(one.key, one.where, one.title) for one in parts(RUNS[:1])] == [("samewise", "", "digits")]
    assert [one.title for one in parts([run(1, 0.7, experiment="")])] == ["all runs"]


@pytest.mark.parametrize(("which", "key", "lower"), [(0, "best/valid/distance", True), (1, "best/valid/accuracy", False)])
def test_a_view_and_its_charts_begin_with_the_best_by_the_monitored_metric(which, key, lower) -> None:
    made = view(parts(RUNS)[which])
    assert (made["orderByKey"], made["orderByAsc"]) == (f"metrics.`{key}`", lower)
    assert made["selectedColumns"][:2] == [f"metrics.`{key}`", "params.`optimizer.lr`"]
    assert "params.`run_root`" not in made["selectedColumns"]
    assert made["columnOrder"][2:] == made["selectedColumns"]
    sections = [(one["name"], one["display"]) for one in made["compareRunSections"]]
    assert sections == [(f"best by {key.removeprefix('best/')}", True), ("train", True), ("epoch", True), ("speed", False)]
    cards = [(one["type"], one.get("metricKey")) for one in made["compareRunCharts"]]
    assert cards[:3] == [("PARALLEL", None), ("BAR", key), ("LINE", key.removeprefix("best/"))]
    assert made["compareRunCharts"][0]["selectedMetrics"] == [key]
    names = [name for _, name in cards[1:]]
    assert len(set(names)) == len(names)
    assert {one["metricSectionId"] for one in made["compareRunCharts"]} == {one["uuid"] for one in made["compareRunSections"]}


def test_names_are_escaped_in_the_description() -> None:
    odd = [run(number, number, **{"model.act": name}) for number, name in enumerate(["relu", "<img src=x> [a](javascript:b) `c`"])]
    told = note("1", parts(odd))
    assert "<img" not in told.replace("\\<", "")
    assert "[a]" not in told.replace("\\[", "")
