"""The tables of docs/gallery.md say what finished runs and the headers of experiments say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_docs_gallery import PAGE, in_page, of_runs, written
from samewise_tiny import DIGITS


def test_the_page_has_the_figures_of_the_headers() -> None:
    page = PAGE.read_text()
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
