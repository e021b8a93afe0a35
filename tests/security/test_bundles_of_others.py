"""A tampered bundle is refused, naming the part, before any of it is used; a hostile bundle writes nothing outside its folder."""

import hashlib
import io
import json
import platform
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samewise.runner.bundles import archive, rebuilding
from samewise.runner.errors import ConfigError
from samewise.runner.records import trust
from samewise.runner.records.digest import tensor_bytes
from samewise.runner.records.files import write_json
from samewise.runner.records.tensor_file import write_tensors

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def parts(repository: Path) -> dict[str, bytes]:
    """The parts of a run that is kept among the tests, and some code."""
    run = repository / "tests" / "kept" / "run"
    found = {f"run/{name}": (run / name).read_bytes() for name in ("config.yaml", "environment.json", "summary.json", "trace.jsonl")}
    found |= {f"code/lab/{'long_' * 30}{number}.py": f"FACTOR = {number}\n".encode() for number in range(3)}
    return found | {"code/lab/__init__.py": b"", "requirements.txt": b"torch==2.9.0\n", "data.json": b"{}\n", "bundle.json": b"{}\n"}


@pytest.fixture(scope="module")
def bundle(parts: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bundle") / "one.bundle"
    archive.write(file, parts)
    return file


def members(file: Path) -> Members:
    with tarfile.open(file) as opened:
        return [(one.name, opened.extractfile(one).read()) for one in opened]  # type: ignore[union-attr]


def write_archive(into: Path, found: Members) -> Path:
    """Write a well-formed archive of exactly these members."""
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as opened:
        for name, content in found:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            opened.addfile(info, io.BytesIO(content))
    return into


def refusal(file: Path, into: Path, **given: Any) -> str:
    """Return the error message for a bundle, of which nothing may be left on disk."""
    with pytest.raises(ConfigError) as refused:
        archive.unpack(file, into, **given)
    assert not into.exists()
    return str(refused.value)


def flip_a_bit(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.choice([number for number, (_, content) in enumerate(found) if content])
    name, content = found[at]
    place = chance.randrange(len(content))
    return [*found[:at], (name, content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]), *found[at + 1 :]], {
        "manifest.json" if name == "manifest.sha256" else name
    }


def remove_a_part(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.randrange(len(found))
    return [*found[:at], *found[at + 1 :]], {found[at][0]}


def add_a_part(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    name = chance.choice(["code/lab/more.py", "code/sitecustomize.py", "own/samewise/__init__.py", "run/.signature"])
    at = chance.randrange(2, len(found) + 1)
    return [*found[:at], (name, b"import os\n"), *found[at:]], {name}


def rename_a_part(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.randrange(2, len(found))
    name = found[at][0] + chance.choice([".bak", "2"])
    return [*found[:at], (name, found[at][1]), *found[at + 1 :]], {found[at][0], name}


def swap_two_parts(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    one, two = chance.sample([number for number, (_, content) in enumerate(found) if number > 1 and content], 2)
    new = list(found)
    new[one], new[two] = (found[one][0], found[two][1]), (found[two][0], found[one][1])
    return new, {found[one][0], found[two][0]}


def duplicate_a_part(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    name = found[chance.randrange(2, len(found))][0]
    return [*found, (name, b"another")], {name}


def shorten_a_part(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.choice([number for number, (_, content) in enumerate(found) if number > 1 and content])
    return [*found[:at], (found[at][0], found[at][1][:-1]), *found[at + 1 :]], {found[at][0]}


def alter_the_manifest(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    """Alter only the manifest: change a digest, list a missing part, or leave a part out."""
    manifest = json.loads(found[0][1])
    name = chance.choice(sorted(manifest["parts"]))
    kind = chance.randrange(3)
    if kind == 0:
        manifest["parts"][name]["sha256"] = hashlib.sha256(chance.randbytes(4)).hexdigest()
    elif kind == 1:
        manifest["parts"]["code/lab/none.py"] = manifest["parts"][name]
    else:
        del manifest["parts"][name]
    return [(found[0][0], json.dumps(manifest).encode()), *found[1:]], {"manifest.json"}


KINDS = (flip_a_bit, remove_a_part, add_a_part, rename_a_part, swap_two_parts, duplicate_a_part, shorten_a_part, alter_the_manifest)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_part_that_was_tampered_with_is_named(
    bundle: Path, tmp_path: Path, kind: Callable[[Members, random.Random], tuple[Members, set[str]]], seed: int
) -> None:
    found, names = kind(members(bundle), random.Random(seed))
    said = refusal(write_archive(tmp_path / "b", found), tmp_path / "out")
    assert all(f"{tmp_path / 'b'}: {name}: " in said for name in names), said


def test_altering_parts_and_manifest_together_changes_the_identity(bundle: Path, parts: dict[str, bytes], tmp_path: Path) -> None:
    identity = archive.unpack(bundle, tmp_path / "one").identity
    archive.write(tmp_path / "b", {**parts, "run/config.yaml": b"seed: 1\n"})
    assert archive.unpack(tmp_path / "b", tmp_path / "two").identity != identity
    assert "not the bundle that was expected" in refusal(tmp_path / "b", tmp_path / "out", expect=identity)


@pytest.mark.parametrize("name", ["../outside.py", "/tmp/outside.py", "code/../../outside.py", "run/config.yaml/inner", ""])
def test_a_part_with_an_unsafe_path_is_refused(tmp_path: Path, name: str) -> None:
    archive.write(tmp_path / "b", {name: b"import os\n", "run/config.yaml": b""})
    refusal(tmp_path / "b", tmp_path / "in" / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) in (["b"], ["b", "in"])


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_devices_and_sparse_files_are_refused_as_parts(bundle: Path, tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "secret").write_text("untouched")
    found = members(bundle)
    with tarfile.open(tmp_path / "b", "w", format=tarfile.PAX_FORMAT) as opened:
        for name, content in found:
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            if name == "run/config.yaml":
                info.type, info.linkname = kind, str(tmp_path / "secret")
            else:
                info.size = len(content)
            opened.addfile(info, io.BytesIO(content) if info.isreg() else None)
    assert "run/config.yaml" in refusal(tmp_path / "b", tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "untouched"


def test_pip_is_given_versions_without_comments_that_it_would_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip reads such a file in the encoding that its first lines ask for: a comment in UTF-7 was an option, and led to a stranger's index."""
    option = "# -*- coding: utf-7 -*-\n# +AAo---index-url http://127.0.0.1:9/stranger+AAo-\ntorch==2.9.0\n"
    (tmp_path / "requirements.txt").write_text(option)
    given = list[str]()
    monkeypatch.setattr(rebuilding, "run_in_environment", lambda command, name: given.append(Path(command[-1]).read_text() if name == "pip install" else ""))
    rebuilding.make_environment(tmp_path, python=platform.python_version())
    assert given == ["", "torch==2.9.0\n"]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A signed folder as `samewise export` writes it, except for the model in it, which no test here gets as far as running."""
    folder = tmp_path / "export"
    folder.mkdir()
    weight = torch.ones(3)
    write_tensors(folder / "weights.safetensors", {"weight": weight})
    write_tensors(folder / "vectors.safetensors", {"input/image": weight, "output/output": weight})
    (folder / "model.pt2").write_bytes(b"a program")
    described = {
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()},
        "inputs": {"image": {"dtype": "float32", "shape": [3]}},
        "outputs": {"output": {"dtype": "float32", "shape": [3]}},
        "tolerance": 1e-4,
        "weights": {"weight": hashlib.sha256(bytes(tensor_bytes(weight))).hexdigest()},
    }
    write_json(folder / "export.json", described)
    trust.sign(folder / "export.json")
    return folder


DAMAGED = {
    "nothing in it": "{}",
    "empty": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no digests": '{"files": {"model.pt2": 5}, "inputs": {}, "outputs": {}, "tolerance": 0.1, "weights": {}}',
    "a tolerance in words": '{"files": {}, "inputs": {}, "outputs": {}, "tolerance": "all", "weights": {}}',
    "an average that is no name": '{"average": 5, "files": {}, "inputs": {}, "outputs": {}, "tolerance": 0.1, "weights": {}}',
}


@pytest.mark.parametrize("way", DAMAGED)
def test_a_damaged_description_is_named_and_not_signed(samewise, export, way) -> None:
    (export / "export.json").write_text(DAMAGED[way])
    (export / ".export.json.signature").unlink()
    done = samewise("verify", export, "--trust", code=2)
    assert f"{export / 'export.json'}: is damaged: " in done.stderr
    assert not (export / ".export.json.signature").exists()


def test_an_altered_model_is_not_run_even_in_your_own_export(samewise, export) -> None:
    """An AOTInductor package is machine code; any bytes will do here, since they are not examined."""
    (export / "model.pt2").write_bytes(b"altered")
    done = samewise("verify", export, code=1)
    assert "model.pt2 was altered since the export, so it is only run with --trust" in done.stdout


def test_a_received_export_runs_nothing_until_it_is_trusted(samewise, export) -> None:
    said = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps({**said, "tolerance": 0.5}))  # a stranger's own, whose digests all agree
    done = samewise("verify", export, code=2)
    assert "runs the models in the folder" in done.stderr
    for more in (["--trust"], []):  # which is remembered
        done = samewise("verify", export, *more, code=1)
        assert "torch.export cannot run it" in done.stdout
