"""The code that an experiment reaches is part of its identity: other code is another run, and what differs is named."""

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
from samewise_tiny import QUIET

TINY = [*QUIET, "dataset=digits", "transforms=images", "max_steps=4", "checkpoint.every_steps=2", "name=code"]
MODEL = ["~model", "+model={_target_:lab_of_code.net.Net}"]
FILES = {
    "pyproject.toml": '[tool.samewise]\npackages = ["lab_of_code"]\n',
    "lab_of_code/__init__.py": "",
    "lab_of_code/net.py": """
import torch
from torch import nn
from .parts import layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = layers.head()

    def forward(self, pixels):
        return self.head(pixels.flatten(1))
""",
    "lab_of_code/parts/__init__.py": "",
    "lab_of_code/parts/layers.py": """
from torch import nn


def head():
    from helper_of_lab_of_code import WIDTH

    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
""",
    "lab_of_code/science.py": """
from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss


class Science(Classification):
    def loss(self, *given):
        found = super().loss(*given)
        return Loss(found.total * 1.0, count=found.count)
""",
    "lab_of_code/data.py": """
from samewise.datasets.digits import Digits


class Marks(Digits):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "label": sample["label"] * 1}
""",
    "lab_of_code/unused.py": "raise RuntimeError\n",
    "helper_of_lab_of_code.py": "WIDTH = 16\n",
}
EXPERIMENT = [*TINY, *MODEL, "recipe._target_=lab_of_code.science.Science", "dataset.train._target_=lab_of_code.data.Marks"]
USED = [name for name in sorted(FILES) if name not in ("pyproject.toml", "lab_of_code/unused.py")]


def forget() -> None:
    """What another process would not have: the modules of the lab, and its folder on the path."""
    for name in [name for name in sys.modules if "lab_of_code" in name]:
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not (Path(place) / "lab_of_code").is_dir()]
    importlib.invalidate_caches()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    monkeypatch.chdir(project)
    yield project
    forget()


@pytest.fixture
def train(samewise, lab, tmp_path):
    def run(*arguments: str):
        forget()
        return samewise("train", *EXPERIMENT, f"run_root={tmp_path}/runs", *arguments)

    return run


@pytest.fixture
def fingerprint(lab):
    from samewise.runner.config import compose, project

    experiment = compose.compose(EXPERIMENT, project=project.find(lab))
    return lambda: dataclasses.replace(experiment, project=project.find(lab)).fingerprint


def runs(lab: Path) -> list[Path]:
    return sorted((lab.parent / "runs" / "code").glob("*/"), key=lambda folder: folder.stat().st_ctime_ns)


def edit(file: Path, old: str = "", new: str = "\nEDITED = True\n") -> str:
    before = file.read_text()
    assert old in before
    write(file, before.replace(old, new, 1) if old else before + new)
    return before


def write(file: Path, text: str) -> None:
    """Python takes bytecode for that of a source of the same length and second: each version gets a second of its own."""
    at = file.stat().st_mtime + 2
    file.write_text(text)
    os.utime(file, (at, at))


