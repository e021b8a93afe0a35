"""What was found sound once is not looked at again, so that a sweep is handed to a cluster without importing torch; anything that could matter is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samewise.runner.config.check.known import _state, remembered
from samewise.runner.config.project import Project

PART = {"optimizer": {"_target_": "known_lab.Thing", "lr": 0.1, "nesterov": True, "groups": [1, 2]}}


class Looks:
    """Counts how often it is asked."""

    def __init__(self, *problems: str) -> None:
        self.count, self.problems = 0, problems

    def __call__(self, part: object) -> list[str]:
        self.count += 1
        return list(self.problems)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "known_lab").mkdir()
    (tmp_path / "known_lab" / "__init__.py").write_text("")
    _state.cache_clear()
    return tmp_path / "known_lab"


def looked(part: dict, looks: Looks, packages: tuple[str, ...] = ("known_lab",)) -> int:
    """How often it was asked for this."""
    before = looks.count
    remembered(looks, Project(Path(), packages))(part)
    return looks.count - before


def test_only_what_could_matter_is_looked_at_again(package):
    looks = Looks()
    assert looked(PART, looks) == 1
    assert looked(PART, looks) == 0
    assert looked({"optimizer": {**PART["optimizer"], "lr": 0.2}}, looks) == 0
    assert looked({"scheduler": PART["optimizer"]}, looks) == 1
    for change in ({"lr": 1}, {"lr": "0.1"}, {"nesterov": False}, {"groups": [1, 3]}, {"further": 0.1}):
        assert looked({"optimizer": {**PART["optimizer"], **change}}, looks) == 1
    assert looked(PART, looks, packages=()) == 1
    (package / "further.py").write_text("")
    _state.cache_clear()
    assert looked(PART, looks) == 1


def test_what_is_wrong_is_told_each_time(package):
    looks = Looks("wrong")
    assert [looked(PART, looks), looked(PART, looks)] == [1, 1]


def test_where_nothing_can_be_kept_it_is_found_out_anew(package, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    looks = Looks()
    assert [looked(PART, looks), looked(PART, looks)] == [1, 1]


def test_a_part_that_is_known_needs_no_torch(package):
    code = """
import sys
from pathlib import Path
from samewise.runner.config.check.known import remembered
from samewise.runner.config.project import Project
part = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
assert remembered(lambda part: [], Project(Path()))(part) == []
assert remembered(lambda part: ["asked"], Project(Path()))(part) == []
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
