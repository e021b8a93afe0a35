"""A path that cannot be written is reported with the option that named it, before any work is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import DIGITS

TINY = (*DIGITS, "model.width=4", "max_steps=1")

COMMANDS = {
    "predict into a folder": ("--output", ["predict", "RUN", "PICTURE", "--output", "PLACE/x"]),
    "export": ("--out", ["export", "RUN", "--out", "PLACE/x"]),
    "bundle": ("--out", ["bundle", "RUN", "--out", "PLACE/x.bundle"]),
    "init": ("FOLDER", ["init", "PLACE/x"]),
    "profile": ("--out", ["profile", *TINY, "--out", "PLACE/x"]),
    "new": ("NAME", ["new", "x", "--from", "resnet18_digits", "--config-dir", "PLACE"]),
    "train": ("run_root", ["train", *TINY, "name=two", "run_root=PLACE/x"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_written_is_named_with_its_option(samewise: Callable[..., Any], run: Path, picture: Path, tmp_path: Path, command: str) -> None:
    """Nobody can create files in /sys, and there is no folder below a file."""
    option, line = COMMANDS[command]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file of configs").mkdir()
    (tmp_path / "file of configs" / "experiment").write_text("mine")
    for place in ("/sys", str(tmp_path / ("file of configs" if command == "new" else "file"))):
        named = {"RUN": str(run), "PICTURE": str(picture)}
        done = samewise(*(named.get(word, word.replace("PLACE", place)) for word in line), code=2)
        assert done.stderr.startswith(f"error: {option}: "), done.stderr
        assert "cannot be written: " in done.stderr or "cannot write there: " in done.stderr or "is in a folder that does not exist" in done.stderr
        assert place in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_is_written_through_a_dangling_link(samewise: Callable[..., Any], tmp_path: Path) -> None:
    link = tmp_path / "x"
    link.symlink_to(tmp_path / "mine")
    done = samewise("profile", *TINY, "--out", link, code=2)
    assert "--out: is " in done.stderr
    assert not (tmp_path / "mine").exists()


def test_doctor_reports_a_run_root_that_is_not_writable(samewise: Callable[..., Any]) -> None:
    told = samewise("doctor", "--run-root", "/proc/x").stdout
    (line,) = (line for line in told.splitlines() if line.split()[1:2] == ["run_root"])
    assert line.startswith("bad")
    assert "not writable: " in line
