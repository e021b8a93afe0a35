"""Files of runs and sweeps that a disk, a crash or a stranger has damaged.

Each command that reads one names it and exits as documented, never hangs, and deletes nothing.
"""

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=4", "checkpoint.every_steps=2", "checkpoint.keep_last=9", "callbacks=none")
RUN_FILES = (
    *("config.yaml", "environment.json", "summary.json", "tracking.json", "sources.json", "tags.json", "trace.jsonl", "metrics.jsonl", "system.jsonl", ".lock"),
    *("checkpoints/step-00000004/manifest.json", "checkpoints/step-00000004/state.pt"),
)
SWEEP_FILES = ("sweep.json", "points.jsonl", "jobs/0000.json", ".lock")
CODES = {0, 1, 2}
DEEP = b"[" * 1_000_000
_SECONDS = 60


def _field_of_another_type(raw: bytes, chance: random.Random) -> bytes:
    """One field of a mapping, at any depth, replaced by a value of another type."""
    values = [json.loads(line) for line in raw.splitlines()] if raw.count(b"\n{") else [json.loads(raw)]
    places = list(_places(values))
    container, key = chance.choice(places)
    container[key] = chance.choice([value for value in (None, [], {}, "x", -5, 1.5, True, 10**400, float("nan")) if type(value) is not type(container[key])])
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _a_field_fewer(raw: bytes, chance: random.Random) -> bytes:
    values = [json.loads(line) for line in raw.splitlines()] if raw.count(b"\n{") else [json.loads(raw)]
    container, key = chance.choice([(container, key) for container, key in _places(values) if isinstance(container, dict)])
    del container[key]
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _garbage(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + chance.randbytes(40) + raw[at:]


WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda raw, chance: b"",
    "cut": lambda raw, chance: raw[: chance.randrange(len(raw) or 1)],
    "garbage": _garbage,
    "not utf-8": lambda raw, chance: b"\xff\xfe" + raw,
    "zeros": lambda raw, chance: b"\0" * len(raw),
    "a list": lambda raw, chance: b"[]",
    "null": lambda raw, chance: b"null\n",
    "text": lambda raw, chance: b'"text"\n',
    "deep": lambda raw, chance: DEEP,
    "deep in a field": lambda raw, chance: b'{"status": ' + DEEP + b"\n",
    "a long number": lambda raw, chance: b'{"step": ' + b"9" * 10_000 + b"}\n",
    "another type": _field_of_another_type,
    "a field fewer": _a_field_fewer,
}
IN_ITS_PLACE = ("folder", "pipe", "link to itself", "link to nothing")


def spoil(path: Path, way: str, chance: random.Random) -> None:
    """Damage a file in one of the ways in `WAYS` or `IN_ITS_PLACE`."""
    raw = path.read_bytes() if path.exists() else b'{"a": "b"}\n'
    if way in WAYS:
        try:
            path.write_bytes(WAYS[way](raw, chance))
        except (ValueError, IndexError):  # not JSON: insert garbage, as can be done to any file
            path.write_bytes(_garbage(raw, chance))
        return
    path.unlink(missing_ok=True)
    match way:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to itself":
            path.symlink_to(path.name)
        case _:
            path.symlink_to("nothing")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run root with a finished run that is in MLflow, and a sweep of two points."""
    from samewise.runner.cli import main

    home = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main(["train", *TINY, "name=one", "tracking.log_system=false"]) == 0
        assert main(["sweep", *TINY, "tracking=none", "evaluate.pictures=false", "optimizer.lr=0.01,0.2", "name=swept", "launcher.jobs=2"]) == 0
    finally:
        os.chdir(before)
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may damage, as the current folder."""
    copy = tmp_path / "home"
    shutil.copytree(trained, copy, symlinks=True)
    for name in ("tracking.json", "config.yaml"):  # the store is in the copy too
        for file in copy.glob(f"runs/*/*/{name}"):
            file.write_text(file.read_text().replace(str(trained), str(copy)))
    monkeypatch.chdir(copy)
    return copy


