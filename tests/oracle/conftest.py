"""The oracle, as a fixture for the tests here."""

from typing import Any

import pytest
from samewise_oracle_curves import Oracle


@pytest.fixture
def oracle(samewise, tmp_path, monkeypatch) -> Any:
    return Oracle(samewise, tmp_path, monkeypatch)
