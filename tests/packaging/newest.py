"""Installs the newest releases that pyproject.toml allows into the environment of `make test-newest`, and names them.

newest.py install     pre-releases too; pip's own configuration may cap some
newest.py versions    those that the tests will run with, and which are newer than the tested ones
"""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_TORCH = ("torch", "torchvision", "torchaudio")
PURE = ("hydra-core", "omegaconf", "mlflow", "optuna")
"""Without what they need, which .venv has: mlflow holds all of mlflow-skinny, whose release may be late."""


def install() -> None:
    """Install them with pip; say so where one cannot be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["sweep"]]
    # A lower bound that is a pre-release makes pip look at pre-releases, of this package only.
    bounds = {re.split("[<>]", each)[0]: re.sub(r">=([\d.]+)", r">=\1.dev0", each) for each in declared}
    wanted = [[bounds[name] for name in OF_TORCH], *(["--no-deps", bounds[name]] for name in PURE)]
    installed = [each for each in wanted if pip(each)]
    if not installed:
        sys.exit("none of them can be installed")


def pip(arguments: list[str]) -> bool:
    """Run `pip install`; return whether it could."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], check=False).returncode == 0
    if not done:
        print(f"cannot be installed: {' '.join(arguments)}; tests run with the locked version", flush=True)
    return done


def versions() -> None:
    """Print one line."""
    from samewise.runner.records import tested

    found = {name: metadata.version(name) for name in tested.NEWEST}
    newer = [name for name in found if tested.is_newer(name)]
    print("newest:", ", ".join(f"{name} {version}" for name, version in found.items()), end="")
    print(f"; newer than runner/records/tested.py: {', '.join(newer)}" if newer else "")


if __name__ == "__main__":
    {"install": install, "versions": versions}[sys.argv[1]]()
