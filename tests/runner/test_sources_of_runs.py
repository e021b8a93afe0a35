"""What a run does if the code has changed since it was started, or is edited meanwhile."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_runner_lab_of_code import EDITS, EXPERIMENT, FILES, at_work_in, edit, forget, runs, trainer, write

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


def test_editing_code_while_a_run_starts_ends_it_before_training(train, lab):
    edit(lab / "lab_of_code" / "net.py", "self.head =", f"open({str(lab / 'helper_of_lab_of_code.py')!r}, 'a').write('\\nWIDTH = 16\\n')\n        self.head =")
    done = train()
    assert done.returncode == 2
    assert "the code was edited while the run was starting: helper_of_lab_of_code.py has changed" in done.stderr
    assert not [file for folder in runs(lab) for file in folder.rglob("state.pt")]


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
    done = samewise("sweep", folder.name, "--run-root", tmp_path / "runs", code=2)
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
