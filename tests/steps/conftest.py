"""Makes the modules beside the tests importable as the package `samewise_steps`, because no folder of tests is on sys.path."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest

_spec = ModuleSpec("samewise_steps", None, is_package=True)
_spec.submodule_search_locations = [str(Path(__file__).parent)]
sys.modules.setdefault(_spec.name, module_from_spec(_spec))


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test() -> Iterator[None]:
    yield
    from samewise_steps.ranks import end_all

    end_all()
