"""A few trials of the campaign, and checks that it causes faults and finds what it looks for."""

import errno
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="gcc compiles a library that Linux preloads")
WRITES = """
import sys, time
try:
    for number in range(6):
        with open(f"{sys.argv[1]}/{number}", "w") as file:
            file.write("x" * 100)
except OSError as error:
    print(error.errno)
print(round(time.time() - float(sys.argv[2]), -3))
"""

SAVES = """
import ctypes, errno, sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
import torch
from samewise.runner.records import checkpoint, checkpoint_writer

folder, mark, layer = Path(sys.argv[1]), Path(sys.argv[2]), ctypes.CDLL(None)
settings = SimpleNamespace(background=False, keep_last=2, keep_best=1, keep_every_steps=0)
kept = checkpoint_writer.Checkpoints(folder, settings, {"valid/loss": "min"}, {})
checkpoint_writer._PAUSE_S = 0.0
step = 0
for code in (errno.EIO, errno.EDQUOT, errno.ESTALE):
    for nth in count(1):
        step += 1
        mark.unlink(missing_ok=True)
        layer.plan(str(folder).encode(), str(mark).encode(), 1, ctypes.c_long(nth), code, ctypes.c_long(0), ctypes.c_long(0))
        kept.save(step, {"step": step, "model": {"weight": torch.full((4000,), float(step))}}, {"valid/loss": 1.0 / step})
        layer.plan(b"", b"", 0, ctypes.c_long(0), 0, ctypes.c_long(0), ctypes.c_long(0))
        assert checkpoint.load(folder / "latest")["model"]["weight"].eq(step).all(), nth
        assert not list(folder.glob(".*")), nth
        if not mark.exists():
            break
    print(code, nth)
"""


@pytest.fixture(scope="module")
def campaign(repository: Path) -> ModuleType:
    sys.path.append(str(repository / "tests" / "faults"))  # where the files beside it are
    return importlib.import_module("campaign")


@pytest.fixture(scope="module")
def layer(campaign: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return campaign.compiled(tmp_path_factory.mktemp("layer"))


@pytest.mark.parametrize(
    ("fault", "written", "said"),
    [
        ("0 0 0 0 0", 6, "0.0"),
        (f"1 3 {errno.EIO} 0 0", 1, f"{errno.EIO}\n0.0"),
        ("2 5 0 100 0", 2, f"{errno.ENOSPC}\n0.0"),
        ("3 7 0 0 0", 3, ""),
        ("4 3 0 0 86400000", 6, "86400000.0"),
    ],
    ids=["nothing", "an error", "a full disk", "a kill", "a jump of the clock"],
)
def test_the_layer_causes_the_planned_fault(layer: Path, tmp_path: Path, fault: str, written: int, said: str) -> None:
    folder = tmp_path / "under"
    folder.mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(layer), "FAULT": f"{fault} {folder}/ {tmp_path}/mark"}
    done = subprocess.run([sys.executable, "-S", "-c", WRITES, str(folder), str(time.time())], env=environment, capture_output=True, text=True, check=False)
    whole = [path for path in folder.iterdir() if path.read_text() == "x" * 100]
    assert (len(whole), done.stdout.strip()) == (written, said), done.stderr
    assert (tmp_path / "mark").exists() == (fault[0] != "0")


def test_a_checkpoint_is_written_again_whichever_call_on_its_files_fails_once(layer: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", SAVES, str(folder), str(tmp_path / "mark")]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(layer)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = dict(map(int, line.split()) for line in done.stdout.splitlines())
    assert [*calls] == [errno.EIO, errno.EDQUOT, errno.ESTALE]
    assert min(calls.values()) > 20
    assert "writing failed, and is tried again" in done.stderr


@pytest.mark.slow
def test_a_few_trials_lose_nothing(repository: Path) -> None:
    command = [sys.executable, str(repository / "tests" / "faults" / "campaign.py"), "--trials", "3", "--seed", "4", "--no-server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = {line.split(maxsplit=1)[1]: int(line.split()[0]) for line in done.stdout.splitlines()}
    assert counts["trials"] == 3
    assert counts["faults"] > 0
    assert counts["failed"] == 0
