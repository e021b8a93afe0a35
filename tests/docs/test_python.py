"""The notebook and the Python code in docs/python.md run unchanged, in an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_docs_pages import PAGES, blocks

import samewise

PAGE = PAGES["docs/python.md"].read_text()


def test_the_page_names_every_function() -> None:
    functions = {name for name in samewise.__all__ if name.islower()}
    assert set(re.findall(r"^\| `(\w+)\(", PAGE, re.M)) == functions


@pytest.mark.slow
def test_the_code_on_the_page_runs_as_described(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == 3, "the sweep has found the run that was trained before"
    assert re.search(r"^True\n10\n.*^\[\('seed', 0, 1\)\]$", done.stdout, re.M | re.S), done.stdout
    assert re.search(r"0\.05 +finished.*\n.*0\.10 +finished", done.stdout), done.stdout


@pytest.mark.slow
def test_the_notebook_runs_and_updates_its_progress_bar_in_place(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(repository / "docs" / "notebook.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "it is kept without what it has printed"
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path / "work"}}).execute()
    composed, trained, loaded, predicted, swept, table = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    bars = [one for one in trained if "<progress" in one.get("data", {}).get("text/html", "")]
    assert len(bars) == 1
    assert "88/88" in bars[0].data["text/plain"]
    assert "is_new=True" in trained[-1].data["text/plain"]
    assert any("valid/accuracy" in str(one.get("data") or one.get("text")) and "(best)" in str(one) for one in trained)
    found, true = (re.findall(r"\d", row) for row in re.findall(r"\[[\d, ]+\]", loaded[-1].data["text/plain"]))
    assert sum(one == other for one, other in zip(found, true, strict=True)) >= 6
    assert "'class': '0'" in predicted[-1].data["text/plain"]
    assert swept[-1].data["text/plain"].count("finished") == 2
    assert table[-1].data["text/plain"].count("resnet18_digits") == 3
    assert "resnet18_digits" in composed[-1].data["text/plain"]
