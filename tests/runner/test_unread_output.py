"""If nobody reads the output any more (`| head -1`, a closed terminal), a command continues silently and ends with its usual exit code."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from samewise_tiny import DIGITS

from samewise.runner.cli import main


def pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def terminal() -> TextIO:
    ours, theirs = os.openpty()
    os.close(ours)
    return open(theirs, "w", buffering=1)


def leave_unread(make: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch) -> tuple[TextIO, TextIO]:
    """Replace standard output and error with streams that nobody reads; not in a fixture, because pytest then sets its own."""
    given = make(), make()
    monkeypatch.setattr(sys, "stdout", given[0])
    monkeypatch.setattr(sys, "stderr", given[1])
    return given


UNREAD = pytest.mark.parametrize("make", [pipe, terminal])


@UNREAD
def test_training_continues_to_its_end_with_unread_output(make: Callable[[], TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = leave_unread(make, monkeypatch)
    with pytest.raises(OSError, match=r"Broken pipe|Input/output error"):
        out.write("unread\n")
    leave_unread(make, monkeypatch)
    assert main(["train", *DIGITS, "model.width=4", "max_steps=2", "callbacks=default", f"run_root={tmp_path}"]) == 0
    assert len(list(tmp_path.glob("*/*/summary.json"))) == 1
    assert main(["runs", "--run-root", str(tmp_path)]) == 0
    assert main(["train", "lr=1"]) == 2


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("samewise.runner.cli._help", refuse)
    assert main(["--help"]) == 1
    assert "Broken pipe" in capfd.readouterr().err


def test_a_command_with_unread_output_ends_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "samewise", "list", "optimizer"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
