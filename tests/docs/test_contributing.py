"""The worked example in CONTRIBUTING.md: its changes apply to this checkout, and its commands succeed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_docs_pages import PAGES, blocks, make_folder

COPIED = (".package", "configs", "datasets", "docs", "recipes", "runner", "tests", "pyproject.toml")


@pytest.mark.slow
def test_the_loss_of_the_worked_example_passes_its_tests_and_lint(repository: Path, tmp_path: Path) -> None:
    for name in COPIED:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repository / name, tmp_path)
    text = PAGES["CONTRIBUTING.md"].read_text()
    make_folder("CONTRIBUTING.md", tmp_path)
    changes = "".join(block.text for block in blocks(text) if block.language == "diff")
    subprocess.run(["git", "apply", "-"], input=changes, cwd=tmp_path, text=True, check=True)
    commands = re.findall(r"^    ((?:samewise|python) .+)$", text, re.M)
    assert len(commands) == 3
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / ".package")}
    for command in [*commands, "python -m ruff check recipes tests", "python -m ruff format --check recipes tests"]:
        words = command.replace("samewise ", "python -m samewise ").split()
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert "losses.Poly  a torch.nn.Module, class" in (tmp_path / "tests" / "security" / "reachable.txt").read_text()
