"""Commands set the environment variables that torch reads as it is imported before they import it: later would be too late."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=none", "max_steps=2"]
CODE = """
import os, sys
from samewise.runner.processes import variables

def report(settings):
    print("torch is imported" if "torch" in sys.modules else "in time", flush=True)
    os.kill(os.getpid(), 9)

variables.prepare = report
from samewise.runner.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMMANDS = {
    "train": ["train", *TINY, "max_steps=3"],
    "check": ["check", *TINY],
    "profile": ["profile", *TINY, "max_steps=20"],
    "verify": ["verify", "{run}"],
    "verify of a bundle": ["verify", "{bundle}", "--trust"],
    "eval": ["eval", "{run}"],
    "export": ["export", "{run}", "--to", "safetensors", "--out", "{folder}/export"],
    "predict into a table": ["predict", "{run}", "{image}", "--output", "{folder}/table.csv"],
    "predict": ["predict", "{run}", "{image}"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, a bundle of it, an image and a folder."""
    from PIL import Image

    from samewise.runner.cli import main

    folder = tmp_path_factory.mktemp("variables")
    assert main(["train", *TINY, f"run_root={folder}/runs"]) == 0
    (run,) = folder.glob("runs/*/*")
    assert main(["bundle", str(run), "--out", str(folder / "run.bundle")]) == 0
    Image.new("L", (8, 8)).save(folder / "image.png")
    return {"folder": folder, "run": run, "bundle": folder / "run.bundle", "image": folder / "image.png"}


@pytest.mark.parametrize("command", COMMANDS)
def test_variables_are_set_before_torch_is_imported(command: str, places: dict[str, Path], clean_environment: Mapping[str, str], repository: Path) -> None:
    arguments = [one.format(**places) for one in COMMANDS[command]]
    environment = {**clean_environment, "PYTHONPATH": str(repository / ".package")}
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=places["folder"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["in time"], done.stderr
