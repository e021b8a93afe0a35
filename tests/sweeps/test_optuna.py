"""Optuna's sweeper: it learns, loses no trial however it ends, and stops what promises little from inside training."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.errors import ConfigError
from samewise.runner.project import Project
from samewise.runner.sweep.folder import Point, SweepFolder
from samewise.runner.sweep.space import read
from samewise.runner.sweepers.base import REPORTER, Result, Setting
from samewise.runner.sweepers.optuna import Optuna
from samewise.runner.sweepers.optuna_study import FILE, optuna, storage
from samewise.runner.sweepers.random import Random

BARE = Project(Path(__file__).parent)
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1.0))", "optimizer.momentum=interval(0.0,1.0)")
MIXED = ("batch_size=int(interval(16,64))", "optimizer=sgd,adamw", "+optimizer.eps=tag(log,interval(1e-8,1e-4))")
COMPLETE, PRUNED, FAIL, RUNNING = (getattr(optuna.trial.TrialState, name) for name in ("COMPLETE", "PRUNED", "FAIL", "RUNNING"))


def opened(folder: Path, *given: str, **arguments: Any) -> Optuna:
    sweeper = Optuna(**arguments)
    folder.mkdir(exist_ok=True)
    sweeper.open(read(given or SPACE, project=BARE), folder, monitor="valid/loss", mode="min")
    return sweeper


def bowl(values: dict[str, str]) -> float:
    """Least, 0, at lr=0.01 and momentum=0.9."""
    return (math.log10(float(values["optimizer.lr"])) + 2) ** 2 + 10 * (float(values["optimizer.momentum"]) - 0.9) ** 2


def trials(folder: Path) -> list[Any]:
    return optuna.load_study(study_name=folder.name, storage=storage(folder)).trials


def write_down(folder: Path, *settings: Setting) -> None:
    """As the engine does before it starts a job."""
    blank = {"name": "", "fingerprint": "", "folder": "", "monitor": "valid/loss", "mode": "min", "needs": {}, "overrides": [], "seed": None}
    SweepFolder(folder).add_points([Point(number=one.number, setting=one.number, values=one.values, **blank) for one in settings])


def finish(sweeper: Optuna, objective: Callable[[Any], float] = bowl) -> list[Setting]:
    found = list[Setting]()
    while (setting := sweeper.ask()) is not None:
        found.append(setting)
        sweeper.tell(setting, Result("finished", {"valid/loss": objective(setting.values)}))
    return found


# -- what it suggests


@pytest.mark.slow  # ten studies
def test_it_is_better_than_random_search_by_the_median_of_ten_seeds(tmp_path: Path) -> None:
    space = read(SPACE, project=BARE)
    learned, drawn = list[float](), list[float]()
    for seed in range(10):
        learned.append(min(bowl(one.values) for one in finish(opened(tmp_path / str(seed), trials=30, seed=seed))))
        blind = Random(trials=30, seed=seed)
        blind.open(space, tmp_path, monitor="valid/loss", mode="min")
        drawn.append(min(bowl(one.values) for one in blind.settings()))
    assert statistics.median(learned) < statistics.median(drawn) / 2


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("tpe", {"n_startup_trials": 3}),
        pytest.param("gp", {"n_startup_trials": 3}, marks=pytest.mark.slow),  # torch
        ("cmaes", {}),
        ("nsgaii", {"population_size": 4}),
        ("random", {}),
    ],
)
def test_each_sampler_suggests_what_overrides_can_write(tmp_path: Path, sampler: str, options: dict[str, Any]) -> None:
    for one in finish(opened(tmp_path, *MIXED, sampler=sampler, sampler_options=options, trials=6), lambda values: float(values["batch_size"])):
        assert list(one.values) == ["batch_size", "optimizer", "+optimizer.eps"]
        assert 16 <= int(one.values["batch_size"]) <= 64
        assert one.values["optimizer"] in ("sgd", "adamw")
        assert 1e-8 <= float(one.values["+optimizer.eps"]) <= 1e-4


def test_the_same_seed_suggests_the_same_also_when_it_is_left_in_between(tmp_path: Path) -> None:
    whole = finish(opened(tmp_path / "whole", trials=14, seed=3))
    parts = list[Setting]()
    for number in (2, 11, 14):
        parts += finish(opened(tmp_path / "parts", trials=number, seed=3))
    assert parts == whole
    assert len({tuple(one.values.values()) for one in whole}) == 14
    assert finish(opened(tmp_path / "other", trials=14, seed=4)) != whole


def test_it_is_asked_before_others_have_ended(tmp_path: Path) -> None:
    sweeper = opened(tmp_path, trials=12)
    running = [sweeper.ask() for _ in range(3)]
    for _ in range(9):
        sweeper.tell(running.pop(1), Result("finished", {"valid/loss": 1.0}))
        running.append(sweeper.ask())
    assert [one.number for one in running if one] == [0, 10, 11]
    assert sweeper.ask() is None


def test_several_objectives_give_a_front(tmp_path: Path) -> None:
    objectives = {"valid/loss": "min", "final/valid/accuracy": "max"}
    sweeper = opened(tmp_path, sampler="nsgaii", objectives=objectives, trials=8)
    while (setting := sweeper.ask()) is not None:
        momentum = float(setting.values["optimizer.momentum"])
        sweeper.tell(setting, Result("finished", {"valid/loss": momentum, "final/valid/accuracy": momentum**2, "valid/other": 0.0}))
    study = optuna.load_study(study_name=tmp_path.name, storage=storage(tmp_path))
    assert study.metric_names == ["final/valid/accuracy", "valid/loss"]
    assert len(study.best_trials) == 8, "more of one is more of the other: every trial is on the front"


# -- what it remembers


def test_a_trial_that_was_asked_for_and_not_written_down_is_given_out_again(tmp_path: Path) -> None:
    first = opened(tmp_path, trials=5)
    asked = [first.ask(), first.ask()]
    write_down(tmp_path, asked[0])
    second = opened(tmp_path, trials=5)  # the first was killed between asking and writing
    again = second.ask()
    assert again == asked[1]
    assert [one.number for one in finish(second)] == [2, 3, 4]
    assert [one.state for one in trials(tmp_path)] == [RUNNING, RUNNING, COMPLETE, COMPLETE, COMPLETE]


def test_a_trial_that_was_made_and_not_yet_given_all_its_values_gets_the_rest(tmp_path: Path) -> None:
    opened(tmp_path, trials=5).ask()
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b"optimizer.momentum" in line)
    kept = json.loads(next(line for line in lines if b"optimizer.lr" in line))["param_value_internal"]
    (tmp_path / FILE).write_bytes(b"".join(lines[:last]) + lines[last][:20])  # killed in the middle of writing a line
    again = opened(tmp_path, trials=5).ask()
    assert again is not None
    assert again.number == 0
    assert float(again.values["optimizer.lr"]) == kept
    assert 0 <= float(again.values["optimizer.momentum"]) <= 1
    assert len(trials(tmp_path)) == 1


def test_what_has_ended_is_told_once_and_a_failure_that_was_mended_counts(tmp_path: Path) -> None:
    sweeper = opened(tmp_path, trials=3)
    asked = [sweeper.ask() for _ in range(3)]
    write_down(tmp_path, *asked)
    for setting, state in zip(asked, ("finished", "failed", "pruned"), strict=True):
        sweeper.tell(setting, Result(state, {"valid/loss": 1.0} if state == "finished" else {}))
    assert [one.state for one in trials(tmp_path)] == [COMPLETE, FAIL, PRUNED]
    for _ in range(2):
        later = opened(tmp_path, trials=4)  # --retry-failed
        for setting in asked:
            later.tell(setting, Result("finished", {"valid/loss": 2.0}))
    states = [(one.state, one.value) for one in trials(tmp_path)]
    assert states == [(COMPLETE, 1.0), (FAIL, None), (PRUNED, None), (COMPLETE, 2.0)]
    assert trials(tmp_path)[3].params == trials(tmp_path)[1].params
    assert later.ask() is not None, "the repeat is no trial of its own"
    assert later.ask() is None


def test_a_value_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    sweeper = opened(tmp_path, trials=1)
    sweeper.tell(sweeper.ask(), Result("finished", {"valid/loss": math.nan}))
    assert trials(tmp_path)[0].state is FAIL


# -- what it refuses


@pytest.mark.parametrize(
    ("arguments", "path", "said"),
    [
        ({"sampler": "tpi"}, "sampler", "did you mean 'tpe'"),
        ({"pruner": "medain"}, "pruner", "did you mean 'median'"),
        ({"sampler_options": {"n_startup_trial": 3}}, "sampler_options.n_startup_trial", "did you mean 'n_startup_trials'"),
        ({"pruner": "median", "pruner_options": {"n_startup": 3}}, "pruner_options.n_startup", "n_startup_trials"),
        ({"trials": 0}, "trials", "at least 1"),
        ({"objectives": {"valid/loss": "less"}}, "objectives.valid/loss", "min or max"),
        ({"objectives": {"a": "min", "b": "max"}, "pruner": "median"}, "pruner", "cannot be pruned"),
        ({"objectives": {"a": "min", "b": "max"}, "sampler": "cmaes"}, "sampler", "one objective"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments: dict[str, Any], path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Optuna(**arguments)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in str(problem)


def test_a_space_that_it_cannot_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing varies"):
        opened(tmp_path, "seed=range(3)")
    with pytest.raises(ConfigError, match="two intervals"):
        opened(tmp_path, "optimizer.lr=interval(0.1,1.0)", "optimizer.momentum=0.0,0.9", sampler="cmaes")


def test_an_objective_that_the_runs_do_not_have_is_named(tmp_path: Path) -> None:
    sweeper = opened(tmp_path, objectives={"valid/los": "min"})
    with pytest.raises(ConfigError, match="did you mean 'valid/loss'"):
        sweeper.tell(sweeper.ask(), Result("finished", {"valid/loss": 1.0}))


def test_only_the_first_seed_reports_and_only_where_trials_are_pruned(tmp_path: Path) -> None:
    assert opened(tmp_path).variables(Setting(0, {}), 0) == {}
    pruning = opened(tmp_path, pruner="median")
    assert set(pruning.variables(Setting(0, {}), 0)) == {REPORTER}
    assert pruning.variables(Setting(0, {}), 1) == {}


# -- whole sweeps, of a project whose training takes milliseconds

PACKAGE = """
import math
import torch
from torch import nn
from samewise.runner.interfaces import Loss, Recipe, Scores

