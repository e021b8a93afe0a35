"""`samewise report`: the results of a sweep, read from its runs' folders."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from samewise.runner.commands import sweep
from samewise.runner.config.project import Project
from samewise.runner.launchers import job
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweep.comparison import pages
from samewise.runner.sweep.curves import cost
from samewise.runner.sweep.effects import effects, left_out, pareto
from samewise.runner.sweep.results import LOCAL, PointResult, Spread, State, point_results, rank_settings
from samewise.runner.sweep.rows import cost_in_words, effect_rows, setting_rows
from samewise.runner.sweep.tables import as_plain_values, print_points, print_settings, setting_values

BARE = Project(Path(__file__).parent)
TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=4", "optimizer.lr=0.01,0.2", "seed=range(2)", "launcher.jobs=2")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("SAMEWISE_PICTURES")
"""A folder for the screenshots in the documents; if it is not set, they are not kept."""


def samewise_process(*given: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samewise", *map(str, given)], cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def outcome(number: int, value: float, mode: str = "max", state: State = State.finished, metrics: dict[str, float] | None = None, **values: str) -> PointResult:
    point = Point(number, number, None, values, [], "some", "f" * 64, f"runs/some/{number}", "valid/score", mode, {})
    return PointResult(point, state, best={"valid/score": value, **(metrics or {})})


def test_intervals_of_accuracies_are_clipped_and_those_of_two_seeds_marked() -> None:
    high, low = Spread.of([0.98, 0.9]), Spread.of([0.01, 0.03])
    assert high.interval("valid/accuracy") == (pytest.approx(0.94 - 12.706 * 0.04, abs=1e-3), 1.0)
    assert low.interval("ema/valid/accuracy_top5")[0] == 0.0
    assert low.interval("valid/loss")[0] < 0.0
    assert high.interval("valid/loss")[1] > 1.0
    assert all(map(math.isnan, Spread.of([0.5]).interval("valid/accuracy")))
    made = [outcome(number, value, a="1") for number, value in enumerate((0.98, 0.9, 0.95))]
    seeds = [dataclasses.replace(one, point=dataclasses.replace(one.point, setting=0, seed=number)) for number, one in enumerate(made)]
    assert setting_rows(seeds[:2])[0]["95 % interval"].endswith("(2 seeds: too few)")
    assert "few" not in setting_rows(seeds)[0]["95 % interval"]


def test_settings_without_a_result_are_counted() -> None:
    found = [outcome(0, 0.5, a="1"), outcome(1, 0.7, a="2"), outcome(2, 0.1, a="3", state=State.pruned)]
    assert left_out(found) == "Of 2 of 3 settings: those without a final result, such as pruned ones, or with a failed seed are left out."
    assert left_out(found[:2]) == ""


def test_in_a_full_grid_the_shares_of_independent_settings_add_up_to_one() -> None:
    found = [outcome(number, 3 * a + b, a=str(a), b=str(b)) for number, (a, b) in enumerate((a, b) for a in range(2) for b in range(2))]
    first, second = effects(found)
    assert (first.key, second.key) == ("a", "b")
    assert first.share == pytest.approx(0.9)
    assert first.share + second.share == pytest.approx(1)
    assert first.best == "1"
    assert [level.spread.mean for level in first.levels] == [0.5, 3.5]
    assert first.correlation == pytest.approx(math.sqrt(0.8))


def test_the_best_value_follows_the_mode_of_the_experiment() -> None:
    assert effects([outcome(0, 1.0, "min", a="x"), outcome(1, 2.0, "min", a="y")])[0].best == "x"
    assert effects([outcome(0, 1.0, "max", a="x"), outcome(1, 2.0, "max", a="y")])[0].best == "y"


def test_text_has_no_correlation_and_constants_have_no_effect() -> None:
    (one,) = effects([outcome(0, 1.0, a="adam", b="1"), outcome(1, 2.0, a="sgd", b="1")])
    assert one.key == "a"
    assert one.correlation is None


def test_a_share_needs_a_repeated_value_and_long_numbers_have_four_digits() -> None:
    found = [outcome(0, 1.0, a="0.0023050789540185563", b="x"), outcome(1, 2.0, a="0.1", b="y"), outcome(2, 4.0, a="0.2", b="y")]
    b, a = effects(found)
    assert b.share == pytest.approx(4 / 7)
    assert math.isnan(a.share)
    assert "0.002305" in [row["a"] for row in setting_rows(found)]


def test_many_values_are_grouped_into_ranges() -> None:
    (one,) = effects([outcome(number, float(number), a=repr(0.01 * (number + 1))) for number in range(20)])
    assert [level.name for level in one.levels] == ["0.01 to 0.05", "0.06 to 0.1", "0.11 to 0.15", "0.16 to 0.2"]
    assert [level.spread.count for level in one.levels] == [5, 5, 5, 5]
    assert one.correlation == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([round(0.9991 + 0.0001 * number, 4) for number in range(9)], ["0.9991 to 0.9993", "0.9994 to 0.9996", "0.9997 to 0.9999"]),
        ([10000 + number for number in range(31)], ["10000 to 10007", "10008 to 10015", "10016 to 10023", "10024 to 10030"]),
        (
            [1 + 2**-52 * number for number in range(9)],
            ["1 to 1.0000000000000004", "1.0000000000000007 to 1.0000000000000011", "1.0000000000000013 to 1.0000000000000018"],
        ),
        ([*range(8), 9e15], ["0 to 2", "3 to 5", "6 to 9e+15"]),
    ],
)
def test_ranges_of_close_values_have_different_names_and_lose_no_setting(values: list[float], names: list[str]) -> None:
    (one,) = effects([outcome(number, float(number % 5), a=repr(value)) for number, value in enumerate(values)])
    assert [level.name for level in one.levels] == names
    assert sum(level.spread.count for level in one.levels) == len(values)
    assert [row[""] for row in effect_rows([one])].count("best") == 1


def test_the_shares_of_ranges_are_of_all_settings() -> None:
    found = [outcome(number, value, a=repr(0.999 + 0.0001 * number)) for number, value in enumerate([1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 6.0, 8.0, 9.0])]
    groups = ([1.0, 3.0, 5.0], [7.0, 2.0, 4.0], [6.0, 8.0, 9.0])
    between = sum(3 * (sum(group) / 3 - 5) ** 2 for group in groups)
    assert effects(found)[0].share == pytest.approx(between / 60)


def test_values_that_look_alike_with_four_digits_are_written_whole() -> None:
    rows = effect_rows(effects([outcome(0, 1.0, a="0.99971234567", b="0.1"), outcome(1, 2.0, a="0.99973456789", b="0.29999999999")]))
    assert [row["value"] for row in rows] == ["0.99971234567", "0.99973456789", "0.1", "0.3"]


def test_settings_that_are_the_same_run_count_once() -> None:
    draws = [("1", 1.0), ("2", 4.0), ("1", 1.0), ("3", 2.0), ("2", 4.0), ("1", 1.0)]
    found = [outcome(number, value, a=drawn, b=str(number % 2)) for number, (drawn, value) in enumerate(draws)]
    found = [dataclasses.replace(one, point=dataclasses.replace(one.point, folder=f"runs/some/{one.point.values['a']}")) for one in found]
    (a, b) = sorted(effects(found), key=lambda one: one.key)
    assert math.isnan(a.share), "no value was tried more than once"
    assert [(level.spread.count, level.spread.mean) for level in a.levels] == [(1, 1.0), (1, 4.0), (1, 2.0)]
    assert [level.spread.count for level in b.levels] == [1, 2]
    assert left_out(found) == ""


def test_a_setting_that_was_drawn_twice_is_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, again = outcome(0, 0.5, a="1"), outcome(1, 0.7, a="2"), outcome(2, 0.7, a="2")
    again = dataclasses.replace(again, point=dataclasses.replace(again.point, folder=second.point.folder))
    assert [setting[0].point.number for setting in rank_settings([first, second, again])] == [1, 0]
    print_settings(SweepFolder(tmp_path / "some-1"), [first, second, again])
    assert "best     a=2\n" in capsys.readouterr().out
    workers = dataclasses.replace(again, point=dataclasses.replace(again.point, values={"loader.num_workers": "2"}))
    assert len(rank_settings([first, second, workers])) == 3, "settings of one run that are written differently are both listed"


def test_points_without_a_result_are_ignored() -> None:
    found = [outcome(0, 1.0, a="1"), outcome(1, 2.0, a="2"), outcome(2, 99.0, state=State.failed, a="2"), outcome(3, math.nan, a="3")]
    (one,) = effects(found)
    assert [(level.name, level.spread.mean) for level in one.levels] == [("1", 1.0), ("2", 2.0)]


def test_the_cost_has_every_try_and_the_time_of_unfinished_runs(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "some-1")
    folder.write_facts({})
    made = [dataclasses.replace(outcome(number, 0.5).point, folder=str(tmp_path / str(number))) for number in (0, 1)]
    folder.add_points(made)
    folder.note(0, began=1000.0, tries=1)  # killed
    made[0].run.path.mkdir()
    made[0].run.metrics.touch()
    os.utime(made[0].run.metrics, (1030.0, 1030.0))
    folder.note(1, began=1010.0, ended=1030.0, exit_code=3, tries=1)
    assert cost(folder, point_results(folder)).training_s == pytest.approx(30 + 20)
    job._begin(folder, 0)  # pyright: ignore[reportPrivateUsage]
    now = folder.word(0)["began"]
    folder.note(0, ended=now + 5, exit_code=3)
    spent = cost(folder, point_results(folder))
    assert spent.span_s == pytest.approx(now + 5 - 1000)
    assert spent.training_s == pytest.approx(30 + 5 + 20)
    assert cost_in_words(dataclasses.replace(spent, steps=1, tries=1)).startswith("0:55 of training, 1 step, 1 job started, ")


def test_a_point_that_is_the_same_run_as_one_that_failed_has_failed_with_it(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "some-1")
    folder.write_facts({})
    folder.add_points([dataclasses.replace(outcome(number, 0.5).point, folder=str(tmp_path / name)) for number, name in enumerate("aabb")])
    folder.note(0, began=1.0, ended=2.0, exit_code=1, said="the loss is not finite", tries=1)
    found = point_results(folder)
    assert [one.state for one in found] == [State.failed, State.failed, State.waiting, State.waiting]
    assert found[1].reason == "the same run as point 1, which failed: the loss is not finite"


def test_the_status_relates_its_numbers_to_those_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, found = SweepFolder(tmp_path / "some-1"), [outcome(number, 0.5, a=str(number)) for number in (0, 1)]
    print_points(folder, found, held=None)
    told = capsys.readouterr().out
    assert re.search(r"^2 +a=1 ", told, re.M)
    assert f"{folder.path}/logs/0000.log is point 1's" in told
    assert [(values["point"], values["number"]) for values in map(as_plain_values, found)] == [(1, 0), (2, 1)]


def test_a_tie_for_the_best_result_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for values, said in (((0.5, 0.7, 0.7), "best     a=1   (the first of 2 settings with this result)\n"), ((0.5, 0.7, 0.6), "best     a=1\n")):
        print_settings(SweepFolder(tmp_path / "some-1"), [outcome(number, value, a=str(number)) for number, value in enumerate(values)])
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_setting_with_a_seed_that_gave_nan_is_not_the_best(mode) -> None:
    found = [outcome(0, math.nan, mode, a="1"), outcome(1, 9.0, mode, a="2"), outcome(2, 5.0, mode, a="3"), outcome(3, math.nan, mode, a="4")]
    other_seed = dataclasses.replace(found[3].point, number=4)
    found.append(dataclasses.replace(found[3], point=other_seed, best={"valid/score": 100.0 if mode == "max" else 0.0}))
    best = [1, 2] if mode == "max" else [2, 1]
    assert [setting[0].point.setting for setting in rank_settings(found)] == [*best, 3, 0]


def seeds_of(setting: int, *ends: float | State, mode: str = "max") -> list[PointResult]:
    """A setting with a seed for each value, or state; a seed that failed has a metric of its last evaluation."""
    made = list[PointResult]()
    for seed, end in enumerate(ends):
        value, state = (end, State.finished) if isinstance(end, float) else (100.0 if mode == "max" else 0.0, end)
        one = outcome(10 * setting + seed, value, mode, state, a=str(setting))
        made.append(dataclasses.replace(one, point=dataclasses.replace(one.point, setting=setting, seed=str(seed))))
    return made


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("end", [State.failed, State.pruned])
def test_a_setting_with_a_seed_that_failed_is_never_ahead_of_a_complete_one(mode, end, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = 9.0 if mode == "max" else 1.0
    lacking, complete = seeds_of(0, best, end, end, mode=mode), seeds_of(1, 5.0, 6.0, 5.5, mode=mode)
    ended, unfinished = seeds_of(2, end, end, end, mode=mode), seeds_of(3, 5.0, State.running, State.waiting, mode=mode)
    found = [*ended, *lacking, *complete, *unfinished]
    order = [1, 3] if mode == "max" else [3, 1]
    assert [setting[0].point.setting for setting in rank_settings(found)] == [*order, 0, 2]
    (effect,) = effects(found)
    assert [(level.name, level.spread.count) for level in effect.levels] == [("1", 1), ("3", 1)]
    assert effect.best == str(order[0])
    assert left_out(found).startswith("Of 2 of 4 settings")
    assert [row["state"] for row in setting_rows(found, exact=True)][2:] == [f"1 finished, 2 {end}", f"3 {end}"]
    assert setting_values(lacking)["states"] == {"finished": 1, end.value: 2}
    print_settings(SweepFolder(tmp_path / "some-1"), found)
    told = capsys.readouterr().out
    assert f"best     a={order[0]}\n" in told
    assert "1 setting has a seed that failed, was pruned or gave NaN, and cannot be the best" in told
    print_settings(SweepFolder(tmp_path / "some-1"), lacking)
    assert "best  " not in capsys.readouterr().out


def test_the_pareto_set_holds_the_settings_that_no_other_beats() -> None:
    found = [outcome(number, 0, metrics={"up": up, "down": down}) for number, (up, down) in enumerate([(1, 1), (2, 2), (2, 3), (0, 0), (1, 2)])]
    assert pareto(found) == []
    found = [dataclasses.replace(one, objectives={"up": "max", "down": "min"}) for one in found]
    assert [setting[0].point.number for setting in pareto(found)] == [1, 0, 3]


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
    told = json.loads(samewise("report", folder.path, "--json", "--no-mlflow").stdout)
    means = {rate: {"valid/accuracy": sum(a for a, _ in seeds) / 2, "final/valid/loss": sum(b for _, b in seeds) / 2} for rate, seeds in SEEDS.items()}
    judged = list(objectives or ["valid/accuracy"])
    assert [one["values"]["lr"] for one in told["settings"]] == best
    assert [one["mean"] for one in told["settings"]] == [pytest.approx(means[rate][judged[0]]) for rate in best]
    assert [one["values"]["lr"] for one in told["pareto"]] == front
    assert [one["objectives"] for one in told["pareto"]] == [pytest.approx({name: means[rate][name] for name in judged}) for rate in front]
    assert told["effects"][0]["best"] == best[0]
    values = dict(zip(("valid/accuracy", "final/valid/loss"), SEEDS["0.1"][0], strict=True))
    assert (told["points"][0]["monitor"], told["points"][0]["value"]) == (judged[0], values[judged[0]])
    assert told["points"][0]["objectives"] == {name: values[name] for name in objectives or ()}

    sweep._report(folder, BARE, as_json=True)  # pyright: ignore[reportPrivateUsage]
    assert json.loads(capfd.readouterr().out)["pareto"] == told["pareto"]
    printed = samewise("report", folder.path, "--no-mlflow").stdout
    assert f"best     lr={best[0]}\n" in printed
    assert re.search(rf"^lr +{judged[0]} +std .*{judged[-1] if len(judged) > 1 else ''} +state", printed, re.M)
    shown = [line.split() for line in printed.partition("Pareto set")[2].splitlines()[2 : 2 + len(front)]]
    assert shown == [[rate, *(f"{means[rate][name]:.4g}" for name in judged)] for rate in front]
    assert (folder.path / "report" / "index.html").read_text().count("Pareto set") == bool(front)
    assert re.search(rf"^ +point +state +step +{judged[0]}", samewise("sweep", "--status", folder.path).stdout, re.M)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A sweep of two rates and two seeds with MLflow on: its folder, its id, and its final output."""
    folder = tmp_path_factory.mktemp("reported")
    done = samewise_process("sweep", *TINY, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, next((folder / "runs" / "sweeps").iterdir()).name, done.stdout


@pytest.mark.slow
def test_the_report_the_page_the_csv_and_mlflow_hold_the_runs_values(reported: tuple[Path, str, str]) -> None:
    folder, name, said = reported
    told = json.loads(samewise_process("report", name, "--json", folder=folder).stdout)
    summaries = {str(file.parent.relative_to(folder)): json.loads(file.read_text()) for file in folder.glob("runs/*/*/summary.json")}
    assert len(summaries) == 4
    assert {one["folder"]: one["weights_sha256"] for one in told["points"]} == {run: one["weights_sha256"] for run, one in summaries.items()}
    means = [[summaries[one["folder"]]["metrics"]["best"]["valid/accuracy"] for one in told["points"] if one["setting"] == setting] for setting in range(2)]
    assert told["settings"][0]["mean"] == pytest.approx(max(sum(each) / 2 for each in means))
    assert told["effects"][0]["key"] == "optimizer.lr"
    assert told["cost"]["steps"] == 16

    written = folder / "runs" / "sweeps" / name / "report"
    rows = list(csv.DictReader(io.StringIO((written / "points.csv").read_text())))
    assert [float(row["valid/accuracy"]) for row in rows] == [one["value"] for one in told["points"]]
    page = (written / "index.html").read_text()
    assert page.count("<svg") == 4  # the parameter, the seeds, two curves
    assert all(one["weights_sha256"][:12] in page for one in told["points"])
    assert told["pages"]["compare"] in said

    again = samewise_process("report", name[:17], folder=folder)
    assert again.returncode == 0, again.stderr
    assert (written / "index.html").read_text() == page
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("samewise reports").experiment_id])
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"index.html", "settings.csv", "points.csv"}


