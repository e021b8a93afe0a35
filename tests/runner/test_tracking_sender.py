"""The sender of a run: it notices when the trainer dies, outlives the process that forked it, and omits nothing, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from samewise_runner_tracking_store import Store, expected, finish, start

from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import progress
from samewise.runner.tracking.link import SHARED
from samewise.runner.tracking.sender_parent import SenderParent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.made_in(tmp_path_factory.mktemp("store"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "tried" / "0123456789ab")


def until(true: Callable[[], bool]) -> None:
    """Wait until it is true; pytest's timeout ends a wait in vain."""
    while not true():
        time.sleep(0.05)


@pytest.mark.slow
def test_a_trainer_killed_at_random_and_restarted_leaves_every_value_once(folder: RunFolder, store: Store) -> None:
    chance = random.Random(5)
    for number in range(3):
        trainer = start(folder, store.uri, 400, 0.005)
        until(lambda trainer=trainer: bool(psutil.Process(trainer.pid).children()))  # its sender
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.communicate()
        if number == 1:  # let the sender end once; otherwise the next trainer starts while it is still working
            until(lambda: read_json(folder.tracking) is not None and read_json(folder.tracking)["status"] == "KILLED")
            assert store.status(progress.load(folder).run_id or "") == "KILLED"
    run = finish(start(folder, store.uri, 400))
    assert store.points(run) == (800, expected(400))
    assert store.status(run) == "FINISHED"
    assert len(store.rows("select 1 from tags where key = 'samewise.folder' and value = ?", str(folder.path))) == 1


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SenderParent]:
    """A process that has imported mlflow, and whose address the trainers know."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("no descriptors of processes here")
    made = SenderParent(tmp_path / "parent.log")
    monkeypatch.setenv(SHARED, made.address)
    yield made
    made.close()


@pytest.mark.slow
def test_a_forked_sender_notices_a_dead_trainer_and_outlives_the_shared_process(folder: RunFolder, store: Store, shared: SenderParent) -> None:
    trainer = start(folder, store.uri, 400, 0.05)
    until(lambda: bool(psutil.Process(shared.pid).children()))
    assert psutil.Process(trainer.pid).children() == []
    until(lambda: folder.metrics.exists() and folder.metrics.read_bytes().count(b"loss") > 10)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    until(lambda: read_json(folder.tracking) is not None and read_json(folder.tracking)["status"] == "KILLED")
    until(lambda: not psutil.Process(shared.pid).children())
    trainer = start(folder, store.uri, 400, 0.02)
    until(lambda: bool(psutil.Process(shared.pid).children()))
    sender = psutil.Process(shared.pid).children()[0]
    sender.kill()  # the trainer starts another at its next checkpoint
    until(lambda: any(one.pid != sender.pid for one in psutil.Process(shared.pid).children()))
    shared.close()
    run = finish(trainer)
    assert store.points(run) == (800, expected(400))
    assert store.status(run) == "FINISHED"
