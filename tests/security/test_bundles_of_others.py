"""A bundle that was tampered with is refused, with the name of the part, before anything of it is used; a hostile one writes nothing outside its folder."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.bundles import archive
from samewise.runner.errors import ConfigError

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def parts(repository: Path) -> dict[str, bytes]:
    """Of a run that is kept among the tests, and some code."""
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


def written(into: Path, found: Members) -> Path:
    """An archive of just these, sound as such."""
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as opened:
        for name, content in found:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            opened.addfile(info, io.BytesIO(content))
    return into


def told(file: Path, into: Path, **given: Any) -> str:
    """What is said of a bundle, of which nothing may be left."""
    with pytest.raises(ConfigError) as refused:
        archive.unpack(file, into, **given)
    assert not into.exists()
    return str(refused.value)


def flipped(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.choice([number for number, (_, content) in enumerate(found) if content])
    name, content = found[at]
    place = chance.randrange(len(content))
    return [*found[:at], (name, content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]), *found[at + 1 :]], {name}


def removed(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.randrange(len(found))
    return [*found[:at], *found[at + 1 :]], {found[at][0]}


def added(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    name = chance.choice(["code/lab/more.py", "code/sitecustomize.py", "own/samewise/__init__.py", "run/.signature"])
    at = chance.randrange(2, len(found) + 1)
    return [*found[:at], (name, b"import os\n"), *found[at:]], {name}


def renamed(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.randrange(2, len(found))
    name = found[at][0] + chance.choice([".bak", "2"])
    return [*found[:at], (name, found[at][1]), *found[at + 1 :]], {found[at][0], name}


def swapped(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    one, two = chance.sample([number for number, (_, content) in enumerate(found) if number > 1 and content], 2)
    new = list(found)
    new[one], new[two] = (found[one][0], found[two][1]), (found[two][0], found[one][1])
    return new, {found[one][0], found[two][0]}


def doubled(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    name = found[chance.randrange(2, len(found))][0]
    return [*found, (name, b"another")], {name}


def cut_short(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    at = chance.choice([number for number, (_, content) in enumerate(found) if number > 1 and content])
    return [*found[:at], (found[at][0], found[at][1][:-1]), *found[at + 1 :]], {found[at][0]}


def listed_otherwise(found: Members, chance: random.Random) -> tuple[Members, set[str]]:
    """The manifest altered by itself: a digest, a size's name, a part that is not there."""
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


KINDS = (flipped, removed, added, renamed, swapped, doubled, cut_short, listed_otherwise)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_was_tampered_with_is_named(bundle: Path, tmp_path: Path, kind: Callable[[Members, random.Random], tuple[Members, set[str]]], seed: int) -> None:
    found, names = kind(members(bundle), random.Random(seed))
    said = told(written(tmp_path / "b", found), tmp_path / "out")
    assert all(f"{tmp_path / 'b'}: {name}: " in said for name in names), said


def test_any_flipped_byte_is_noticed_wherever_it_is_in_the_file(bundle: Path, tmp_path: Path) -> None:
    raw, chance = bundle.read_bytes(), random.Random(0)
    for place in [*range(0, 3 * 512, 37), *chance.sample(range(len(raw)), 150), len(raw) - 1]:
        (tmp_path / "b").write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        told(tmp_path / "b", tmp_path / "out")


def test_a_file_that_was_cut_off_or_continued_is_noticed(bundle: Path, tmp_path: Path) -> None:
    raw = bundle.read_bytes()
    for other in (b"", raw[:100], raw[:512], raw[: len(raw) // 2], raw[:-512], raw + b"\0" * 512, raw + raw):
        (tmp_path / "b").write_bytes(other)
        told(tmp_path / "b", tmp_path / "out")


def test_parts_and_manifest_altered_together_are_known_by_the_identity(bundle: Path, parts: dict[str, bytes], tmp_path: Path) -> None:
    identity = archive.unpack(bundle).identity
    archive.write(tmp_path / "b", {**parts, "run/config.yaml": b"seed: 1\n"})
    assert archive.unpack(tmp_path / "b").identity != identity
    assert "not the bundle that was expected" in told(tmp_path / "b", tmp_path / "out", expect=identity)


@pytest.mark.parametrize(
    "name", ["../outside.py", "/tmp/outside.py", "code/../../outside.py", "code//x.py", "code/./x.py", "run/config.yaml/inner", "a\\b", "a\nb", ""]
)
def test_a_part_has_its_place_below_the_folder(tmp_path: Path, name: str) -> None:
    archive.write(tmp_path / "b", {name: b"import os\n", "run/config.yaml": b""})
    told(tmp_path / "b", tmp_path / "in" / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) in (["b"], ["b", "in"])


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_devices_and_holes_are_no_parts(bundle: Path, tmp_path: Path, kind: bytes) -> None:
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
    assert "run/config.yaml" in told(tmp_path / "b", tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "untouched"


def test_a_header_that_claims_too_much_takes_no_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("manifest.json")
    info.size, info.mode = 1 << 40, 0o644
    (tmp_path / "b").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + b"{}")
    assert "manifest.json" in told(tmp_path / "b", tmp_path / "out")


def test_what_is_no_bundle_is_said_to_be_none(samewise: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "b").write_text("hello")
    for arguments in (("reproduce", tmp_path / "b"), ("verify", tmp_path / "b"), ("reproduce", tmp_path / "none")):
        done = samewise(*arguments)
        assert done.returncode == 2
        assert "samewise bundle" in done.stderr or "does not exist" in done.stderr


def test_a_tampered_bundle_is_refused_by_the_command_though_it_is_trusted(samewise: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    found, _ = added(members(bundle), random.Random(0))
    done = samewise("reproduce", written(tmp_path / "b", found), "--trust", "--here")
    assert done.returncode == 2
    assert "was added: the manifest does not name it" in done.stderr
