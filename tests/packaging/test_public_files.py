"""What a public project has beside its code: citation, policies, image, CI and hooks say what is true of this checkout."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import samewise

FILES = ("CITATION.cff", "CONTRIBUTING.md", "Dockerfile", "SECURITY.md", ".dockerignore", ".pre-commit-config.yaml")


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version(repository: Path, project: dict[str, Any]) -> None:
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (samewise.__version__, project["license"])


def test_ci_runs_the_script_with_each_python_that_is_declared(repository: Path, project: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((repository / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    declared = [match[1] for one in project["classifiers"] if (match := re.search(r":: Python :: (3\.\d+)$", one))]
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
