"""The index of a run root changes no answer, whatever happens to the runs or to itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.records import header, index
from samewise.runner.records.files import write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import below, find
from samewise.runner.runs import notes
from samewise.runner.runs.listing import ListedRun, list_runs, read_run, setting, setting_lines

CONFIG = "seed: {}\nevaluate:\n  monitor: valid/loss\n  mode: min\n"


def make_run(root: Path, name: str, seed: int) -> RunFolder:
    (folder := RunFolder(root / name)).create()
    folder.config.write_text(header.write({"optimizer": "sgd"}, f"seed={seed}") + CONFIG.format(seed))
    return folder


def finish(folder: RunFolder, loss: float) -> None:
    results = {"final": {"valid/loss": loss}, "best": {"valid/loss": loss, "step": 5}, "monitor": "valid/loss"}
    timings = {"training_s": 1.0, "step_ms": 1.0}
    write_json(folder.summary, {"status": "finished", "level": "R2", "weights_sha256": "0" * 64, "steps": 5, "metrics": results, "timings": timings})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed in range(6):
        finish(make_run(tmp_path / "runs", f"some{seed % 2}/{seed}a", seed), seed / 10)
    return tmp_path / "runs"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was just written is stored at once."""
    monkeypatch.setattr(index, "_SETTLED_NS", 0)


def read_without(root: Path) -> list[tuple[ListedRun, Any]]:
    runs = sorted(map(read_run, below(root)), key=lambda run: run.changed)
    return [(run, int((Path(run.folder) / "config.yaml").read_text().split("seed: ")[1].split("\n")[0])) for run in runs]


def read_with(root: Path) -> list[tuple[ListedRun, Any]]:
    runs = list_runs(root)
    lines = setting_lines(root, [run.folder for run in runs])
    return [(run, setting(lines[run.folder], "seed")) for run in runs]


def plain(runs: list[tuple[ListedRun, Any]]) -> list[Any]:
    return [(run.facts(), seed) for run, seed in runs]


def rewrite_in_the_same_second(folder: RunFolder, draw: random.Random) -> None:
    """Another seed, in a file that keeps its size, its number and its time."""
    state, text = folder.config.stat(), folder.config.read_text()
    folder.config.write_text(text.replace(text[text.index("seed: ") + 6], str(draw.randrange(10))))
    os.utime(folder.config, ns=(state.st_atime_ns, state.st_mtime_ns))


def log(folder: RunFolder, draw: random.Random) -> None:
    line = {"time_ms": 1, "step": draw.randrange(9), "metrics": {"valid/loss": draw.random()}}
    with open(folder.metrics, "a") as journal:
        journal.write(json.dumps(line) + "\n")


def swap(folder: RunFolder, other: RunFolder) -> None:
    folder.path.rename(aside := folder.path.with_name("aside"))
    if other.path.exists():
        other.path.rename(folder.path)
    aside.rename(other.path)


