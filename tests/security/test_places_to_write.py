"""A place where nothing can be written is told of with what named it, before the work is done; and a link in a received run is not written through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=1", "callbacks=none", "tracking=none", "evaluate.pictures=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, "name=one", f"run_root={root}"]) == 0
    return next(root.glob("one/*"))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (32, 32)).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


COMMANDS = {
    "predict into a folder": ("--output", ["predict", "RUN", "PICTURE", "--output", "PLACE/x"]),
    "predict into a file": ("--output", ["predict", "RUN", "PICTURE", "--output", "PLACE/x.json"]),
    "export": ("--out", ["export", "RUN", "--out", "PLACE/x"]),
    "bundle": ("--out", ["bundle", "RUN", "--out", "PLACE/x.bundle"]),
    "reproduce": ("--out", ["reproduce", "x.bundle", "--out", "PLACE/x"]),
    "diff": ("--html", ["diff", "RUN", "RUN", "--html", "PLACE/x.html"]),
    "init": ("FOLDER", ["init", "PLACE/x"]),
    "schema": ("--out", ["schema", "--out", "PLACE/x"]),
    "new": ("NAME", ["new", "x", "--from", "resnet18_digits", "--config-dir", "PLACE"]),
    "train": ("run_root", ["train", *TINY, "name=two", "run_root=PLACE/x"]),
    "sweep": ("run_root", ["sweep", *TINY, "name=two", "seed=1,2", "launcher.jobs=1", "run_root=PLACE/x"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_named_with_its_option(samewise: Callable[..., Any], run: Path, picture: Path, tmp_path: Path, command: str) -> None:
    """/sys takes no files, whoever asks; and below a file there is no folder."""
    option, line = COMMANDS[command]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file of configs").mkdir()
    (tmp_path / "file of configs" / "experiment").write_text("mine")
    for place in ("/sys", str(tmp_path / ("file of configs" if command == "new" else "file"))):
        named = {"RUN": str(run), "PICTURE": str(picture)}
        done = samewise(*(named.get(word, word.replace("PLACE", place)) for word in line))
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith(f"error: {option}: "), done.stderr
        assert "cannot be written: " in done.stderr or "cannot write there: " in done.stderr or "is in a folder that does not exist" in done.stderr
        assert place in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_pictures_that_have_no_place_in_the_run_can_be_put_elsewhere(samewise: Callable[..., Any], run: Path, picture: Path, tmp_path: Path) -> None:
    (run / "predictions").write_text("in the way")
    try:
        told = samewise("predict", run, picture)
        assert told.returncode == 2
        assert (
            "--output: cannot be written: Not a directory; hint: without --output they go into the run's folder: --output FOLDER names another" in told.stderr
        )
        assert samewise("predict", run, picture, "--output", tmp_path / "made").returncode == 0
        assert (tmp_path / "made" / "picture_class.png").is_file()
    finally:
        (run / "predictions").unlink()


def test_predictions_are_written_through_no_link_in_the_run(samewise: Callable[..., Any], run: Path, picture: Path, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.write_text("mine")
    other.mkdir()
    folder = run / "predictions"
    folder.symlink_to(other)
    for link in (folder, folder / "picture_class.png"):
        done = samewise("predict", run, picture)
        assert done.returncode == 2, done.stdout
        assert f"{link}: is damaged: it is a link" in done.stderr
        if link == folder:
            folder.unlink()
            folder.mkdir()
            (folder / "picture_class.png").symlink_to(mine)
    assert mine.read_text() == "mine"
    assert not list(other.iterdir())
