"""What is remembered of large folders equals what they hold, whatever has changed meanwhile."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from samewise.datasets.parts import listings
from samewise.datasets.parts.folders import IMAGES, list_by_class, list_files

DAY_NS = 86_400 * 10**9


@pytest.fixture
def scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are listed on disk from now on, a day after their last change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(listings, "_LEAST_FILES", 1)
    monkeypatch.setattr(listings.time, "time_ns", lambda now=time.time_ns: now() + DAY_NS)
    scanned, scan = [], listings._scan
    monkeypatch.setattr(listings, "_scan", lambda path, endings: scanned.append(path) or scan(path, endings))
    return scanned


def filled(root: Path) -> Path:
    for name in ("a/1.png", "a/2.PNG", "a/\udcff.jpg", "a/deep/3.png", "b/4.png", "b/notes.txt", "b/.5.png", "c/none"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def change(root: Path, chance: random.Random) -> None:
    """Add, remove or rename a file, a folder or a link."""
    paths = sorted(root.rglob("*"))
    path, name = chance.choice(paths), f"{chance.randrange(1000)}{chance.choice(['.png', '.txt', ''])}"
    place = path if path.is_dir() else path.parent
    kind = chance.randrange(5)
    if kind == 0:
        (place / name).touch()
    elif kind == 1:
        (place / f"folder{name}").mkdir(exist_ok=True)
    elif kind == 2 and path.parent != root:
        path.rename(path.with_name(name))
    elif kind == 3 and path.parent != root:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    elif kind == 4:
        (place / f"link{name}").symlink_to(root.parent / "target")


def test_after_any_changes_a_listing_equals_one_without_a_cache(tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root, chance = filled(tmp_path / "data"), random.Random(3)
    for _ in range(60):
        time.sleep(0.01)  # more than the granularity of the file system's times
        change(root, chance)
        target = tmp_path / "target"
        (target.rmdir if target.exists() else target.mkdir)()
        kept = list_by_class(root, ["a", "b", "c"]), list_files(root, IMAGES)
        with monkeypatch.context() as without:
            without.setenv("XDG_CACHE_HOME", os.devnull)
            assert kept == (list_by_class(root, ["a", "b", "c"]), list_files(root, IMAGES))


def test_a_second_start_lists_nothing_and_damage_a_bucket_or_a_recent_change_lists_again(
    tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed() -> int:
        scanned.clear()
        assert len(list_by_class(root, ["a", "b", "c"]).labels) == 5
        return len(scanned)

    root = filled(tmp_path / "data")
    assert [listed(), listed()] == [4, 0]
    (file,) = (tmp_path / "cache/samewise/listings").iterdir()
    for damage in (b"", file.read_bytes()[:-9], b"[]", file.read_bytes().replace(b"2.PNG", b"3.PNG")):
        file.write_bytes(damage)
        assert [listed(), listed()] == [4, 0]
    file.unlink()
    place = os.stat(root).st_dev
    (tmp_path / "mounts").write_text(f"22 1 {os.major(place)}:{os.minor(place)} / / rw shared:1 - fuse.gcsfuse bucket rw\n")
    with monkeypatch.context() as bucket:  # its folders have no times of their own
        bucket.setattr(listings, "_MOUNTS", tmp_path / "mounts")
        assert [listed(), listed()] == [4, 4]
    monkeypatch.setattr(listings.time, "time_ns", lambda now=time.time_ns: now() - DAY_NS)
    assert [listed(), listed()] == [4, 4]
