"""Puts `pages` within reach of the tests here: no folder of tests is on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("pages", "settings_table", "warnings_page"):
    _spec = importlib.util.spec_from_file_location(f"samewise_docs_{_name}", Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
