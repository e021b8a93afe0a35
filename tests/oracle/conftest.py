"""Puts `curves` within reach of the tests here, no folder of tests being on sys.path, and gives them the oracle."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("samewise_oracle_curves", Path(__file__).with_name("curves.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


@pytest.fixture
def oracle(samewise, tmp_path, monkeypatch) -> Any:
    return _module.Oracle(samewise, tmp_path, monkeypatch)