def state(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


EDITS = {
    "model": ("lab_of_code/net.py", "flatten(1)", "flatten(1) * 2", "Net.forward"),
    "layer": ("lab_of_code/parts/layers.py", "ReLU", "GELU", "head"),
    "loss": ("lab_of_code/science.py", "* 1.0", "* 2.0", "Science.loss"),
    "data set": ("lab_of_code/data.py", "* 1", "* 0", "Marks.__getitem__"),
    "helper two imports away": ("helper_of_lab_of_code.py", "16", "8", ""),
    "method that overrides another": ("lab_of_code/net.py", "    def forward", "    def eval(self):\n        return self\n\n    def forward", "Net, Net.eval"),
}
SAME = {
    "a comment": ("lab_of_code/net.py", "import torch\n", "import torch  # the library\n# and more\n"),
    "a docstring": ("lab_of_code/net.py", "class Net(nn.Module):\n", 'class Net(nn.Module):\n    """A net."""\n'),
    "formatting": ("lab_of_code/parts/layers.py", "nn.Linear(64, WIDTH)", "nn.Linear(\n        64,\n        (WIDTH),\n    )"),
    "a file that nothing imports": ("lab_of_code/unused.py", "", "\nMORE = 1\n"),
}


def test_an_edit_of_what_an_experiment_reaches_is_another_identity_and_one_of_how_it_is_written_is_not(fingerprint, lab):
    first = fingerprint()
    found = {first}
    for file, old, new, _ in EDITS.values():
        text = edit(lab / file, old, new)
        found.add(fingerprint())
        write(lab / file, text)
    assert len(found) == 1 + len(EDITS)
    for what, (file, old, new) in SAME.items():
        text = edit(lab / file, old, new)
        assert fingerprint() == first, what
        write(lab / file, text)


def test_an_experiment_that_reaches_none_of_a_projects_code_keeps_its_fingerprint(samewise, lab, tmp_path, monkeypatch):
    said = samewise("show", *TINY, "--json").stdout
    monkeypatch.chdir(tmp_path)
    forget()
    assert json.loads(samewise("show", *TINY, "--json").stdout)["fingerprint"] == json.loads(said)["fingerprint"]


def test_what_is_imported_by_a_name_that_no_text_has_counts_with_all_of_its_package(fingerprint, lab):
    edit(lab / "lab_of_code" / "net.py", "import torch\n", "import torch, importlib\nPART = importlib.import_module('lab_of_code.' + 'un' + 'used')\n")
    first = fingerprint()
    edit(lab / "lab_of_code" / "unused.py")
    assert fingerprint() != first
    edit(lab / "lab_of_code" / "net.py", "'lab_of_code.' + 'un' + 'used'", "'lab_of_code.parts.layers'")
    first = fingerprint()
    edit(lab / "lab_of_code" / "unused.py")
    assert fingerprint() == first


def test_an_installed_package_that_is_declared_counts_by_its_bytes_and_one_that_is_not_does_not(fingerprint, lab, tmp_path, monkeypatch):
    place = tmp_path / "site-packages"
    for name in ("declared_lab_of_code", "other_lab_of_code"):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(place)
    edit(lab / "pyproject.toml", '["lab_of_code"]', '["lab_of_code", "declared_lab_of_code"]')
    edit(lab / "lab_of_code" / "net.py", "import torch\n", "import torch, declared_lab_of_code, other_lab_of_code\n")
    first = fingerprint()
    edit(place / "other_lab_of_code" / "__init__.py")
    assert fingerprint() == first
    edit(place / "declared_lab_of_code" / "__init__.py")
    assert fingerprint() != first


def test_other_code_is_another_run_and_what_differs_is_named_with_both_folders(train, samewise, lab, tmp_path):
    done = train()
    assert done.returncode == 0, done.stderr
    assert "the code is other" not in done.stderr
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
    assert "the code is other" not in done.stderr
    for file, text in texts.items():
        write(lab / file, text)
    assert f" {first}\n" in train().stdout

    done = samewise("diff", first, second)
    assert "differs in helper_of_lab_of_code.py, lab_of_code/data.py (Marks.__getitem__), lab_of_code/parts/layers.py (head)" in done.stdout
    forget()
    assert "the code differs: lab_of_code/parts/layers.py has changed: head" in samewise("verify", second).stdout
    forget()
    assert "layers.py has changed: head; the run was trained with the earlier version" in samewise("eval", second).stderr


def test_a_run_that_is_half_done_is_left_as_it_is_where_the_code_is_other(train, lab):
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


def test_the_same_code_elsewhere_is_the_same_and_a_run_from_before_the_code_counted_is_named(train, samewise, lab, monkeypatch):
    assert train().returncode == 0
    (first,) = runs(lab)
    monkeypatch.chdir(lab.rename(lab.with_name("moved")))
    assert "already finished" in train().stdout
    old = first.with_name(json.loads((first / "sources.json").read_text())["config"][:12])
    first.rename(old)
    (old / "sources.json").write_text('{"lab_of_code/net.py": "0123"}')
    done = train()
    assert done.returncode == 0
    assert f"before: {old}" in done.stderr
    assert "an earlier version of samewise" in done.stderr


def test_code_that_is_edited_while_a_run_starts_ends_it_before_anything_is_trained(train, lab):
    edit(lab / "lab_of_code" / "net.py", "self.head =", f"open({str(lab / 'helper_of_lab_of_code.py')!r}, 'a').write('\\nMORE = 1\\n')\n        self.head =")
    done = train()
    assert done.returncode == 2
    assert "the code was edited while the run was starting: helper_of_lab_of_code.py has changed" in done.stderr
    assert not [file for folder in runs(lab) for file in folder.rglob("state.pt")]


def test_a_rank_that_is_started_again_does_not_go_on_with_other_code(lab, tmp_path, monkeypatch):
    from samewise.runner.config import compose, project
    from samewise.runner.errors import ConfigError
    from samewise.runner.training.launch import _as_agreed

    experiment = compose.compose([*EXPERIMENT, f"run_root={tmp_path}/runs"], project=project.find(lab))
    said = {"fingerprint": experiment.fingerprint, "folder": str(experiment.folder.path)}
    experiment.folder.create()
    experiment.folder.sources.write_text(json.dumps({"files": experiment.code.files}))
    monkeypatch.setenv("RANK", "1")
    assert _as_agreed(dataclasses.replace(experiment), said).folder == experiment.folder
    edit(lab / "lab_of_code" / "parts" / "layers.py", "ReLU", "GELU")
    with pytest.raises(ConfigError, match=re.escape("lab_of_code/parts/layers.py has changed: head")):
        _as_agreed(dataclasses.replace(experiment), said)


def test_the_version_of_a_library_that_the_code_imports_is_compared(lab):
    from samewise.runner.config import compose, project
    from samewise.runner.records import environment

    edit(lab / "lab_of_code" / "net.py", "import torch\n", "import torch\nimport yaml\nimport json\n")
    libraries = compose.compose(EXPERIMENT, project=project.find(lab)).code.libraries
    assert libraries == ("torch", "yaml")
    found = environment._libraries(libraries)
    assert list(found) == ["PyYAML"]
    told = environment.differences({"libraries": found}, {"libraries": {"PyYAML": "0"}})
    assert told == [f"version of PyYAML was {found['PyYAML']!r} and is '0'"]


@pytest.mark.slow
def test_a_process_that_has_imported_other_code_than_the_files_hold_now_trains_neither(train, samewise, lab):
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
def test_train_fresh_trains_again_beside_what_is_there_and_the_latest_counts(train, samewise, lab, tmp_path):
    assert train("--fresh").returncode == 0
    (first,) = runs(lab)
    before = state(first)
    done = train("--fresh")
    assert done.returncode == 0
    assert "already finished" not in done.stdout
    assert "the code is other" not in done.stderr
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


@pytest.mark.slow
def test_another_version_of_samewises_own_code_is_another_environment_and_is_named(train, samewise, lab, tmp_path):
    assert train().returncode == 0
    (run,) = runs(lab)
    record = json.loads((run / "environment.json").read_text())
    assert {"samewise/runner/training/loop.py", "samewise/recipes/classification.py", "samewise/datasets/digits.py"} <= record["code"].keys()
    assert not [name for name in record["code"] if "/commands/" in name or "/tracking/" in name]
    assert "samewise's own code" not in train().stderr
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    record["code"]["samewise/runner/optim/build.py"] = "of another version"
    (run / "environment.json").write_text(json.dumps({**record, "code_state": "other"}))
    done = train()
    assert "already finished" in done.stdout
    told = "samewise's own code is other: samewise/runner/optim/build.py"
    assert f"warning: {told}; " in done.stderr
    forget()
    assert f"not comparable: the environment affects the bits, and {told}" in samewise("verify", run).stdout
    assert told in samewise("diff", run, other).stdout
    (run / "summary.json").unlink()
    assert told in train().stderr


def test_an_old_result_is_given_without_importing_torch_or_the_code(train, lab, tmp_path):
    assert train().returncode == 0
    command = [sys.executable, "-X", "importtime", "-m", "samewise", "train", *EXPERIMENT, f"run_root={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "already finished" in done.stdout
    imported = {name.split(".")[0] for name in re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)}
    assert "samewise" in imported
    assert not imported & {"torch", "mlflow", "lab_of_code"}


@pytest.mark.slow
def test_a_sweep_of_other_code_is_another_sweep_and_no_job_of_the_first_trains_it(train, samewise, lab, tmp_path):
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
    assert f"the code is other than when this sweep was made: {told}" in done.stderr
    forget()
    done = samewise(*sweep, "--list")
    assert f"another sweep: {told}\n    before: {folder}" in done.stderr
    assert not {run.name for run in runs(lab)} & set(done.stdout.split())
    forget()
    assert job.main(folder, 0) == 2
    assert told in json.loads((folder / "jobs" / "0000.json").read_text())["said"]
    assert [state(run) for run in runs(lab)] == before
