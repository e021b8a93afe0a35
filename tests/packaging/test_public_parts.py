"""What is public is listed once, and code in docs and examples uses nothing private; imports go in one direction, without cycles, and `make lint` finds one that does not."""

import ast
import os
import re
import shutil
import subprocess
import sys
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


FOLDERS = ("runner", "recipes", "datasets", "configs", ".package", "tests/packaging/lint_imports.sh", "pyproject.toml")


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    for name in FOLDERS:
        source, target = repository / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return tmp_path


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    return subprocess.run(["tests/packaging/lint_imports.sh"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_contracts_are_kept_even_with_bytecode_folders(checkout: Path) -> None:
    (checkout / "runner" / "__pycache__").mkdir()
    (checkout / "runner" / "renamed" / "__pycache__").mkdir(parents=True)
    done = lint(checkout)
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {  # in a file, with the message about it
    "runner/records/trace.py": ("from samewise.runner.training.loop import fit", "samewise.runner.records.trace -> samewise.runner.training.loop"),
    "runner/data/order.py": ("from samewise.runner.data import loading", "No cycles are allowed in samewise.runner.data"),
    "runner/training/same_bits/portable.py": (
        "from samewise.runner.training.run import Run",
        "samewise.runner.training.same_bits.portable -> samewise.runner.training.run",
    ),
    "runner/sweeps/results.py": ("from samewise.runner.sweeps.report import rows", "samewise.runner.sweeps.results -> samewise.runner.sweeps.report.rows"),
    "runner/optim/build.py": ("from samewise.recipes import classification", "samewise.runner.optim.build -> samewise.recipes.classification"),
    "recipes/vocoder.py": ("from samewise.runner.precision import Precision", "samewise.recipes.vocoder -> samewise.runner.precision"),
}


@pytest.mark.parametrize("head", ["def planted():", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"], ids=["lazy", "for types"])
def test_a_planted_import_of_each_kind_is_found(checkout: Path, head: str) -> None:
    for file, (line, _) in PLANTED.items():
        with (checkout / file).open("a") as handle:
            handle.write(f"\n\n{head}\n    {line}\n")
    done = lint(checkout)
    assert done.returncode != 0
    for file, (_, said) in PLANTED.items():
        assert said in done.stdout, f"{file}: {done.stdout}"


@pytest.mark.slow
def test_a_module_without_a_place_in_the_order_is_found(checkout: Path) -> None:
    (checkout / "runner" / "attic.py").write_text('"""A room of its own."""\n')
    done = lint(checkout)
    assert done.returncode != 0
    assert "attic" in done.stdout
