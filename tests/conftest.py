"""What all tests share: the repository's root, a clean environment for child processes, and the skipping of `gpu`, `fsdp` and `data` tests."""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported anywhere, here or in a child process. MLflow's usage reports stay off: tests need no network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Waiting threads sleep soon, as in `samewise train`: with more processes than cores, busy waiting takes several times as long as the work.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# As reproducibility=strict would set it, since a test that runs commands in its own process has imported torch already.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# For the key that signs runs and sweeps: no test leaves one in the home folder of the user who runs it.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="samewise-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


ROOT = Path(__file__).resolve().parents[1]

runpy.run_path(str(ROOT / "tests" / "helpers.py"))
forked = importlib.import_module("samewise_forked")
importlib.import_module("samewise")  # before a test imports torchaudio, which may need its help


@pytest.fixture(autouse=True)
def no_fork_outlives_its_test() -> Iterator[None]:
    yield
    while forked.STARTED:
        forked.STARTED.pop().kill()


@pytest.fixture(autouse=True)
def threads_are_as_before() -> Iterator[None]:
    """A training sets torch's threads, and torch 2.11 solves a batch of large equations wrongly with several (pytorch/pytorch#142815)."""
    yield
    if (torch := sys.modules.get("torch")) and torch.get_num_threads() != (threads := int(os.environ["OMP_NUM_THREADS"])):
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def stores_are_copied() -> None:
    """MLflow makes a SQLite store by all of its migrations, in a second and more: here it does so once, and later stores are copies of the first."""
    if (utils := sys.modules.get("mlflow.store.db.utils")) is None or hasattr(utils, "made_by_tests"):
        return
    made, initialize = sqlite3.connect(":memory:", check_same_thread=False), utils._initialize_tables
    utils.made_by_tests = made

    def copy_the_first(engine: Any) -> None:
        if engine.dialect.name != "sqlite":
            initialize(engine)
            return
        with contextlib.closing(engine.raw_connection()) as connection:
            store = connection.driver_connection
            if made.execute("SELECT name FROM sqlite_master").fetchall():
                made.backup(store)
            else:
                initialize(engine)
                store.backup(made)

    utils._initialize_tables = copy_the_first


@pytest.fixture(autouse=True)
def what_a_project_brought_is_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two tests may use the same name for their projects' packages, so a test's own modules and its entries on sys.path are removed after it."""
    path, temporary = list(sys.path), str(tmp_path_factory.getbasetemp())
    yield
    sys.path[:] = path
    if len(sys.modules) != len(_KNOWN):  # there are thousands, and most tests import none
        places = {name: [vars(sys.modules[name]).get("__file__"), *vars(sys.modules[name]).get("__path__", ())] for name in set(sys.modules) - _KNOWN}
        for name in [name for name, found in places.items() if any(str(place).startswith(temporary) for place in found)]:
            del sys.modules[name]  # after all paths were read, since that of a package without a file is its parent's
        _KNOWN.clear()
        _KNOWN.update(sys.modules)
    importlib.invalidate_caches()


_KNOWN = set[str]()
"""The modules that were loaded when a test ended."""


@pytest.fixture
def samewise(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs a command as a user would type it, but in this process: five seconds quicker than a separate process, which is needed only for kills."""
    monkeypatch.setattr("samewise.runner.processes.this_process.has_fixed_hash_seed", lambda: True)

    def run(*arguments: object, code: int | None = None) -> Done:
        """`code`: the exit code that is required."""
        from samewise.runner.cli import main

        capfd.readouterr()
        found = main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        assert "Traceback" not in said.err + said.out
        assert code in (None, found), said.err or said.out
        return Done(found, said.out, said.err)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """The environment for a child process, without what would change where Python imports from."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets, `SAMEWISE_DATA`; a test marked `data` is skipped without it."""
    return Path(os.environ["SAMEWISE_DATA"])


@pytest.fixture(scope="session")
def ffmpeg() -> None:
    """Skips a test if torchcodec or FFmpeg's libraries are not installed."""
    from samewise.datasets.parts.video_files import require_torchcodec
    from samewise.runner.errors import ConfigError

    try:
        require_torchcodec()
    except ConfigError as error:
        pytest.skip(str(error))


def pytest_sessionstart() -> None:
    """Collection imports torch and more, and makes no garbage worth collecting: without the collector it takes half the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Objects that exist now stay to the end, so later garbage collections skip them."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying why, and mark the variants that `make test` leaves out."""
    _mark_variants([item for item in items if not item.get_closest_marker("slow")])
    if any(item.get_closest_marker("gpu") for item in items):
        import torch  # here, because it takes a second that most selections do not need

        if not torch.cuda.is_available():
            _skip(items, "gpu", "no CUDA device")
    if any(item.get_closest_marker("fsdp") for item in items):
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "reset_iter_state"):
            _skip(items, "fsdp", "strategy=fsdp in several processes needs torch 2.14")
    if not os.environ.get("SAMEWISE_DATA"):
        _skip(items, "data", "SAMEWISE_DATA does not name a folder of data sets")


def _mark_variants(items: list[pytest.Item]) -> None:
    """Of a parametrised test, two of three; `make test-variants` runs them."""
    variants = dict[str, list[pytest.Item]]()
    for item in items:
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in variants.values():
        for place, item in enumerate(several):
            if place % 3:
                item.add_marker("variant")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))