def commands(home: Path) -> dict[str, tuple[str, ...]]:
    """Each command that reads a run or a sweep."""
    run, sweep = (str(next(home.glob(f"runs/{name}/*")).relative_to(home)) for name in ("one", "sweeps"))
    picture = home / "digit.png"
    if not picture.exists():
        from PIL import Image

        Image.new("L", (8, 8)).save(picture)
    return {
        "digest": ("digest", run),
        "diff": ("diff", run, str(next(home.glob("runs/swept/*")))),
        "diff --json": ("diff", run, run, "--json"),
        "eval": ("eval", run),
        "predict": ("predict", run, str(picture)),
        "verify": ("verify", run),
        "train": ("train", *TINY, "name=one", "tracking.log_system=false"),
        "runs": ("runs", "--json"),
        "runs --diff": ("runs", "--diff"),
        "gc": ("runs", "gc"),
        "rm": ("runs", "rm", run),
        "bundle": ("bundle", run, "--out", "result.bundle"),
        "export": ("export", run, "--out", "exported", "--to", "safetensors"),
        "new": ("new", "again", "--from", run, "--config-dir", "configs"),
        "resume_from": ("check", *TINY, f"resume_from={run}/checkpoints/latest"),
        "sync": ("sync", run),
        "sync all": ("sync",),
        "status": ("sweep", sweep, "--status"),
        "status of all": ("sweep", "--status"),
        "report": ("report", sweep),
        "cancel": ("sweep", sweep, "--cancel"),
        "sweep": ("sweep", sweep),
    }


OF_RUN = (
    *("digest", "diff", "diff --json", "eval", "predict", "verify", "train", "sync", "sync all"),
    *("runs", "runs --diff", "gc", "rm", "bundle", "export", "new", "resume_from"),
)
OF_SWEEP = ("status", "status of all", "report", "cancel", "sweep")
QUICK_OF_RUN = ("digest", "diff", "diff --json", "predict", "train", "runs", "gc", "bundle")
QUICK_OF_SWEEP = ("status", "status of all", "report", "cancel")
"""Each case of the short selection runs two of these; the long selection runs all."""


def _too_long(number: int, frame: object) -> None:
    raise AssertionError(f"no answer within {_SECONDS} s")


def require_an_answer(samewise: Callable[..., Any], home: Path, file: Path, way: str, name: str, given: tuple[str, ...]) -> None:
    """Run a command on a damaged folder: it must answer in time and lose no weights."""
    states = {path: path.read_bytes() for path in home.glob("runs/*/*/checkpoints/*/state.pt") if path.is_file()}
    mine = file.read_bytes() if file.is_file() else None
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_SECONDS)
    try:
        done = samewise(*given)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    case = f"{name} with {file.name} spoilt: {way}\n{done.stdout[-800:]}\n{done.stderr[-2000:]}"
    assert done.returncode in CODES, case
    assert "--debug" not in done.stderr, case  # an exception without a proper message
    if done.returncode == 2:
        assert done.stderr.startswith(("error:", "warning:")) or "\nerror:" in done.stderr or " problems:" in done.stderr, case
    left = [path.read_bytes() for path in home.rglob("state.pt") if path.is_file()]
    assert all(state in left for state in states.values()), case
    if mine is not None and file.suffix == ".pt":
        assert any(path.read_bytes() == mine for path in home.rglob("state.pt") if path.is_file()), case


def cases() -> Iterator[tuple[str, str, str]]:
    """(run or sweep, file, way)."""
    for kind, files in (("one", RUN_FILES), ("sweeps", SWEEP_FILES), ("swept", ("summary.json", "metrics.jsonl", "tracking.json", "environment.json"))):
        yield from ((kind, file, way) for file, way in itertools.product(files, (*WAYS, *IN_ITS_PLACE)))


def _try(samewise: Callable[..., Any], home: Path, kind: str, name: str, way: str, which: tuple[str, ...], seed: int) -> None:
    chance = random.Random(f"{kind} {name} {way} {seed}")
    known = commands(home)
    pristine = home.with_name("pristine")
    shutil.copytree(home, pristine, symlinks=True)
    for command in which:
        shutil.rmtree(home)
        shutil.copytree(pristine, home, symlinks=True)
        os.chdir(home)
        file = next(home.glob(f"runs/{kind}/*")) / name
        spoil(file, way, chance)
        require_an_answer(samewise, home, file, way, command, known[command])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("kind", "name", "way"), list(cases()))
def test_every_command_handles_every_damaged_file(samewise, home, kind, name, way) -> None:
    _try(samewise, home, kind, name, way, OF_RUN if kind == "one" else OF_SWEEP, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "sweeps", "swept"])
def test_a_few_commands_handle_a_few_damaged_files(samewise, home, kind) -> None:
    chance = random.Random(kind)
    pristine = home.with_name("whole")
    shutil.copytree(home, pristine, symlinks=True)
    for _, name, way in chance.sample([case for case in cases() if case[0] == kind], 3):
        shutil.rmtree(home.with_name("pristine"), ignore_errors=True)
        shutil.rmtree(home)
        shutil.copytree(pristine, home, symlinks=True)
        os.chdir(home)
        _try(samewise, home, kind, name, way, tuple(chance.sample(QUICK_OF_RUN if kind == "one" else QUICK_OF_SWEEP, 2)), seed=1)
