import math
import subprocess
import sys
from pathlib import Path

import pytest

from samewise.runner.tracking.journal import Journal, read_entries


def points(path: Path) -> list[tuple[int, str, float]]:
    return [(entry.step, key, value) for entry, _ in read_entries(path) for key, value in entry.metrics.items()]


def test_floats_nan_and_infinities_are_read_back_exactly(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", resume_step=None)
    values = [0.1 + 0.2, 1e-320, -0.0, math.pi * 1e300, math.inf, -math.inf, 7]
    for step, value in enumerate(values):
        journal.log({"loss": value, "not a number": math.nan, 'odd "key"\n': 1.0}, step)
    journal.close()
    found = {(step, key): value for step, key, value in points(tmp_path / "metrics.jsonl")}
    assert [found[step, "loss"].hex() for step in range(len(values))] == [float(value).hex() for value in values]
    assert all(math.isnan(found[step, "not a number"]) for step in range(len(values)))
    assert found[0, 'odd "key"\n'] == 1.0


def test_a_step_logged_again_after_a_restart_keeps_its_first_value_and_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path, resume_step=None)
    for step in range(1, 8):
        first.log({"loss": float(step)}, step)
    first.log({"valid": 0.5}, 5)
    first.sync()
    before = path.read_bytes()

    second = Journal(path, resume_step=5)
    for step in range(5, 10):
        second.log({"loss": -1.0, "valid": -1.0}, step)
    second.close()
    assert path.read_bytes().startswith(before)
    expected = [(step, "loss", float(step)) for step in range(1, 8)] + [(5, "valid", 0.5)]
    expected += [(6, "valid", -1.0), (7, "valid", -1.0), *((step, key, -1.0) for step in (8, 9) for key in ("loss", "valid"))]
    assert points(path) == expected


def test_a_run_killed_before_its_first_checkpoint_writes_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        journal = Journal(path, resume_step=None)
        for step in range(1, 4):
            journal.log({"loss": 1.0}, step)
            journal.log({"loss": 2.0}, step)
        journal.close()
    assert points(path) == [(1, "loss", 1.0), (2, "loss", 1.0), (3, "loss", 1.0)]


def test_a_torn_last_line_is_cut_off_and_its_step_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, resume_step=None)
    journal.log({"loss": 1.0}, 1)
    journal.log({"loss": 2.0}, 2)
    journal.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert points(path) == [(1, "loss", 1.0)]
    again = Journal(path, resume_step=1)
    again.log({"loss": 2.0}, 2)
    again.close()
    assert points(path) == [(1, "loss", 1.0), (2, "loss", 2.0)]


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from samewise.runner.tracking.journal import Journal
path = Path(sys.argv[1])
journal = Journal(path, resume_step=None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(200):
    journal.log({"loss": step / 3}, step)
assert not journal.sync()
assert path.stat().st_size == 1000, path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(0.6)
for step in range(200, 210):
    journal.log({"loss": step / 3}, step)
assert journal.sync()
"""


def test_a_full_disk_costs_neither_a_value_nor_the_order(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("held in memory") == 1
    assert points(path) == [(step, "loss", step / 3) for step in range(210)]
