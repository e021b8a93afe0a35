"""The lock file, the versions, the licence and the package folders are consistent."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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
