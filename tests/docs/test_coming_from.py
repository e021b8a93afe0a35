"""docs/coming_from.md is made from its table, and what the table says to write composes."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from samewise_docs_coming_from import PAGE, page, tables

import samewise
from samewise.runner.errors import ConfigError

PLACEHOLDER = re.compile(r"\b(NAME|RUN|FILE|KEY|GROUP|CHOICE|FOLDER)\b|hf:|torchvision:|^samewise|^--|glob\(")


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/docs/coming_from.py --write"


@pytest.mark.variant
@pytest.mark.parametrize("table", tables(), ids=lambda table: table["title"])
def test_every_override_of_the_table_composes(table: dict[str, Any]) -> None:
    tried = 0
    for _, ours, *_ in table["works"]:
        for code in re.findall(r"`([^`]+)`", ours):
            overrides = shlex.split(code)
            if PLACEHOLDER.search(code) or not all(re.match(r"~|[^=]+=", part) for part in overrides):
                continue
            tried += 1
            try:
                samewise.compose(*table["experiment"], *overrides)
            except ConfigError as error:
                pytest.fail(f"{code}: {error}")
    assert tried > 2