class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(1)}

class Bowl(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.floor = (a - 2) ** 2 + (math.log10(b) + 2) ** 2
    def forward(self, x):
        return x * (self.floor + self.weight**2)

class Last(Scores):
    def add(self, measured):
        self.value = measured
    def compute(self):
        return {"value": self.value}

class Descend(Recipe):
    def loss(self, model, batch, phase):
        total = model(batch["x"]).sum()
        return Loss(total, len(batch["x"]))
    def measure(self, model, batch):
        return float(model(batch["x"]).mean())
    def scores(self, dataset):
        return Last()
"""
CONFIGS = {
    "recipe": "# Down the bowl\n_target_: bowls.Descend\n",
    "model": "# A bowl\n_target_: bowls.Bowl\na: 0.0\nb: 1.0\n",
    "dataset": "# Ones\ntrain: {_target_: bowls.Ones}\nvalid: {_target_: bowls.Ones}\n",
    "experiment": """# @package _global_
# A bowl whose bottom depends on two settings
defaults:
  - override /recipe: bowl
  - override /model: bowl
  - override /dataset: bowl
  - override /transforms: none
  - override /callbacks: none
  - override /tracking: none
  - _self_
max_epochs: 8
batch_size: 8
optimizer: {lr: 0.1}
evaluate: {monitor: valid/value}
checkpoint: {every_epochs: null, keep_best: 0}
trace: {every_steps: 0, layers_every_steps: 0}
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\nconfigs = "configs"\n')
    (tmp_path / "bowls").mkdir()
    (tmp_path / "bowls" / "__init__.py").write_text(PACKAGE)
    for group, text in CONFIGS.items():
        (tmp_path / "configs" / group).mkdir(parents=True)
        (tmp_path / "configs" / group / "bowl.yaml").write_text(text)
    return tmp_path


def command(*overrides: str) -> list[str]:
    given = ["--package", "bowls", "experiment=bowl", "model.a=interval(-5.0,5.0)", "model.b=tag(log,interval(1e-4,1.0))", *overrides]
    return [sys.executable, "-m", "samewise", "sweep", "--json", *given]


def sweep(project: Path, *overrides: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(command(*overrides), cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def killed_at(project: Path, points: int, *overrides: str) -> None:
    """Run the sweep, and kill the process that runs it as soon as so many points are written down."""
    process = subprocess.Popen(command(*overrides), cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 500
    while process.poll() is None and _points(project) < points:
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


def _points(project: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in project.glob("runs/sweeps/*/points.jsonl"))


def only_sweep(project: Path) -> SweepFolder:
    (folder,) = (project / "runs" / "sweeps").iterdir()
    return SweepFolder(folder)


PRUNING = ("sweeper=tpe", "sweeper.pruner=median", "sweeper.pruner_options={n_startup_trials: 2}")


@pytest.mark.slow  # a sweep of four trainings, each a process
@pytest.mark.timeout(300)
def test_a_pruned_run_has_saved_is_marked_and_can_be_trained_to_its_end(project: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said = sweep(project, *PRUNING, "sweeper.seed=1", "sweeper.trials=4", "launcher.jobs=1")
    folder = only_sweep(project)
    by_state = {state: [one for one in said["points"] if one["state"] == state] for state in ("finished", "pruned")}
    assert len(by_state["finished"]) + len(by_state["pruned"]) == 4
    pruned = by_state["pruned"][0]
    run = project / pruned["folder"]
    reason = folder.word(pruned["number"])["pruned"]
    assert pruned["reason"] == reason
    assert "valid/value" in reason
    assert "by median" in reason
    assert pruned["steps"] < 8
    assert not (run / "summary.json").exists()
    assert any((run / "checkpoints").iterdir())
    assert json.loads((run / "tags.json").read_text()) == {"sweep.pruned": reason}
    study = trials(folder.path)
    assert [one.number for one in study if one.state is PRUNED] == [one["number"] for one in by_state["pruned"]]
    assert study[pruned["number"]].intermediate_values.keys() == set(range(1, pruned["steps"] + 1))
    assert all(len(study[one["number"]].intermediate_values) == 8 for one in by_state["finished"])

    monkeypatch.chdir(project)
    overrides = ["--package", "bowls", *folder.points()[pruned["number"]].overrides]
    by_hand, afresh = (samewise("train", "--json", *overrides, *other) for other in ([], ["run_root=afresh"]))
    ends = [json.loads(done.stdout.splitlines()[-1]) for done in (by_hand, afresh)]
    assert [one["steps"] for one in ends] == [8, 8]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["fingerprint"] == pruned["fingerprint"]


@pytest.mark.slow  # 40 trainings, and three processes that run them
@pytest.mark.timeout(900)
def test_forty_trials_on_three_workers_whose_controller_is_killed_twice(project: Path) -> None:
    asked = (*PRUNING, "sweeper.trials=40", "launcher.jobs=3")
    killed_at(project, 9, *asked)
    killed_at(project, 24, *asked)
    said = sweep(project, *asked)
    folder, points = only_sweep(project), only_sweep(project).points()
    study = trials(folder.path)
    assert [one.number for one in study] == [point.setting for point in points] == [point.number for point in points] == list(range(40))
    assert len({point.fingerprint for point in points}) == 40
    for trial, point, told in zip(study, points, said["points"], strict=True):
        assert {key: str(value) for key, value in trial.params.items()} == point.values
        assert told["state"] == {COMPLETE: "finished", PRUNED: "pruned"}[trial.state]
        assert trial.state is PRUNED or trial.value == told["value"]
        assert bool(folder.word(point.number).get("pruned")) == (trial.state is PRUNED)
    assert 0 < sum(one.state is PRUNED for one in study) < 40
    tries = [folder.word(point.number)["tries"] for point in points]
    assert sum(tries) - 40 <= 6, "a kill costs another start to those that ran, and to no others"
    assert sweep(project, *asked) == said, "nothing is run again"
    assert [folder.word(point.number)["tries"] for point in points] == tries
    assert len(trials(folder.path)) == 40


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_has_all_its_seeds_and_a_setting_that_cannot_be_is_a_failed_trial(project: Path) -> None:
    given = (*PRUNING, "sweeper.seed=2", "sweeper.trials=5", "batch_size=8,0", "seed=range(2)", "launcher.jobs=1")
    said = sweep(project, *given)
    folder = only_sweep(project)
    settings = dict[int, list[Any]]()
    for one in said["points"]:
        settings.setdefault(one["setting"], []).append(one)
    study = trials(folder.path)
    assert len(study) == 5
    for trial in study:
        points = settings.get(trial.number, [])
        assert [one["seed"] for one in points] == ([] if trial.params["batch_size"] == "0" else ["0", "1"])
        if not points:
            assert trial.state is FAIL
        elif trial.state is PRUNED:
            assert [one["state"] for one in points] == ["pruned", "pruned"]
            assert folder.word(points[1]["number"]) == {"pruned": "as it was with another seed"}
        else:
            assert trial.value == statistics.fmean(one["value"] for one in points)
    assert {one.state for one in study} == {COMPLETE, PRUNED, FAIL}
