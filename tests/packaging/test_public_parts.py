"""What is public is listed once; every other room says that it is private, and the code in docs and examples uses nothing private."""

import ast
import re
from pathlib import Path

import pytest
from samewise_docs_pages import PAGES, blocks

import samewise.runner

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = set(re.findall(r"`([a-z_.]+)`", samewise.runner.__doc__ or ""))


def test_every_room_is_listed_as_public_or_says_that_it_is_private(repository: Path) -> None:
    rooms = {path.parent.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in (repository / "runner").glob("*/__init__.py")}
    assert {name for name, text in rooms.items() if "Private: it may change at any time." not in text} == rooms.keys() & PUBLIC
    missing = {name for name in PUBLIC if not (repository / "runner" / name.replace(".", "/")).with_suffix(".py").exists() and name not in rooms}
    assert not missing


def private_imports(code: str) -> list[str]:
    """The modules of the runner that code imports and that are not public."""
    named = set[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "samewise.runner":
            named |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named.add(node.module)
        elif isinstance(node, ast.Import):
            named |= {one.name for one in node.names}
    inner = [name.removeprefix("samewise.runner.") for name in named if name.startswith("samewise.runner.")]
    return [name for name in inner if not any(name == public or name.startswith(f"{public}.") for public in PUBLIC)]


PROJECTS = [path for folder in ("examples", "runner/commands/starter", "docs/examples") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_projects_to_copy_import_what_is_public(path: Path) -> None:
    assert not private_imports(path.read_text())


@pytest.mark.parametrize("page", sorted(PAGES))
def test_code_on_pages_imports_what_is_public(page: str) -> None:
    for block in blocks(PAGES[page].read_text()):
        if block.language == "python":
            assert not private_imports(block.text)


def test_a_private_import_is_found() -> None:
    assert private_imports("from samewise.runner.training.loop import fit") == ["training.loop"]
    assert private_imports("from samewise.runner import records") == ["records"]
