"""Runs pytest on the pretended device: `python -m pytest -p pretended_cuda.plugin -m gpu`, with tests/pretend on PYTHONPATH."""

import sys
from contextlib import ExitStack

import pytest

from pretended_cuda.device import pretended

_HELD = ExitStack()
_IN_RANKS = """
from contextlib import ExitStack
from pretended_cuda import pretended
device = ExitStack()
device.enter_context(pretended())
"""


def pytest_configure(config: pytest.Config) -> None:
    _HELD.enter_context(pretended())


def pytest_unconfigure(config: pytest.Config) -> None:
    _HELD.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks that tests start have the device too."""
    forked = sys.modules.get("samewise_forked")
    if forked is not None:
        forked.COMMAND = _IN_RANKS + forked.COMMAND
