"""The page that `samewise ui` opens: the latest experiment's runs, the best first, with what differs."""

from typing import Any

import pytest

from samewise.runner.tracking.front_page import view


def run(number: int, *, experiment: str = "digits", monitor: str = "valid/accuracy", mode: str = "max", **values: Any) -> dict[str, dict[str, Any]]:
    params = {"choices.experiment": experiment, "evaluate.monitor": monitor, "evaluate.mode": mode, "run_root": str(number), **values}
    return {"params": params, "metrics": {"train/loss": 0.5, f"best/{monitor}": number, monitor: number - 0.1}}


FACES = [run(number, experiment="faces", monitor="valid/distance", mode="min", **{"optimizer.lr": str(number)}) for number in (1, 2)]
DIGITS = [run(number, **{"optimizer.lr": str(number), "seed": str(number % 2)}) for number in (3, 4, 5)]


@pytest.mark.parametrize(("runs", "key", "lower"), [(FACES + DIGITS, "valid/distance", True), (DIGITS + FACES, "valid/accuracy", False)])
def test_the_page_has_the_latest_experiment_the_best_first_with_what_differs(runs: list[Any], key: str, lower: bool) -> None:
    made = view(runs)
    assert made["searchFilter"] == f"params.`choices.experiment` = '{runs[0]['params']['choices.experiment']}'"
    assert (made["orderByKey"], made["orderByAsc"]) == (f"metrics.`best/{key}`", lower)
    settings = ["params.`optimizer.lr`", *(["params.`seed`"] if runs[0] in DIGITS else [])]
    assert made["selectedColumns"] == [f"metrics.`best/{key}`", *settings, f"metrics.`{key}`", "attributes.`Duration`"]
    assert made["columnOrder"][2:] == made["selectedColumns"]


def test_runs_without_an_experiment_file_or_a_best_value_have_a_page_too() -> None:
    runs = [{"params": {"evaluate.monitor": "valid/loss"}, "metrics": {"valid/loss": 1.0}}]
    assert (view(runs)["searchFilter"], view(runs)["orderByKey"]) == ("", "metrics.`valid/loss`")
