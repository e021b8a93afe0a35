"""What is moved, copied or deleted of a run, its store and its artifacts, and what is sent then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from samewise_runner_tracking_store import Store, sending, write

from samewise.runner.records.folder import RunFolder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.made_in(tmp_path_factory.mktemp("store"))


@pytest.fixture
def written(tmp_path: Path) -> RunFolder:
    return write(RunFolder(tmp_path / "tried" / "0123456789ab"))


def test_the_folder_of_a_run_may_be_moved_and_nothing_is_sent_again(written: RunFolder, store: Store, tmp_path: Path) -> None:
    first = sending(written, store)
    first.synchronise(alive=False)
    moved = RunFolder(tmp_path / "elsewhere" / written.path.name)
    shutil.copytree(written.path, moved.path)
    again = sending(moved, store)
    assert again.synchronise(alive=False).metrics == 0
    assert again.progress.run_id == first.progress.run_id
