"""`samewise sweep` on this machine, with real processes: the same bits as alone, nothing twice, and nothing lost when it is killed."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from samewise_forked import Forked, run

import samewise as samewise_in_python
from samewise.runner.config.project import find
from samewise.runner.errors import INTERRUPTED, ConfigError
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.launchers.job import main as run_job
from samewise.runner.processes.this_process import on_signals
from samewise.runner.records import locks
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweeps import running
from samewise.runner.sweeps.results import State, point_results

TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "max_steps=4")
SWEEP = (*TINY, "optimizer.lr=1e30,0.05", "seed=range(2)", "launcher.jobs=2")


def sweep(*given: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("sweep", *given, folder=folder)


@pytest.fixture
def points(samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], list[dict[str, Any]]]:
    """What `--status` reports for each point of a sweep in a folder."""

    def status(folder: Path, name: str) -> list[dict[str, Any]]:
        monkeypatch.chdir(folder)
        done = samewise("sweep", name, "--status", "--json", code=0)
        return json.loads(done.stdout)["points"]

    return status


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], str]:
    """Two learning rates, one of which is impossible, with two seeds each."""
    folder = tmp_path_factory.mktemp("swept")
    done = sweep(*SWEEP, folder=folder)
    return folder, done, next((folder / "runs" / "sweeps").iterdir()).name


@pytest.mark.slow
def test_a_failed_job_does_not_stop_the_rest_and_is_reported_at_once(swept, points) -> None:
    folder, done, name = swept
    assert done.returncode == 1
    found = points(folder, name)
    assert [one["state"] for one in found] == ["failed", "failed", "finished", "finished"]
    assert all("not finite" in one["reason"] for one in found[:2])
    lines = done.stderr.splitlines()
    told = next(number for number, line in enumerate(lines) if "lr=1e+30 seed=0" in line and "failed" in line)
    assert told < next(number for number, line in enumerate(lines) if "finished" in line)  # not in a list at the end
    assert "not finite" in lines[told]
    assert "lr=1e+30 seed=0" in done.stdout


@pytest.mark.slow
def test_a_point_has_the_same_weights_as_its_run_alone(swept, points, samewise: Callable[..., Any], tmp_path: Path) -> None:
    folder, _, name = swept
    for one in points(folder, name)[2:]:
        alone = samewise("train", *TINY, "optimizer.lr=0.05", f"seed={one['seed']}", f"run_root={tmp_path}", "--json")
        assert one["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]


@pytest.mark.slow
def test_the_finished_runs_of_a_sweep_are_evaluated_once_and_the_results_recorded(swept, points, samewise, tmp_path) -> None:
    folder, _, name = swept
    finished = [one["folder"] for one in points(folder, name)[2:]]
    evaluate = ["eval", name, "--split", "train", "--csv", tmp_path / "train.csv"]
    done = samewise(*evaluate, "--json", code=0)
    told = json.loads(done.stdout)["points"]
    assert [one["state"] for one in told] == ["failed", "failed", "finished", "finished"]
    for place, one in zip(finished, told[2:], strict=True):
        assert one["metrics"] == json.loads(samewise("eval", place, "--split", "train", "--json").stdout)["metrics"]
    with open(tmp_path / "train.csv") as table:
        assert [row["train/accuracy"] for row in csv.DictReader(table)][2:] == [repr(one["metrics"]["train/accuracy"]) for one in told[2:]]
    best = max(told[2:], key=lambda one: one["metrics"]["train/loss"])
    assert json.loads(samewise("runs", "--sort", "train/loss", "--json").stdout)[0]["folder"] == best["folder"]
    again = json.loads(samewise(*evaluate, "--json").stdout)["points"]
    assert [one.get("time_ms") for one in again] == [one.get("time_ms") for one in told], "it was not evaluated again"
    other = json.loads(samewise(*evaluate, "--json", "evaluate.batch_size=3", "recipe.label_smoothing=0.1").stdout)["points"]
    assert other[2]["metrics"] != told[2]["metrics"]
    assert json.loads(samewise(*evaluate, "--json").stdout)["points"] == again, "what overrides gave is not recorded"


@pytest.mark.slow
def test_a_sweep_in_python_repeats_nothing_and_a_retry_runs_what_failed(swept, points, capfd, monkeypatch) -> None:
    folder, _, name = swept
    monkeypatch.chdir(folder)
    table = samewise_in_python.sweep(*SWEEP)
    assert "0 to run" in capfd.readouterr().err
    known = points(folder, name)
    assert [one["tries"] for one in known] == [1, 1, 1, 1]
    assert table["weights_sha256"].tolist() == [one["weights_sha256"] for one in known]
    assert table["optimizer.lr"].tolist() == [1e30, 1e30, 0.05, 0.05]
    assert table["seed"].tolist() == [0, 1, 0, 1]
    assert table["state"].tolist() == ["failed", "failed", "finished", "finished"]
    assert table["valid/accuracy"].tolist()[2:] == [one["value"] for one in known[2:]]
    with pytest.raises(ConfigError, match="no values to try"):
        samewise_in_python.sweep()
    retried = sweep(name, "--retry-failed", folder=folder)
    assert "2 to run" in retried.stderr
    assert [one["tries"] for one in points(folder, name)] == [2, 2, 1, 1]


def test_points_are_listed_without_running_any(samewise: Callable[..., Any], tmp_path: Path) -> None:
    done = samewise("sweep", "--list", *TINY, "optimizer.lr=0.1,0.2", f"run_root={tmp_path}", code=0)
    assert "lr=0.2" in done.stdout
    told = json.loads(samewise("sweep", "--list", "--json", *TINY, "optimizer.lr=0.1,0.2", f"run_root={tmp_path}").stdout)
    assert [(one["point"], one["number"], one["seed"], one["values"]) for one in told["points"]] == [
        (1, 0, None, {"optimizer.lr": "0.1"}),
        (2, 1, None, {"optimizer.lr": "0.2"}),
    ]
    for one, line in zip(told["points"], done.stdout.splitlines(), strict=True):
        assert line.split()[1] == one["fingerprint"][:12] == Path(one["folder"]).name
    assert list(tmp_path.iterdir()) == []


def test_points_whose_jobs_are_refused_are_not_submitted(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        says = "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1" if name == "sbatch" else "exit 0"
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    refused = samewise("sweep", *TINY, "optimizer.lr=0.1,0.2", f"run_root={tmp_path / 'runs'}", "launcher=slurm", "launcher.partition=gpu", code=2)
    assert "launcher.partition: SLURM refused the jobs: Batch job submission failed: Invalid partition name specified" in refused.stderr
    assert "launcher.partition is gpu" in refused.stderr
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    told = samewise("sweep", "--status", folder)
    assert [line.split()[-3:] for line in told.stdout.splitlines() if "lr=" in line] == [["waiting", "not", "submitted"]] * 2
    assert f"`samewise sweep {folder}` submits these points" in told.stdout
    assert "Invalid partition name" in told.stdout
    assert "2 waiting (not submitted: launcher.partition: SLURM refused" in samewise("sweep", "--status", "--run-root", tmp_path / "runs").stdout


class InThisProcess(Launcher):
    """Runs each job at once; during the first, another process holds its run's lock."""

    poll_s = 0

    def open(self, sweep: SweepFolder) -> None:
        self._sweep, self.codes = sweep, list[int]()

    def room(self, running: Sequence[Job]) -> int:
        return 1 - len(running)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            run = self._sweep.points()[job.number].run
            run.path.mkdir(parents=True, exist_ok=True)
            with nullcontext() if self.codes else locks.hold(run.lock), on_signals((signal.SIGTERM, signal.SIGUSR1), signal.SIG_IGN):
                self.codes.append(run_job(job.sweep, job.number))

    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        return {number: JobState(Standing.ended) for number in numbers}

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        pass


