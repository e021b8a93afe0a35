"""Makes `pretended_cuda` importable for the tests here, since no folder of tests is on sys.path."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

if "pretended_cuda" not in sys.modules:
    _init = Path(__file__).with_name("pretended_cuda") / "__init__.py"
    _spec = importlib.util.spec_from_file_location("pretended_cuda", _init, submodule_search_locations=[str(_init.parent)])
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests here if torch was built without CUDA, as it then does not know the device `cuda`."""
    if not torch.backends.cuda.is_built():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="this torch is built without CUDA"))


@pytest.fixture
def cuda() -> Iterator[None]:
    """A CUDA device: the machine's own, or the pretended one."""
    from pretended_cuda import pretended

    with nullcontext() if torch.cuda.is_available() else pretended():
        yield


@pytest.fixture
def device() -> Iterator[Any]:
    """The pretended CUDA device, for the duration of a test."""
    from pretended_cuda import pretended

    with pretended() as made:
        yield made
