"""Puts the helpers of the tests here within their reach: no folder of tests is on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("drops", "exported", "jobs", "portable_runs", "reachable", "resuming_space", "resuming", "small_runs"):
    _spec = importlib.util.spec_from_file_location(f"samewise_runner_{_name}", Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _spec.loader = importlib.util.LazyLoader(_spec.loader)  # some import all of torch, which few tests' collection should wait for
    sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
