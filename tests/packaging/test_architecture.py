"""docs/architecture.md has a line for each folder, and the decisions have their places."""

import re
from pathlib import Path


def folders(folder: Path) -> set[str]:
    """Those with a file: a renamed room leaves its bytecode behind."""
    return {path.name for path in folder.iterdir() if any(path.glob("*.*")) and not path.name.startswith(("__", "."))}


def test_every_folder_has_its_line_and_every_line_its_folder(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text()
    lines = re.findall(r"^    ( *)([.\w]+)/ +\S", text, re.MULTILINE)
    rooms = [name for indent, name in lines if not indent]
    inner = {name for indent, name in lines if indent}
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {"configs", "recipes", "datasets", "runner", "docs", "examples", "tests", ".package"} | folders(repository / "runner")
    assert inner == folders(repository / "runner" / "training")


def test_every_decision_is_listed_and_fits_a_page(repository: Path) -> None:
    pages = {path.name: path.read_text() for path in (repository / "docs" / "decisions").glob("*.md")}
    index = pages.pop("README.md")
    assert set(re.findall(r"\((\w+\.md)\)", index)) == set(pages)
    assert {name for name, text in pages.items() if len(text.split()) > 200} == set()
