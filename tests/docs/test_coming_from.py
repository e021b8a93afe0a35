"""docs/coming_from.md is made from its table, and what the table says to write composes."""

import re
import shlex
from typing import Any

import pytest
from samewise_docs_coming_from import PAGE, page, tables

import samewise
from samewise.runner.errors import ConfigError

PLACEHOLDER = re.compile(r"\b(NAME|RUN|FILE|KEY|GROUP|CHOICE|FOLDER)\b|hf:|torchvision:|^--")


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/docs/coming_from.py --write"


@pytest.mark.variant
@pytest.mark.parametrize("table", tables(), ids=lambda table: table["title"])
def test_every_override_of_the_table_composes(table: dict[str, Any]) -> None:
    tried = 0
    for _, ours, *_ in table["works"]:
        for code in re.findall(r"`([^`]+)`", ours):
            command = re.match(r"samewise \w+", code)
            # A sweep's values are settings of the same keys
            overrides = [part for part in shlex.split(code.removeprefix(command[0] if command else "")) if not (command and re.search(r"[,(]", part))]
            if not overrides or PLACEHOLDER.search(code.replace("experiment=NAME", "")) or not all(re.match(r"~|[^=]+=", part) for part in overrides):
                continue
            tried += 1
            try:
                samewise.compose(*table["experiment"], *(part for part in overrides if part != "experiment=NAME"))
            except ConfigError as error:
                pytest.fail(f"{code}: {error}")
    assert tried > 2
