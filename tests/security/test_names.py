"""Names given by others (classes, files, metrics, tags) are plain text: not terminal codes, markup or formulas; and no picture fails a run."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from samewise_tiny import DIGITS

from samewise.recipes.parts import pictures, transcripts
from samewise.runner.records.console import PlainConsole
from samewise.runner.sweeps.report import rows

ESCAPES = "\x1b[2J\x1b]0;title\x07\x1b[8mhidden\x1b[0m\x9b2J\u202e"


def classes(root: Path, *names: str) -> Path:
    noise = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in names:
            (root / split / name).mkdir(parents=True)
            for number in range(4):
                Image.fromarray(noise.integers(0, 256, (16, 16), dtype=np.uint8)).save(root / split / name / f"{number}.png")
    return root


TRAINED = ("model=resnet18_small", "model.width=4", "dataset=image_folder", "dataset.image_size=16", "transforms=images", "loader.num_workers=0")
GIVEN = (*TRAINED, "tracking=none", "max_epochs=1", "batch_size=4", "optimizer.lr=0.01")


def test_a_run_with_hostile_class_names_succeeds(samewise: Callable[..., Any], tmp_path: Path) -> None:
    root = classes(tmp_path / "data", "$b^$", f"x{ESCAPES}", "[bold]b[/bold]")
    given = [*GIVEN, f"dataset.root={root}", "dataset.num_classes=3", f"run_root={tmp_path / 'runs'}"]
    done = samewise("train", *given, code=0)
    assert "\x1b" not in done.stdout + done.stderr
    assert [*tmp_path.glob("runs/*/*/artifacts/valid/confusion_matrix.png")]
    image = root / "valid" / "$b^$" / "0.png"
    predicted = samewise("predict", *tmp_path.glob("runs/*/*"), image, code=0)
    assert "\x1b" not in predicted.stdout + predicted.stderr
    assert "\\x1b[8mhidden" in predicted.stdout


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+cmd", "-1+1", "@SUM(1)", "\t=1"])
def test_no_table_cell_is_a_spreadsheet_formula(name: str, tmp_path: Path) -> None:
    pictures.save_class_accuracy(tmp_path / "classes.csv", torch.eye(2), [name, "b"])
    transcripts.save_csv(tmp_path / "said.csv", [transcripts.Line(name, name, name, 0, -1.5)])
    tables = [(tmp_path / one).read_bytes().decode() for one in ("classes.csv", "said.csv")] + [rows.as_csv([{"metric": name, name: -1.5, "text": "-1.5"}])]
    for table in tables:
        cells = [cell for row in csv.reader(io.StringIO(table, newline="")) for cell in row]
        assert f"'{name}" in cells
        assert name not in cells
    assert {"-1.5"} < set(cells)


def test_the_console_shows_markup_in_names_literally() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, highlight=False, width=200)
    console.print("[red]a[/red] :smile: [link=http://x]b[/link]\x1b[2J", style="bold")
    assert "[red]a[/red] :smile: [link=http://x]b[/link]\\x1b[2J" in out.getvalue()


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
