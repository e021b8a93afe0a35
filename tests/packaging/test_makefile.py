"""The Makefile explains itself, and makes an environment only where it can."""

import ast
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import samewise_changed as changed

TARGETS = {
    *("help", "install", "demo", "docs", "test", "test-changed", "test-all", "test-slow", "test-oldest", "test-newest", "test-variants", "lint", "types"),
    *("format", "bench", "lock", "mutants", "faults", "fuzz", "gpu", "clean"),
}


def make(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=repository, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_help_explains_every_target(repository: Path) -> None:
    text = (repository / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert phony is not None
    result = make(repository, "help")
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"^  make (\S+) +\S", result.stdout, re.MULTILINE)) == set(phony[1].split()) == TARGETS


def test_the_ci_script_is_executable_and_runs_the_expected_targets(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    called = re.findall(r"^ *within \w+ ([\w-]+)$", script.read_text(), flags=re.MULTILINE)
    called += [f"test-{name}" for name in re.findall(r"^with_packages (\w+)$", script.read_text(), flags=re.MULTILINE)]
    assert set(called) == {"install", "test", "test-variants", "lint", "types", "test-oldest", "test-newest", "test-slow"}
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_type_check_covers_every_file_of_the_runner(repository: Path) -> None:
    """Pyright says how many files it found before it looks at them, which takes a minute and is the business of `make types`."""
    command = [sys.executable, "-m", "pyright", "--project", ".package", "--stats"]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True, process_group=0) as pyright:
        assert pyright.stdout is not None
        found = next((line for line in pyright.stdout if line.startswith("Found ")), "")
        os.killpg(pyright.pid, signal.SIGKILL)
    assert found == f"Found {len(list((repository / 'runner').rglob('*.py')))} source files\n"


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