def test_a_job_whose_run_another_process_begins_first_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("samewise.runner.launchers.job._PATIENCE_S", 0)
    ready = running.prepare_sweep([*TINY, "optimizer.lr=0.1,0.2"], find(tmp_path), run_root=tmp_path, trust=False, wait=True)
    launcher = InThisProcess()
    assert running.run_sweep(dataclasses.replace(ready, launcher=launcher), wait=True, retry_failed=False)
    assert launcher.codes == [INTERRUPTED, 0, 0]
    assert [(one.state, one.tries) for one in point_results(ready.folder)] == [(State.finished, 2), (State.finished, 1)]


def test_several_values_make_a_sweep_of_train(samewise: Callable[..., Any], tmp_path: Path) -> None:
    done = samewise("train", *TINY, "optimizer.lr=0.1,-2", f"run_root={tmp_path}", code=2)
    assert "optimizer.lr" in done.stderr
    assert "1 of 2 points" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stopped_sweep_resumes_to_the_same_bits(how: signal.Signals, points, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    given = (*TINY[:-1], "max_steps=24", "checkpoint.every_steps=5", "seed=range(3)", "launcher.jobs=2")
    process = Forked("sweep", *given, said=tmp_path / "said", folder=tmp_path)
    until = time.monotonic() + 120
    while not any(file.read_bytes().count(b"\n") > 8 for file in tmp_path.glob("runs/*/*/trace.jsonl")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    process.send(how)
    assert process.wait(100) == (3 if how is signal.SIGTERM else -signal.SIGKILL), process.errors
    name = next((tmp_path / "runs" / "sweeps").iterdir()).name
    before = points(tmp_path, name)
    assert any(one["state"] != "finished" for one in before)
    assert sweep(*given, folder=tmp_path).returncode == 0
    for one in points(tmp_path, name):
        assert one["state"] == "finished"
        alone = samewise("train", *given[:-2], f"seed={one['seed']}", f"run_root={tmp_path / 'alone'}", "--json")
        assert one["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]


@pytest.mark.slow
def test_cancelling_makes_the_jobs_save(points, tmp_path: Path) -> None:
    given = (*TINY[:-1], "max_steps=4000", "max_epochs=4000", "seed=range(3)", "launcher.jobs=1")
    process = Forked("sweep", *given, said=tmp_path / "said", folder=tmp_path)
    until = time.monotonic() + 60
    while not any(file.read_bytes().count(b"\n") > 3 for file in tmp_path.glob("runs/*/*/trace.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)
    name = next((tmp_path / "runs" / "sweeps").iterdir()).name
    held = sweep(*given, folder=tmp_path)
    assert held.returncode == 2
    assert "is being run by process" in held.stderr
    assert sweep("--cancel", name, folder=tmp_path).returncode == 0
    assert process.wait(60) == 3
    found = points(tmp_path, name)
    assert [one["state"] for one in found] == ["interrupted", "waiting", "waiting"]
    assert list(Path(tmp_path, found[0]["folder"], "checkpoints").glob("*"))
    assert os.listdir(tmp_path / "runs" / "sweeps") == [name]
