"""Python's hash seed: a set in a user's code has the same order in every process, so a run can be repeated, resumed, and spread over ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

CODE = """
import os

from torch import nn

class Branches(nn.Module):
    def __init__(self, order="set"):
        super().__init__()
        kinds = ["edge", "blob", "line", "dot", "grid", "ring", "star", "wave"]
        if order == "set":
            kinds = set(kinds)
        elif order == "rank" and os.environ.get("RANK") == "1":
            kinds = kinds[::-1]
        self.branches = nn.ModuleDict({kind: nn.Linear(64, 10) for kind in kinds})

    def forward(self, pixels):
        return sum(self.branches[kind](pixels.flatten(1)) for kind in sorted(self.branches))
"""
QUICK = [*DIGITS, "dataset=digits", "transforms=images", "param_groups.norms=null", "max_steps=6"]
TINY = [*QUICK, "model=branches"]
HASH = "import sys; print(sys.flags.hash_randomization, hash('same'), sys.argv[1:])"


@pytest.fixture
def lab(tmp_path: Path) -> list[str]:
    (tmp_path / "lab_of_sets").mkdir()
    (tmp_path / "lab_of_sets" / "__init__.py").write_text(CODE)
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "branches.yaml").write_text("# Branches\n_target_: lab_of_sets.Branches\norder: set\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'lab'\n")
    return ["--package", "lab_of_sets", "--config-dir", str(tmp_path / "configs")]


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    line = [sys.executable, "-m", "samewise", *arguments, f"run_root={folder}"]
    return subprocess.Popen(line, cwd=folder.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    said = process.communicate(timeout=300)
    assert process.returncode == code, said[1]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, "7", "random"])
def test_the_command_fixes_the_hash_seed_and_keeps_its_arguments(seed: str | None):
    code = f"import samewise.__main__ as command, samewise.runner.cli as cli; cli.entry = lambda: exec({HASH!r}); command.main()"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | ({"PYTHONHASHSEED": seed} if seed else {})
    line = [sys.executable, "-W", "ignore", "-c", code, "a b", "--c=d"]
    said = {subprocess.run(line, env=variables, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    fixed = subprocess.run([sys.executable, "-c", HASH, "a b", "--c=d"], env={**variables, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert said == {fixed.stdout}
    assert fixed.stdout.startswith("0 ")
    assert fixed.stdout.endswith("['a b', '--c=d']\n")


@pytest.mark.slow
def test_a_model_created_from_a_set_is_resumed_and_spread_over_ranks_with_the_same_bits(lab: list[str], tmp_path: Path):
    whole = json.loads(finish(command(tmp_path / "whole", "train", *lab, *TINY, "replicas=2", "--json"))[0])["weights_sha256"]
    killed = command(tmp_path / "killed", "train", *lab, *TINY, "replicas=2", "max_steps=6", "checkpoint.every_steps=1")
    while not list((tmp_path / "killed").glob("*/*/checkpoints/step-*")):
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    again = finish(command(tmp_path / "killed", "train", *lab, *TINY, "replicas=2", "max_steps=6", "checkpoint.every_steps=1", "--json"))[0]
    ranks = finish(command(tmp_path / "ranks", "train", *lab, *TINY, "replicas=2", "strategy=elastic", "strategy.nproc=2", "--json"))[0]
    assert json.loads(again)["weights_sha256"] == json.loads(ranks)["weights_sha256"] == whole
