"""Hydra's submitit launcher runs samewise's experiments, with the program in docs/clusters.md; the plugin does not change samewise itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_tiny import QUIET

pytestmark = [pytest.mark.slow]

TINY = [*QUIET, "experiment=ours", "model.width=8", "run_root=runs"]
OURS = """# @package _global_
# An experiment of the project's own
defaults:
  - resnet18_digits
  - _self_
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory, clean_environment) -> dict[str, str]:
    """The environment in which Hydra finds the plugin."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]  # samewise has all their requirements already
    done = subprocess.run([*pip, "hydra-submitit-launcher==1.2.0", "submitit>=1.5"], capture_output=True, text=True, check=False, env=clean_environment)
    if done.returncode:
        pytest.skip(f"hydra-submitit-launcher cannot be installed here: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return {**clean_environment, "PYTHONPATH": str(folder)}


@pytest.fixture
def lab(repository, tmp_path, monkeypatch) -> Path:
    """A project with its own experiment and the program from the page, as the current folder."""
    page = (repository / "docs" / "clusters.md").read_text()
    program = re.search(r"^\*\*`submitit_app.py`\*\*\n\n```python\n(.*?)^```$", page, re.M | re.S)
    assert program
    (tmp_path / "submitit_app.py").write_text(program[1])
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\nconfigs = "configs"\n')
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "ours.yaml").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=240)


def test_two_seeds_with_submitit_local_have_the_bits_of_samewise_train(plugin, lab, samewise):
    program = ["submitit_app.py", "-m", "hydra/launcher=submitit_local", "hydra.searchpath=[file://configs]"]
    done = run(plugin, *program, *TINY, "seed=0,1")
    assert done.returncode == 0, done.stderr
    found = {json.loads(file.read_text())["weights_sha256"] for file in lab.glob("runs/ours/*/summary.json")}
    for seed in (0, 1):
        alone = samewise("train", *TINY[:-1], "run_root=alone", f"seed={seed}", "--json")
        found.remove(json.loads(alone.stdout)["weights_sha256"])
    assert found == set()


def test_the_plugin_changes_nothing_in_samewise(plugin, lab, samewise):
    for command in (["show", *TINY], ["list", "launcher"], ["sweep", "--list", *TINY, "seed=0,1"]):
        beside = run(plugin, "-m", "samewise", *command)
        assert beside.returncode == 0, beside.stderr
        assert beside.stdout == samewise(*command).stdout
    assert os.listdir(lab / "configs") == ["experiment"]
