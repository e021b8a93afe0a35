"""A run and a sweep as someone hands them on: made once, and copied for each test that wants one."""

import os
import shutil
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

TINY = (*DIGITS, "model.width=4", "max_steps=2")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run root with a run and a sweep of one point."""
    from samewise.runner.cli import main

    home = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main(["train", *TINY, "name=one"]) == 0
        assert main(["sweep", *TINY, "name=swept", "seed=0,1", "launcher.jobs=1"]) == 0
    finally:
        os.chdir(before)
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "home"
    shutil.copytree(made, copy, symlinks=True)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def run(home: Path) -> Path:
    return next(home.glob("runs/one/*"))


@pytest.fixture
def sweep(home: Path) -> Path:
    return next(home.glob("runs/sweeps/*"))


@pytest.fixture
def picture(home: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(home / "picture.png")
    return home / "picture.png"