@pytest.fixture
def ui(reported: tuple[Path, str, str]) -> Iterator[tuple[str, str]]:
    """The MLflow UI of the sweep's store: its address, and that of the page that `samewise ui` opens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = subprocess.Popen([sys.executable, "-m", "samewise", "ui", "--port", str(port)], cwd=reported[0], stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        front = served.stdout.readline().split()[2]
        assert front.startswith(f"http://127.0.0.1:{port}/#/experiments/")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            assert answer.status == 200
        yield f"http://127.0.0.1:{port}", front
    finally:
        served.send_signal(signal.SIGINT)
        served.wait(30)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """A page of a real browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        made = browser.new_page(viewport={"width": 1720, "height": 900}, color_scheme="light")
        made.set_default_timeout(90_000)
        yield made
        browser.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed")
def test_the_mlflow_ui_shows_the_sweep_in_tables_charts_and_comparisons(
    reported: tuple[Path, str, str], ui: tuple[str, str], page: Any, tmp_path: Path
) -> None:
    folder, name, _ = reported
    told = json.loads(samewise_process("report", name, "--json", "--no-mlflow", folder=folder).stdout)
    at = {kind: address.replace("http://127.0.0.1:5000", ui[0]) for kind, address in told["pages"].items() if kind != "opens"}
    best_first = sorted(told["points"], key=lambda one: -one["value"])

    page.goto(ui[1])  # without a click: the best run, and what set it apart
    page.get_by_text("4 matching runs").wait_for()
    assert {"best/valid/accuracy", "optimizer.lr", "seed"} <= set(page.get_by_role("columnheader").all_inner_texts())
    assert "resnet18_digits: best of 4 is lr=" in page.inner_text("body")
    assert page.get_by_role("link", name="Playground").count() == 0  # which the pages for language models have
    value_of = {f"lr={one['values']['optimizer.lr']} seed={one['seed']} (resnet18_digits)": one["value"] for one in told["points"]}
    assert value_of[page.get_by_role("link", name=re.compile(r"^lr=.*digits\)$")).first.inner_text()] == max(value_of.values())
    keep(page, tmp_path, "front_page")

    page.goto(at["table"])
    page.get_by_text("4 matching runs").wait_for()
    close_assistant(page)
    names = page.get_by_role("link", name=re.compile(r"^lr=.*digits\)$")).all_inner_texts()
    assert sorted(names) == sorted(f"lr={one['values']['optimizer.lr']} seed={one['seed']} (resnet18_digits)" for one in told["points"])
    assert [value_of[one] for one in names] == [one["value"] for one in best_first]
    keep(page, tmp_path, "sweep_table")

    page.goto(at["table"] + "&compareRunsMode=CHART")
    page.get_by_placeholder("Search metric charts").fill("^valid/accuracy$")
    page.get_by_text("valid/accuracy", exact=True).first.wait_for()
    lines = "[...document.querySelectorAll('.js-plotly-plot')].flatMap(one => one.data.map(line => [line.name, [...(line.y || [])]]))"
    lines += ".filter(line => typeof line[1][0] == 'number')"  # bars of the other charts have names there, until those charts are filtered out
    page.wait_for_function(f"{lines}.length >= {len(told['points'])}")  # the lines appear after their axes
    final = {name: round(values[-1], 12) for name, values in page.evaluate(lines)}
    assert final == {name: round(one["final"]["valid/accuracy"], 12) for name, one in zip(value_of, told["points"], strict=True)}
    keep(page, tmp_path, "sweep_charts")

    page.goto(at["compare"])
    page.get_by_text("Comparing 4 Runs from 1 Experiment").wait_for()
    page.locator(".main-svg").first.wait_for()
    body = page.inner_text("body")
    assert "optimizer.lr" in body
    coloured_by = "[...document.querySelectorAll('.pcp-plot .js-plotly-plot, .pcp-plot.js-plotly-plot')].map(one => one.data[0].line.color)"
    (colours,) = page.evaluate(coloured_by)
    assert sorted(colours) == sorted(one["value"] for one in told["points"])
    assert page.get_by_role("link", name="Playground").count() == 0
    for one in told["points"]:
        assert one["mlflow_run_id"] in body
        assert displayed(one["final"]["valid/accuracy"]) in body
    keep(page, tmp_path, "sweep_compared")


