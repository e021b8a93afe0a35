"""Puts `jobs` within reach of the tests here: no folder of tests is on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("samewise_runner_jobs", Path(__file__).with_name("jobs.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test() -> Iterator[None]:
    yield
    while _module.STARTED:
        _module.STARTED.pop().kill()
