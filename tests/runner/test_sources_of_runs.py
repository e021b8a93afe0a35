"""What a run does if the code has changed since it was started, or is edited meanwhile."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_runner_lab_of_code import EDITS, EXPERIMENT, FILES, TINY, at_work_in, edit, forget, runs, trainer, write

USED = [name for name in sorted(FILES) if name not in ("pyproject.toml", "lab_of_code/unused.py")]


def state(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    with at_work_in(tmp_path / "project", monkeypatch) as project:
        yield project


@pytest.fixture
def train(samewise, lab, tmp_path):
    return trainer(samewise, tmp_path / "runs")


def test_changed_code_starts_another_run_and_differences_are_named_with_both_folders(train, samewise, lab, tmp_path):
    done = train()
    assert done.returncode == 0, done.stderr
    assert "the code has changed" not in done.stderr
    (first,) = runs(lab)
    recorded = json.loads((first / "sources.json").read_text())["files"]
    assert sorted(recorded) == USED
    assert "Net.forward" in recorded["lab_of_code/net.py"]
    before = state(first)
    texts = {file: edit(lab / file, old, new) for file, old, new, _ in (EDITS["layer"], EDITS["helper two imports away"], EDITS["data set"])}
    done = train()
    assert done.returncode == 0, done.stderr
    assert "already finished" not in done.stdout
    _, second = runs(lab)
    for told in ("lab_of_code/parts/layers.py has changed: head", "lab_of_code/data.py has changed: Marks.__getitem__", "helper_of_lab_of_code.py has changed"):
        assert told in done.stderr
    assert "net.py" not in done.stderr
    assert f"before: {first}" in done.stderr
    assert f"now:    {second}" in done.stderr
    assert state(first) == before
    done = train()
    assert "already finished" in done.stdout
    assert "the code has changed" not in done.stderr
    for file, text in texts.items():
        write(lab / file, text)
    assert f" {first}\n" in train().stdout

    done = samewise("diff", first, second)
    named = "helper_of_lab_of_code.py", "lab_of_code/data.py", "lab_of_code/parts/layers.py"
    assert [line.split()[0] for line in done.stdout.splitlines() if "has changed" in line] == list(named)
    forget()
    done = samewise("verify", second)
    assert "the code differs: lab_of_code/parts/layers.py has changed: head" in done.stdout
    assert "the bits may differ: the code differs" in done.stderr
    assert "the same bits are expected" not in done.stderr
    forget()
    assert "layers.py has changed: head; the run was trained with another version" in samewise("eval", second).stderr


@pytest.mark.slow
def test_an_unfinished_run_is_left_alone_if_the_code_has_changed(train, lab):
    assert train().returncode == 0
    (first,) = runs(lab)
    weights = json.loads((first / "summary.json").read_text())["weights_sha256"]
    (first / "summary.json").unlink()
    shutil.rmtree(first / "checkpoints" / "step-00000004")
    before = state(first)
    text = edit(lab / "lab_of_code" / "parts" / "layers.py", "ReLU", "GELU")
    done = train()
    assert done.returncode == 0
    assert f"layers.py has changed: head\n    before: {first}" in done.stderr
    assert state(first) == before
    write(lab / "lab_of_code" / "parts" / "layers.py", text)
    assert train().returncode == 0
    assert json.loads((first / "summary.json").read_text())["weights_sha256"] == weights


def test_editing_code_while_a_run_starts_ends_it_before_training(train, lab):
    edit(lab / "lab_of_code" / "net.py", "self.head =", f"open({str(lab / 'helper_of_lab_of_code.py')!r}, 'a').write('\\nWIDTH = 16\\n')\n        self.head =")
    done = train()
    assert done.returncode == 2
    assert "the code was edited while the run was starting: helper_of_lab_of_code.py has changed" in done.stderr
    assert not [file for folder in runs(lab) for file in folder.rglob("state.pt")]


def test_a_restarted_rank_does_not_continue_with_changed_code(lab, tmp_path, monkeypatch):
    from samewise.runner.config import compose, project
    from samewise.runner.errors import ConfigError
    from samewise.runner.training.launch import _adopt_config

    experiment = compose.compose([*EXPERIMENT, f"run_root={tmp_path}/runs"], project=project.find(lab))
    said = {"fingerprint": experiment.fingerprint, "folder": str(experiment.folder.path)}
    experiment.folder.create()
    experiment.folder.sources.write_text(json.dumps({"files": experiment.code.files}))
    monkeypatch.setenv("RANK", "1")
    assert _adopt_config(dataclasses.replace(experiment), said).folder == experiment.folder
    edit(lab / "lab_of_code" / "parts" / "layers.py", "ReLU", "GELU")
    with pytest.raises(ConfigError, match=re.escape("lab_of_code/parts/layers.py has changed: head")):
        _adopt_config(dataclasses.replace(experiment), said)


@pytest.mark.slow
def test_a_process_that_imported_older_code_than_the_files_trains_nothing(train, samewise, lab):
    assert train().returncode == 0
    edit(lab / "lab_of_code" / "parts" / "layers.py", "ReLU", "GELU")
    command = ["train", *EXPERIMENT, f"run_root={lab.parent}/runs"]
    done = samewise(*command)
    assert done.returncode == 2
    assert "lab_of_code/parts/layers.py: was edited after this process had imported it" in done.stderr
    assert len(runs(lab)) == 1
    importlib.reload(sys.modules["lab_of_code.parts.layers"])
    assert samewise(*command).returncode == 0
    assert len(runs(lab)) == 2


@pytest.mark.slow
def test_train_fresh_trains_again_beside_earlier_runs_and_the_latest_counts(train, samewise, lab, tmp_path):
    assert train("--fresh").returncode == 0
    (first,) = runs(lab)
    before = state(first)
    done = train("--fresh")
    assert done.returncode == 0
    assert "already finished" not in done.stdout
    assert "the code has changed" not in done.stderr
    second = first.with_name(f"{first.name}-2")
    assert state(first) == before
    digests = [json.loads((folder / "summary.json").read_text())["weights_sha256"] for folder in (first, second)]
    assert digests[0] == digests[1]
    assert f" {second}\n" in train().stdout
    (second / "summary.json").unlink()
    shutil.rmtree(second / "checkpoints" / "step-00000004")
    assert f" {second}\n" in train().stdout
    assert runs(lab) == [first, second]
    listed = samewise("runs", "--run-root", tmp_path / "runs").stdout
    assert f"{first.name[:8]}-2" in listed
    said = [samewise("digest", name, "--run-root", tmp_path / "runs").returncode for name in (first.name[:4], f"{first.name[:4]}-2", f"{first.name[:4]}-3")]
    assert said == [0, 0, 2]
    done = samewise("train", *TINY, "seed=0,1", "--fresh", f"run_root={tmp_path}/runs")
    assert done.returncode == 2
    assert "--fresh" in done.stderr


def test_a_finished_result_is_given_without_importing_torch_or_the_code(train, lab, tmp_path):
    assert train().returncode == 0
    command = [sys.executable, "-X", "importtime", "-m", "samewise", "train", *EXPERIMENT, f"run_root={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "already finished" in done.stdout
    imported = {name.split(".")[0] for name in re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)}
    assert "samewise" in imported
    assert not imported & {"torch", "mlflow", "lab_of_code"}


@pytest.mark.slow
def test_a_sweep_with_changed_code_is_another_sweep_and_old_jobs_do_not_train_it(train, samewise, lab, tmp_path):
    from samewise.runner.launchers import job
    from samewise.runner.launchers.snapshot import snapshot
    from samewise.runner.records.sweep_folder import SweepFolder

    for seed in (0, 1):
        assert train(f"seed={seed}").returncode == 0
    sweep = ["sweep", *EXPERIMENT, f"run_root={tmp_path}/runs", "seed=0,1"]
    forget()
    assert "2 points, 0 to run" in samewise(*sweep).stderr
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    copied = snapshot(SweepFolder(folder))
    assert {name for name in USED if (copied / name).read_text() == FILES[name]} == set(USED)
    before = [state(run) for run in runs(lab)]
    edit(lab / "lab_of_code" / "net.py", "flatten(1)", "flatten(1) * 2")
    told = "lab_of_code/net.py has changed: Net.forward"
    forget()
    done = samewise("sweep", folder.name, "--run-root", tmp_path / "runs")
    assert done.returncode == 2
    assert f"the code has changed since this sweep was made: {told}" in done.stderr
    forget()
    done = samewise(*sweep, "--list")
    assert f"another sweep: {told}\n    before: {folder}" in done.stderr
    assert not {run.name for run in runs(lab)} & set(done.stdout.split())
    forget()
    assert job.main(folder, 0) == 2
    assert told in json.loads((folder / "jobs" / "0000.json").read_text())["said"]
    assert [state(run) for run in runs(lab)] == before


def test_a_processor_of_another_generation_may_give_other_bits_whatever_its_name():
    from samewise.runner.records import environment

    def record(**cpu: str) -> dict[str, dict[str, str]]:
        return {"decides": {f"cpu.{name}": value for name, value in cpu.items()}}

    zen_4, zen_5 = (record(model="AMD EPYC", generation=f"family {family}, model 17") for family in (25, 26))
    assert environment.differences(zen_4, zen_5) == ["cpu.generation was 'family 25, model 17' and is 'family 26, model 17'"]
    assert environment.differences(record(model="AMD EPYC"), zen_5) == [], "0.1 did not record it"
