"""docs/design.md shows the tree as it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tree(repository: Path) -> str:
    text = (repository / "docs" / "design.md").read_text()
    return text[text.index("## The tree") : text.index("### One direction")]


def test_every_folder_of_the_runner_is_shown_and_no_other(repository: Path, tree: str) -> None:
    drawn = set(re.findall(r"^    ([a-z]+)/\s", tree[tree.index("The top of `runner/`") :], flags=re.MULTILINE))
    rooms = {path.name for path in (repository / "runner").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert drawn == rooms


def test_every_named_file_exists(repository: Path, tree: str) -> None:
    named = set(re.findall(r"\b(\w+\.py)\b", tree)) - {"NAME.py"}
    files = {path.name for folder in ("runner", "recipes", "datasets", "tests") for path in (repository / folder).rglob("*.py")}
    assert len(named) > 40
    assert named <= files, named - files


def test_the_order_of_the_layers_matches_the_import_contracts(repository: Path) -> None:
    text = (repository / "docs" / "design.md").read_text()
    shown = next(line.strip() for line in text.splitlines() if line.startswith("    cli > "))
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    assert [set(re.findall(r"\w+", layer)) for layer in shown.split(" > ")] == layers
