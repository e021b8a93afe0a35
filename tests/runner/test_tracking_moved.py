"""What is moved, copied or deleted of a run, its store and its artifacts, and what is sent then."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from samewise_runner_tracking_store import Store, sending, write

from samewise.runner.config.schema import Tracking
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.tracker import open_tracker


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


@pytest.fixture
def moved(tmp_path: Path) -> Callable[[], tuple[RunFolder, Store]]:
    """A function that trains in `old`, sends a file and moves all to `new`."""

    def move() -> tuple[RunFolder, Store]:
        before = RunFolder(tmp_path / "old" / "runs" / "tried" / "0123456789ab")
        write(before)
        (before.artifacts / "first.txt").write_text("first")
        os.utime(before.artifacts / "first.txt", (0, 0))  # a file that may still be being written waits
        sending(before, Store.made_in(tmp_path / "old" / "runs")).synchronise(alive=True)
        (tmp_path / "old").rename(tmp_path / "new")
        after = RunFolder(tmp_path / "new" / "runs" / "tried" / "0123456789ab")
        (after.artifacts / "second.txt").write_text("second")
        return after, Store(tmp_path / "new" / "runs" / "mlflow.db")

    return move


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_run_that_is_moved_with_its_store_continues_there_with_its_artifacts(moved: Any, tmp_path: Path, is_taken: bool) -> None:
    after, store = moved()
    if is_taken:  # by another project, of which nothing is touched
        (tmp_path / "old" / "runs" / "mlartifacts").mkdir(parents=True)
        Store.made_in(tmp_path / "old" / "runs")
    one = sending(after, store)
    assert one.synchronise(alive=False).metrics == 0
    assert store.rows("select run_uuid from runs") == [(one.progress.run_id,)]
    assert one.progress.others == {}
    assert sorted(file.path for file in one.client.list_artifacts(one.progress.run_id)) == ["first.txt", "second.txt"]
    assert one.client.get_run(one.progress.run_id).data.tags["samewise.folder"] == str(after.path)
    assert list((tmp_path / "old").rglob("mlartifacts/*")) == []
    new = one.client.create_run(one.progress.experiment_id)
    assert new.info.artifact_uri == f"{store.path.parent}/mlartifacts/{new.info.run_id}/artifacts"
    assert not any(str(tmp_path / "old") in str(row) for row in store.rows("select artifact_location from experiments"))


def test_a_store_whose_artifacts_are_still_where_they_were_is_left_alone(moved: Any, tmp_path: Path) -> None:
    after, store = moved()
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (tmp_path / "old" / "runs" / "mlflow.db").unlink()
    one = sending(after, store)
    one.synchronise(alive=False)
    assert (tmp_path / "old" / "runs" / "mlartifacts" / one.progress.run_id / "artifacts" / "second.txt").exists()


def test_a_copied_project_keeps_its_artifacts_to_itself(moved: Any, tmp_path: Path) -> None:
    after, store = moved()
    original = shutil.copytree(tmp_path / "new", tmp_path / "old") / "runs"
    first = store.rows("select run_uuid from runs")[0][0]
    (only_there := original / "mlartifacts" / "1" / "artifacts").mkdir(parents=True)
    with sqlite3.connect(store.path) as database:
        database.execute("insert into runs (run_uuid, artifact_uri, experiment_id) values ('1', ?, 1)", (str(only_there),))
    before = {path: path.is_file() and path.read_bytes() for path in original.rglob("*")}
    one = sending(after, store)
    one.synchronise(alive=False)
    assert one.progress.run_id != first
    assert {path: path.is_file() and path.read_bytes() for path in original.rglob("*")} == before
    home = store.path.parent / "mlartifacts"
    places = {run: f"{home}/{run}/artifacts" for run in (first, one.progress.run_id)} | {"1": str(only_there)}
    assert dict(store.rows("select run_uuid, artifact_uri from runs")) == places
    assert sorted(path.name for path in home.rglob("*.txt")) == ["first.txt", "first.txt", "second.txt"]
    shutil.rmtree(tmp_path / "old")
    sending(after, store)
    assert dict(store.rows("select run_uuid, artifact_uri from runs"))["1"] == f"{home}/1/artifacts"


def test_a_store_by_another_path_is_no_copy(moved: Any, tmp_path: Path) -> None:
    after, store = moved()
    (tmp_path / "old").symlink_to(tmp_path / "new")
    sending(after, store).synchronise(alive=False)
    assert set(store.rows("select artifact_location from experiments where experiment_id > 0")) == {(f"{tmp_path}/old/runs/mlartifacts",)}


def test_files_that_are_gone_from_mlflow_are_sent_again(written: RunFolder, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    (written.artifacts / "first.txt").write_text("first")
    assert sending(written, store).synchronise(alive=False).files == 1
    assert sending(written, store).synchronise(alive=False).files == 0
    run = read_json(written.tracking)["run_id"]
    shutil.rmtree(store.path.parent / "mlartifacts" / run)
    again = sending(written, store)
    assert again.synchronise(alive=False).files == 1
    assert f"the files of the MLflow run {run} are gone from {again.client.get_run(run).info.artifact_uri}; sending them again" in caplog.text
    assert [file.path for file in again.client.list_artifacts(run)] == ["first.txt"]


def test_artifacts_are_not_written_where_their_folder_has_vanished(moved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    after, store = moved()
    artifacts = (tmp_path / "new" / "runs" / "mlartifacts").rename(tmp_path / "artifacts")
    settings = Tracking(uri=store.uri, experiment="tried")
    open_tracker(after, OmegaConf.structured(settings), resume_step=10)
    one = sending(after, store)
    assert one.synchronise(alive=True).files == 0
    one.synchronise(alive=False)
    assert not (tmp_path / "old").exists()
    trainers, senders = [record.getMessage() for record in caplog.records if record.name == "samewise.tracking"]
    assert trainers == senders
    assert f"folder of artifacts {tmp_path}/old/runs/mlartifacts no longer exists" in trainers
    from samewise.runner.tracking.store import require_place

    with pytest.raises(FileNotFoundError, match="no longer exists"):
        require_place(one.client, one.progress.run_id, chosen=None)
    artifacts.rename(tmp_path / "new" / "runs" / "mlartifacts")
    again = sending(after, store)
    assert again.synchronise(alive=False).files == 1
    assert sorted(file.path for file in again.client.list_artifacts(one.progress.run_id)) == ["first.txt", "second.txt"]


def test_a_chosen_place_of_artifacts_is_created_once(written: RunFolder, store: Store, tmp_path: Path) -> None:
    (written.artifacts / "first.txt").write_text("first")
    for number, files in ((1, 1), (2, 0)):
        one = sending(written, store)
        one.settings |= {"experiment": "chosen", "artifact_location": str(tmp_path / "chosen")}
        (written.artifacts / "first.txt").write_text("first" * number)
        assert one.synchronise(alive=False).files == files
        shutil.rmtree(tmp_path / "chosen", ignore_errors=True)
