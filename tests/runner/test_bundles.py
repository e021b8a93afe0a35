"""A finished run in one file: the same bytes each time, without secrets; trained again it gives the same bits, or the first difference is named."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import DIGITS

from samewise.runner.bundles import archive, rebuilding

TINY = (*DIGITS, "model.width=4", "max_steps=3")
DATA = """
from pathlib import Path

from samewise.datasets.generated import GeneratedClassification

from bundled_lab.scale import FACTOR

class Rooted(GeneratedClassification):
    def __init__(self, root, **given):
        super().__init__(**given)
        self.word = Path(root, "word.txt").read_text() * FACTOR

    def fingerprint(self):
        return self.word
"""
TOKEN = "hf-token-of-mine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a package, data, a finished run in `runs` and its bundle, `one.bundle`."""
    from samewise.runner.cli import main

    home = tmp_path_factory.mktemp("bundled") / "project"
    for name, text in {
        "pyproject.toml": '[tool.samewise]\npackages = ["bundled_lab"]\nconfigs = "configs"\n',
        "bundled_lab/__init__.py": "",
        "bundled_lab/data.py": DATA,
        "bundled_lab/scale.py": "FACTOR = 2\n",
        "bundled_lab/api_secret.json": TOKEN,
        "bundled_lab/notes.txt": f"-----BEGIN PRIVATE KEY-----\n{TOKEN}\n-----END PRIVATE KEY-----\n",
        "configs/tracking/ours.yaml": f"enabled: false\ntags: {{api_key: {TOKEN}}}\n",
        "configs/tracking/theirs.yaml": "enabled: false\n",
        "data/word.txt": "digits",
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    before, path = Path.cwd(), list(sys.path)
    os.chdir(home)
    try:
        own = ("dataset.train._target_=bundled_lab.data.Rooted", f"+dataset.train.root={home}/data")
        assert main(["train", *TINY, *own, "name=one", f"+tracking.tags.api_key={TOKEN}"]) == 0
        assert main(["bundle", *map(str, Path("runs").glob("one/*")), "--out", "one.bundle", "--with-weights"]) == 0
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("bundled_lab")]:
            del sys.modules[name]
    return home


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder, with the bundle and nothing of the project."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "one.bundle", tmp_path)
    return tmp_path


def test_a_bundle_has_the_same_bytes_each_time_and_overwrites_nothing(samewise: Callable[..., Any], home: Path, tmp_path: Path) -> None:
    run = next((home / "runs" / "one").iterdir())
    done = samewise("bundle", run, "--out", tmp_path / "again.bundle", "--with-weights", "--json", code=0)
    assert (tmp_path / "again.bundle").read_bytes() == (home / "one.bundle").read_bytes()
    said = json.loads(done.stdout)
    with tarfile.open(tmp_path / "again.bundle") as opened:
        manifest = opened.extractfile("manifest.json")
        assert manifest is not None
        assert hashlib.sha256(manifest.read()).hexdigest() == said["identity"]
        assert {(member.mode, member.mtime, member.uid, member.type) for member in opened} == {(0o644, 0, 0, tarfile.REGTYPE)}
    done = samewise("bundle", run, "--out", tmp_path / "again.bundle", code=2)
    assert "is not overwritten" in done.stderr


def test_a_bundle_has_what_is_needed_and_no_secret(made: Path, tmp_path: Path) -> None:
    contents = archive.unpack(made / "one.bundle", tmp_path / "parts")
    assert {"code/bundled_lab/data.py", "code/bundled_lab/scale.py", "code/pyproject.toml", "own/samewise/runner/cli.py"} <= contents.parts.keys()
    assert {
        f"run/{name}" for name in ("config.yaml", "environment.json", "sources.json", "summary.json", "trace.jsonl", "metrics.jsonl")
    } <= contents.parts.keys()
    assert not {name for name in contents.parts if "secret.json" in name or "notes.txt" in name or "ours.yaml" in name}
    assert "code/project_configs/tracking/theirs.yaml" in contents.parts
    assert TOKEN.encode() not in (made / "one.bundle").read_bytes()
    facts, data = (json.loads((tmp_path / "parts" / name).read_text()) for name in ("bundle.json", "data.json"))
    assert facts["steps"] == 3
    assert data["files"] == {"dataset.train.root": {"word.txt": {"bytes": 6, "sha256": hashlib.sha256(b"digits").hexdigest()}}}
    pins = rebuilding.read_pins((tmp_path / "parts" / "requirements.txt").read_text())
    assert {"torch", "hydra-core", "mlflow"} <= {pin.partition("==")[0] for pin in pins}


@pytest.mark.slow
def test_a_run_whose_code_has_changed_is_not_bundled(samewise: Callable[..., Any], home: Path, tmp_path: Path) -> None:
    file = home / "bundled_lab" / "scale.py"
    before = file.read_text()
    file.write_text("FACTOR = 3\n")
    try:
        done = samewise("bundle", next((home / "runs" / "one").iterdir()), "--out", tmp_path / "other.bundle")
    finally:
        file.write_text(before)
    assert done.returncode == 2
    assert "bundled_lab/scale.py has changed" in done.stderr
    assert not (tmp_path / "other.bundle").exists()


def test_a_trusted_bundle_gives_the_same_bits_and_an_untrusted_one_is_not_run(samewise: Callable[..., Any], elsewhere: Path) -> None:
    done = samewise("reproduce", "one.bundle", "--here", code=4)
    assert "one.bundle: is intact, but nothing was run" in done.stderr
    assert "bundled_lab" in done.stderr
    assert "--trust" in done.stderr
    assert "bundled_lab" not in sys.modules
    done = samewise(
        "reproduce",
        "one.bundle",
        "--here",
        "--trust",
        "--expect",
        archive.unpack(elsewhere / "one.bundle", elsewhere / "parts").identity,
        "--out",
        "kept",
        code=0,
    )
    assert "the same bits: 3 of 3 steps compared, weights" in done.stdout
    assert (elsewhere / "kept" / "run" / "trace.jsonl").is_file()
    assert samewise("reproduce", "one.bundle", "--here", "--trust", "--out", "kept").returncode == 2


@pytest.mark.slow
def test_a_difference_is_reported_with_its_stage(samewise: Callable[..., Any], elsewhere: Path) -> None:
    done = samewise("reproduce", "one.bundle", "--here", "--trust", "--json", "optimizer.weight_decay=0.1", code=1)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)["parts"]["stage"] == "weights"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_bundle_can_be_reproduced_in_a_new_environment(elsewhere: Path, clean_environment: dict[str, str]) -> None:
    """Installs torch and everything else again, from the package index that pip is configured for: gigabytes."""
    command = [sys.executable, "-m", "samewise", "reproduce", "one.bundle", "--trust", "--out", "kept"]
    done = subprocess.run(command, env=clean_environment, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip(f"no package index that has all packages: {done.stderr.splitlines()[-2]}")
    assert done.returncode == 0, done.stderr
    assert "the same bits: 3 of 3 steps compared, weights" in done.stdout
    assert (elsewhere / "kept" / "environment" / "bin" / "python").exists()
