"""`make test-changed` runs the tests that a change can affect."""

import ast
import random
from pathlib import Path

import pytest
import samewise_changed as changed


@pytest.mark.parametrize("file", ["pyproject.toml", "tests/conftest.py", "requirements.lock", "of_a_new_kind.txt"])
def test_all_tests_are_run_in_case_of_doubt(file: str) -> None:
    assert changed.affected_tests([file, "docs/architecture.md"]) == ["tests"]


def test_every_test_that_imports_a_changed_module_is_run(repository: Path) -> None:
    """Compared with what Python's own parser finds, for some modules."""
    imports: dict[str, set[str]] = {}
    for path in (repository / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
                    imports.setdefault(name, set()).add(path.relative_to(repository).as_posix())
    modules = sorted(path.relative_to(repository) for top in changed.PARTS for path in (repository / top).rglob("*.py") if path.name != "__init__.py")
    for module in random.Random(0).sample(modules, 6):
        expected = imports.get(changed.module_of(module.as_posix()), set())
        assert expected <= set(changed.affected_tests([module.as_posix()])), module
