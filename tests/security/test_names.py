"""Names given by others (classes, files, metrics, tags) are plain text: not terminal codes, markup or formulas; and no picture fails a run."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samewise.recipes.parts import detection_pictures, pictures, sounds, transcripts
from samewise.recipes.parts.average_precision import AveragePrecision
from samewise.recipes.parts.average_precision import Image as Annotated
from samewise.runner.records.console import PlainConsole
from samewise.runner.sweeps.report import rows

FORMULAS = ["$b^$", r"\$b^$", "$\\undefined{$", "$$", "a_b^c", r"\frac", "[red]x", "$b^$" * 50]
ESCAPES = "\x1b[2J\x1b]0;title\x07\x1b[8mhidden\x1b[0m\x9b2J\u202e"


@pytest.mark.parametrize("name", FORMULAS)
def test_every_picture_can_be_drawn_with_any_name(name: str, tmp_path: Path) -> None:
    names = [name, "b"]
    pictures.save_confusion_matrix(tmp_path / "a.png", torch.tensor([[3, 1], [0, 2]]), names)
    sheet = pictures.PredictionSheet()
    sheet.add(torch.zeros(3, 8, 8, dtype=torch.uint8), 0, 1, 0.5, 1.0, 0)
    sheet.save(tmp_path / "b.png", names)
    sounds.save_spectrograms(tmp_path / "c.png", [[(name, torch.zeros(2000))]], sample_rate=8000)
    transcripts.save_spectrogram(tmp_path / "d.png", torch.zeros(8, 8, dtype=torch.uint8), title=name, seconds=None)
    box, one = torch.tensor([[1.0, 1.0, 6.0, 6.0]]), torch.tensor([1])
    image = Annotated((8, 8), box, one, torch.tensor([False]), torch.tensor([25.0]), box, torch.tensor([0.9]), one)
    labels = ["background", name]
    detection_pictures.save_detections(tmp_path / "e.png", [torch.zeros(3, 8, 8, dtype=torch.uint8)], [image], labels)
    detection_pictures.save_precision_recall(tmp_path / "f.png", AveragePrecision.of([image], classes=2), labels)
    assert all(Image.open(tmp_path / f"{letter}.png").size for letter in "abcdef")


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
    done = samewise("train", *given)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert [*tmp_path.glob("runs/*/*/artifacts/valid/confusion_matrix.png")]
    image = root / "valid" / "$b^$" / "0.png"
    predicted = samewise("predict", *tmp_path.glob("runs/*/*"), image)
    assert predicted.returncode == 0, predicted.stderr
    assert "\x1b" not in predicted.stdout + predicted.stderr
    assert "\\x1b[8mhidden" in predicted.stdout


def test_a_picture_that_cannot_be_drawn_is_a_warning(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr(pictures, "save_confusion_matrix", fail)
    root = classes(tmp_path / "data", "a", "b")
    given = [*GIVEN, f"dataset.root={root}", "dataset.num_classes=2", f"run_root={tmp_path / 'runs'}"]
    done = samewise("train", *given)
    assert done.returncode == 0, done.stderr
    assert "warning" in done.stderr
    assert "not all pictures could be drawn: ValueError: no such colour" in done.stderr
    (folder,) = tmp_path.glob("runs/*/*")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


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


@pytest.mark.slow
def test_an_error_that_repeats_a_name_prints_no_control_codes(tmp_path: Path) -> None:
    """In a process started as a user would, to see what the terminal receives."""
    command = [sys.executable, "-m", "samewise", "digest", f"{tmp_path}/{ESCAPES}"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"\x07" not in done.stderr


def test_the_console_shows_markup_in_names_literally() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, highlight=False, width=200)
    console.print("[red]a[/red] :smile: [link=http://x]b[/link]\x1b[2J", style="bold")
    assert "[red]a[/red] :smile: [link=http://x]b[/link]\\x1b[2J" in out.getvalue()
