"""The wheel holds all of samewise and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("configs", "recipes", "runner", "datasets")


@pytest.fixture(scope="module")
def names(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(repository)]
    subprocess.run(command, check=True, timeout=60)
    (wheel,) = folder.glob("samewise-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_four_folders_and_the_starter_and_nothing_more(repository: Path, names: set[str]) -> None:
    files = {path for folder in FOLDERS for ending in ("py", "yaml") for path in (repository / folder).rglob(f"*.{ending}")}
    files |= {path for path in (repository / "runner" / "commands" / "starter").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {f"samewise/{path.relative_to(repository)}" for path in files}
    packaged = {name for name in names if name.startswith("samewise/")}
    assert packaged == expected | {"samewise/__init__.py", "samewise/__main__.py"}
