"""Runs pytest on the pretended device: `python -m pytest -p pretended_cuda.plugin -m gpu`, with tests/pretend on PYTHONPATH."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pretended_cuda.device import pretended

_HELD = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    _HELD.enter_context(pretended())


def pytest_unconfigure(config: pytest.Config) -> None:
    _HELD.close()