CHANGES: dict[str, Callable[[RunFolder, RunFolder, random.Random], Any]] = {
    "train": lambda folder, other, draw: (folder.summary.unlink(missing_ok=True), log(folder, draw)),
    "finish": lambda folder, other, draw: finish(folder, draw.random()),
    "fail": lambda folder, other, draw: (folder.summary.unlink(missing_ok=True), write_json(folder.failure, {"error": f"OSError: {draw.random()}"})),
    "resume": lambda folder, other, draw: folder.failure.unlink(missing_ok=True),
    "rename": lambda folder, other, draw: notes.rename(folder, f"n{draw.random()}"),
    "tag": lambda folder, other, draw: notes.tag(folder, [f"a={draw.random()}"]),
    "touch": lambda folder, other, draw: os.utime(folder.config, (draw.randrange(10**9),) * 2),
    "rewrite": lambda folder, other, draw: rewrite_in_the_same_second(folder, draw),
    "delete": lambda folder, other, draw: shutil.rmtree(folder.path),
    "copy": lambda folder, other, draw: subprocess.run(["cp", "-a", f"{folder.path}/.", other.path], check=True),
    "swap": lambda folder, other, draw: swap(folder, other),
    "anew": lambda folder, other, draw: (shutil.rmtree(folder.path), make_run(folder.path.parents[1], f"some0/{draw.randrange(9)}a", draw.randrange(10))),
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("seed", range(4))
def test_after_any_changes_the_list_is_as_without_an_index(root: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        folders = below(root) or [make_run(root, "some0/1a", 1)]
        name = draw.choice([*CHANGES])
        CHANGES[name](draw.choice(folders), RunFolder(root / f"some1/{draw.randrange(9)}b"), draw)
        # Another tick of the clock, as the rule for young files is switched off
        time.sleep(0.02)
        assert plain(read_with(root)) == plain(read_without(root)), name
        assert stored(root) == ({("run", len(left)), ("settings", len(left))} if (left := below(root)) else set())


def test_what_changed_a_moment_ago_is_not_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(read_with(root))
    assert not (root / index.FILE).exists()
    monkeypatch.setattr(index.time, "time_ns", lambda now=time.time_ns: now() + 3 * 10**9)
    assert plain(read_with(root)) == expected
    assert stored(root) == {("run", 6), ("settings", 6)}


def stored(root: Path) -> set[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(root / index.FILE)) as connection:
        return {*connection.execute("SELECT kind, count(*) FROM entries GROUP BY kind")}


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


def spoil(file: Path, position: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[position : position + 200] = bytes(200)
    file.write_bytes(raw)


def replace_table(file: Path) -> None:
    file.unlink()
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE entries (other)")


def lie(file: Path) -> None:
    """As a crash, or two writers where locks do nothing, may leave a content: another's."""
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE entries SET content = (SELECT max(content) FROM entries AS x WHERE x.kind = entries.kind)")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "its head is gone": lambda file: spoil(file, 0),
    "a page is damaged": lambda file: spoil(file, 4096),
    "contents are mixed up": lie,
    "it is text": lambda file: file.write_text("no index" * 99),
    "it is empty": lambda file: file.write_bytes(b""),
    "its table is another": replace_table,
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_changes_nothing_and_is_replaced(root: Path, damage: str) -> None:
    expected = plain(read_with(root))
    DAMAGES[damage](root / index.FILE)
    assert plain(read_with(root)) == expected
    assert plain(read_with(root)) == expected
    assert stored(root) == {("run", 6), ("settings", 6)}


@pytest.mark.usefixtures("settled")
def test_an_index_that_cannot_be_used_is_left_as_it_is(root: Path, tmp_path: Path) -> None:
    expected, file = plain(read_with(root)), root / index.FILE
    content = file.read_bytes()
    for using in (locked(file), read_only(file)):
        with using:
            assert plain(read_with(root)) == expected
            finish(make_run(root, "some0/0a", 0), 0.0)
            expected = plain(read_without(root))
            assert plain(read_with(root)) == expected
        assert file.read_bytes() == content
    file.rename(tmp_path / "somebody's")
    for make in (lambda: file.symlink_to(tmp_path / "somebody's"), lambda: os.mkfifo(file), file.mkdir):
        make()
        assert plain(read_with(root)) == expected
        assert (tmp_path / "somebody's").read_bytes() == content
        file.rmdir() if file.is_dir() else file.unlink()


@contextlib.contextmanager
def read_only(file: Path) -> Iterator[None]:
    """As for a user who may not write there; for root, no file is read-only."""
    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda name, **settings: connect(f"file:{name}?mode=ro", uri=True, **settings))
        yield


def test_several_processes_use_one_index_at_once(root: Path) -> None:
    expected = [(run.folder, run.value) for run in list_runs(root)]
    program = (
        "import sys; from pathlib import Path; from samewise.runner.records import index; from samewise.runner.runs.listing import list_runs\n"
        "index._SETTLED_NS = 0\n"
        "for turn in range(40):\n"
        "    if turn % 5 == int(sys.argv[2]): Path(sys.argv[1], index.FILE).unlink(missing_ok=True)\n"
        "    listed = [(run.folder, run.value) for run in list_runs(Path(sys.argv[1]))]\n"
        f"    assert listed == {expected!r}, listed"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, root, str(number)]) for number in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]


def test_a_name_opens_no_run_and_an_id_each_run_once(root: Path, settled: None) -> None:
    for number, folder in enumerate(below(root)):
        write_json(folder.tracking, {"run_id": f"{number:032x}"})
    opened = list[str]()
    open_file = os.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", lambda path, *rest: (opened.append(Path(path).name), open_file(path, *rest))[1])
        assert find("3a", run_root=root).path == root / "some1/3a"
        assert opened == []
        for number in (1, 4):
            assert find(f"{number:032x}", run_root=root) == below(root)[number]
        assert opened == ["tracking.json"] * 6
