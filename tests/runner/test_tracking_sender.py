"""The sender of a run: it notices when the trainer dies, outlives the process that forked it, and omits nothing, whatever is killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from samewise_runner_tracking_store import Store, expected, finish, start

from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import progress


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
