"""Messages that a person can act on: about the folder of runs, the tracking address, files, and metrics that are not numbers."""

from collections.abc import Callable
from typing import Any

from samewise_tiny import DIGITS

TINY = (*DIGITS, "max_steps=1")


def test_doctor_reports_a_run_root_that_is_not_writable(samewise: Callable[..., Any]) -> None:
    told = samewise("doctor", "--run-root", "/proc/x").stdout
    (line,) = (line for line in told.splitlines() if line.split()[1:2] == ["run_root"])
    assert line.startswith("bad")
    assert "not writable: " in line