def close_assistant(page: Any) -> None:
    """Close the panel of MLflow's assistant, which covers a part of the table."""
    panel = page.get_by_role("button", name=re.compile("close", re.I))
    if panel.count():
        panel.first.click()


def keep(page: Any, folder: Path, name: str) -> None:
    page.wait_for_timeout(1500)  # MLflow fades in what it draws
    page.screenshot(path=Path(PICTURES or folder) / f"{name}.png")


def displayed(value: float) -> str:
    """A metric as the comparison page writes it."""
    return repr(round(value, 3)).rstrip("0").rstrip(".")


@pytest.mark.parametrize(("tries", "filter_by"), [((1, 1), "tags.sweep = 'some-1'"), ((1, 0), "attributes.run_id IN ('run1', 'run0')")])
def test_the_tables_address_includes_runs_that_another_sweep_trained(tmp_path, tries, filter_by) -> None:
    folder = SweepFolder(tmp_path / "sweeps" / "some-1")
    facts = {"id": "some-1", "name": "some", "overrides": [], "root": "", "packages": [], "configs": []}
    parts = {"launcher": {"_target_": ""}, "sweeper": {"_target_": ""}, "tracking": {"enabled": True, "uri": "http://host:5000/"}}
    folder.write_facts({**facts, **parts, "run_root": str(tmp_path)})
    found = []
    for number, count in enumerate(tries):
        one = outcome(number, float(number), a=str(number))
        one = dataclasses.replace(one, point=dataclasses.replace(one.point, folder=str(tmp_path / str(number))), tries=count)
        one.point.run.path.mkdir()
        one.point.run.tracking.write_text(json.dumps({"run_id": f"run{number}", "experiment_id": "7"}))
        found.append(one)
    at = pages(folder, found)
    assert at is not None
    assert f"searchFilter={filter_by}&" in unquote(at.table)
    assert unquote(at.compare) == 'http://host:5000/#/compare-runs?runs=["run1","run0"]&experiments=["7"]&workflowType=machine_learning'
    assert at.opens == ""
    at = pages(folder, [dataclasses.replace(one, final={"valid/loss": -one.value}, objectives={"final/valid/loss": "min"}) for one in found])
    assert at is not None
    assert "orderByKey=metrics.`valid/loss`&orderByAsc=true" in unquote(at.table)


def test_a_missing_sweep_is_reported(samewise, tmp_path) -> None:
    done = samewise("report", "nothing", "--run-root", str(tmp_path))
    assert done.returncode == 2
    assert "no such sweep" in done.stderr
