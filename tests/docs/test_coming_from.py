"""docs/coming_from.md and docs/gallery.md are made from their tables and from runs, and what the tables say composes."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_docs_coming_from import PAGE, page, tables
from samewise_docs_gallery import PAGE as GALLERY
from samewise_docs_gallery import in_page, of_runs, written
from samewise_tiny import DIGITS

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


def test_the_page_has_the_figures_of_the_headers() -> None:
    page = GALLERY.read_text()
    assert len(in_page()) > 1
    assert page == written(page, in_page()), "python tests/docs/gallery.py --write RUN_ROOT"


@pytest.mark.slow
def test_a_row_has_the_result_of_its_run(samewise: Callable[..., Any], tmp_path: Path) -> None:
    done = samewise("train", *DIGITS, "model.width=4", "max_steps=3", f"run_root={tmp_path}", "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    ((experiment, task, metric, time, _, digest),) = of_runs(tmp_path)
    assert "resnet18_digits" in experiment
    assert "width=4" in experiment
    assert "handwritten digits" in task
    assert metric == f"valid/accuracy {result['metrics']['final']['valid/accuracy']:.4f}"
    assert time.endswith("s, 3 steps")
    assert digest == f"`{samewise('digest', next(tmp_path.glob('*/*'))).stdout.split()[0][:16]}`"
