"""What a public project has beside its code, lock files, versions, wheel, citation, image and CI, says what is true of this checkout."""

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import samewise_changed as changed
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import samewise

PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ;]+)( ; [^\\]+)? \\$")


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock(repository: Path) -> list[str]:
    return (repository / "requirements.lock").read_text().splitlines()


@pytest.fixture(scope="module")
def oldest(repository: Path) -> list[str]:
    """The lock of `make test-oldest`."""
    return (repository / ".ci" / "oldest.lock").read_text().splitlines()


def test_the_locks_contain_no_address(lock: list[str], oldest: list[str]) -> None:
    assert [line for line in [*lock, *oldest] if "://" in line or " @ " in line or line.startswith("-")] == []


def test_the_oldest_packages_are_the_lowest_that_are_declared(project: dict[str, Any], oldest: list[str]) -> None:
    locked = {match["name"]: match["version"] for match in filter(None, map(PIN.match, oldest))}
    extra = project["project"]["optional-dependencies"]["sweep"]
    for one in map(Requirement, [*project["project"]["dependencies"], *extra]):
        (lowest,) = (bound.version for bound in one.specifier if bound.operator == ">=")
        assert Version(locked[one.name]) in one.specifier
        assert Version(locked[one.name]).release[: len(Version(lowest).release)] == Version(lowest).release


def test_no_package_can_shadow_a_package_named_datasets(repository: Path) -> None:
    folders = [repository / "datasets", repository / "tests", *(path for path in (repository / "tests").rglob("datasets") if path.is_dir())]
    assert [path for path in folders if (path / "__init__.py").exists()] == []


def test_the_links_of_the_editable_package_lead_to_the_four_folders(repository: Path) -> None:
    links = {path.name: path.resolve() for path in (repository / ".package" / "samewise").iterdir() if path.is_symlink()}
    assert links == {name: repository / name for name in ("configs", "recipes", "runner", "datasets")}


FOLDERS = ("configs", "recipes", "runner", "datasets")


@pytest.fixture(scope="module")
def names(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(repository)]
    subprocess.run(command, check=True, timeout=60)
    (wheel,) = folder.glob("samewise-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_four_folders_and_the_starter_and_nothing_more(repository: Path, names: set[str]) -> None:
    files = {path for folder in FOLDERS for ending in ("py", "yaml") for path in (repository / folder).rglob(f"*.{ending}")}
    files |= {path for path in (repository / "runner" / "commands" / "starter").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {f"samewise/{path.relative_to(repository)}" for path in files}
    packaged = {name for name in names if name.startswith("samewise/")}
    assert packaged == expected | {"samewise/__init__.py", "samewise/__main__.py"}


def test_the_citation_is_of_this_version(repository: Path, project: dict[str, Any]) -> None:
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (samewise.__version__, project["project"]["license"])


def test_ci_runs_the_script_with_each_python_that_is_declared(repository: Path, project: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((repository / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    declared = [match[1] for one in project["project"]["classifiers"] if (match := re.search(r":: Python :: (3\.\d+)$", one))]
    assert job["strategy"]["matrix"]["python"] == declared
    assert job["steps"][-1]["run"] == ".ci/run"


def builder() -> list[str] | None:
    """The command of a program here that builds images, if its daemon runs."""
    for name, is_there in (("docker", ("info",)), ("podman", ("info",)), ("buildah", ("info",))):
        if shutil.which(name) and subprocess.run([name, *is_there], capture_output=True, check=False).returncode == 0:
            return [name, "build"]
    return None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_image_trains(repository: Path, tmp_path: Path) -> None:
    command = builder()
    if command is None:
        pytest.skip("no builder of images that runs: docker, podman or buildah")
    subprocess.run([*command, "-t", "samewise-test", str(repository)], check=True)
    if command[0] == "buildah":
        return
    run = [command[0], "run", "--rm", "--network", "none", "samewise-test", "train", "experiment=resnet18_digits", "debug=tiny", "tracking=none"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


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


TARGETS = {
    *("help", "install", "demo", "docs", "test", "test-changed", "test-all", "test-slow", "test-oldest", "test-newest", "test-variants", "lint", "types"),
    *("format", "bench", "bench-growth", "lock", "mutants", "faults", "fuzz", "gpu", "clean"),
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
