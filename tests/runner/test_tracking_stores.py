"""Everything sent to an MLflow store is there exactly once, whatever was sent before, however often, and by however many senders."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_runner_tracking_store import Store, expected, finish, sending, start, write

from samewise.runner.records import own_code
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.progress import is_behind


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.made_in(tmp_path_factory.mktemp("store"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "tried" / "0123456789ab")


def test_a_finished_run_is_in_mlflow_with_all_its_data(folder: RunFolder, store: Store) -> None:
    run = finish(start(folder, store.uri, 1500))
    assert store.points(run) == (3000, expected(1500))
    status, name, started, ended = store.rows("select status, name, start_time, end_time from runs where run_uuid = ?", run)[0]
    assert (status, name) == ("FINISHED", "tried-0123456789ab")
    times = [row[0] for row in store.rows("select timestamp from metrics where run_uuid = ? and key = 'train/loss'", run)]
    assert started <= min(times) <= max(times) <= ended
    params = dict(store.rows("select key, value from params where run_uuid = ?", run))
    assert params["optimizer.lr"] == "0.1"
    assert params["choices.model"] == "resnet18"
    tags = dict(store.rows("select key, value from tags where run_uuid = ?", run))
    told = {
        "samewise.fingerprint": "f" * 64,
        "samewise.level": "R1",
        "samewise.reproducibility": "strict",
        "mlflow.source.git.commit": "c" * 40,
        "mlflow.note.content": "What the settings are for",
        "who": "a test",
    }
    assert told.items() <= tags.items()
    assert {name: value for name, value in tags.items() if name.startswith("env.")} == {
        "env.versions.torch": "2",
        "env.code": own_code.digest({"samewise/a.py": "1", "samewise/b.py": "2"}),  # one tag for all files
    }
    inputs = "select d.name, d.digest, d.dataset_profile from inputs i join datasets d on d.dataset_uuid = i.source_id where i.destination_id = ?"
    assert [(name, digest, json.loads(profile)) for name, digest, profile in store.rows(inputs, run)] == [("digits", "a" * 36, {"num_rows": 1000})]
    artifacts = store.path.parent / "mlartifacts" / run / "artifacts"
    files = {path.relative_to(artifacts).as_posix() for path in artifacts.rglob("*") if path.is_file()}
    assert files == {"config.yaml", "config.signature", "environment.json", "pictures/confusion.txt"}


LIMITED = """
import resource, sys
from samewise.runner.errors import summarise_error
from samewise.runner.tracking.store import open_client

limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for size in (200_000, 200_000, limits[0]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        print(open_client(sys.argv[1]).get_experiment("0").name)
    except Exception as error:
        print(summarise_error(error).partition("[")[0])
"""


def test_a_store_whose_making_failed_is_made_by_the_same_process_and_each_failure_has_its_own_reason(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    done = subprocess.run([sys.executable, "-c", LIMITED, f"sqlite:///{tmp_path}/mlflow.db"], capture_output=True, text=True, check=False)
    first, second, made = done.stdout.splitlines()
    assert (first, made) == (second, "Default"), done.stdout + done.stderr
    assert "full" in first or "I/O" in first


@pytest.fixture
def written(folder: RunFolder) -> RunFolder:
    return write(folder)


def test_a_crash_before_the_new_run_is_noted_leaves_no_second_run(written: RunFolder, store: Store) -> None:
    sending(written, store).synchronise(alive=True)
    noted = read_json(written.tracking)
    write_json(written.tracking, {"store": noted["store"], "intent": noted["intent"]})
    after = sending(written, store)
    after.synchronise(alive=False)
    assert after.progress.run_id == noted["run_id"]
    assert store.points(noted["run_id"]) == (20, expected(10))


def test_sending_everything_again_changes_nothing(written: RunFolder, store: Store) -> None:
    first = sending(written, store)
    first.synchronise(alive=False)
    again = sending(written, store)
    assert again.synchronise(alive=False).metrics == 0
    again.progress.sent.clear()
    assert again.synchronise(alive=False).metrics == 20
    assert store.points(first.progress.run_id) == (20, expected(10))


def test_many_metrics_are_stored_as_by_mlflows_client_which_gets_few_of_them(written: RunFolder, store: Store) -> None:
    from mlflow.entities import Metric

    # A resumed run may log other names at earlier steps
    lines = [(step, {"a": 1 / step, "b": math.nan if step % 99 == 0 else step, "c": -math.inf if step >= 499 else 0.5}) for step in range(1, 501)]
    lines += [(step, {"d": float(step)}) for step in (*range(250, 290), 7)]
    written.metrics.write_text("".join(json.dumps({"step": step, "time_ms": step + 5, "metrics": values}) + "\n" for step, values in lines))
    done, batches = sending(written, store), []
    log = done.client.log_batch
    done.client.log_batch = lambda run, **batch: batches.append(batch.get("metrics", ())) or log(run, **batch)
    assert done.synchronise(alive=False).metrics == 1541
    assert sum(map(len, batches)) == 4 + 5 + 1  # the latest, and what is not finite

    other = done.client.create_run("0").info.run_id
    metrics = [Metric(name, value, step + 5, step) for step, values in lines for name, value in values.items()]
    log(other, metrics=metrics[:1000])
    log(other, metrics=metrics[1000:])
    tables = ("metrics", "latest_metrics")
    query = "select key, step, timestamp, value, is_nan from {} where run_uuid = ? order by 1, 2, 3, 4"
    stored = [store.rows(query.format(table), other) for table in tables]
    for sent in ({}, {written.metrics.name: written.metrics.read_bytes().index(b"\n") + 1}):
        assert [store.rows(query.format(table), done.progress.run_id) for table in tables] == stored
        done.progress.sent = sent  # as after a kill
        assert done.synchronise(alive=False).metrics > 1541
    assert [store.rows(query.format(table), done.progress.run_id) for table in tables] == stored


def test_metrics_that_the_server_accepts_and_does_not_store_are_sent_again(written: RunFolder, store: Store) -> None:
    one = sending(written, store)
    logs = one.client.log_batch
    one.client.log_batch = lambda *given, **batch: None if "metrics" in batch else logs(*given, **batch)
    with pytest.raises(RuntimeError, match="accepted metrics that it does not have"):
        one.synchronise(alive=False)
    assert is_behind(written)
    one.client.log_batch = logs
    one.synchronise(alive=False)
    assert store.rows("select count(*) from metrics where run_uuid = ?", one.progress.run_id) > [(0,)]
    assert not is_behind(written)


def test_an_empty_tag_is_sent_and_a_long_one_is_cut(written: RunFolder, store: Store) -> None:
    tags = {"empty": "", "long": "x" * 9000, "n" * 300: "named"}
    done = sending(written, store)
    done.settings["tags"] = tags
    assert done.synchronise(alive=False).refused == 0
    sent = dict(store.rows("select key, value from tags where run_uuid = ?", done.progress.run_id))
    assert (sent["empty"], sent["long"][:7000], len(sent["long"])) == ("", "x" * 7000, 8000)
    assert "named" in sent.values()


def test_a_run_deleted_in_mlflow_is_created_again_and_gets_everything(written: RunFolder, store: Store) -> None:
    from samewise.runner.tracking.sending import RunGone

    first = sending(written, store)
    first.synchronise(alive=True)
    lost = first.progress.run_id
    first.client.delete_run(lost)
    with written.metrics.open("a") as journal:
        journal.write('{"step": 11, "time_ms": 1700000000000, "metrics": {"train/loss": 0.09090909090909091, "train/step": 11.0}}\n')
    with pytest.raises(RunGone, match=lost):
        first.synchronise(alive=True)
    first.synchronise(alive=False)
    assert first.progress.run_id != lost
    assert store.points(first.progress.run_id) == (22, expected(11))


def test_names_that_mlflow_refuses_are_changed_and_delay_nothing(written: RunFolder, store: Store) -> None:
    with written.metrics.open("a") as journal:
        for name in ("../up", "a?b", "x" * 300, "ends/"):
            journal.write(json.dumps({"step": 1, "time_ms": 1, "metrics": {name: 1.0}}) + "\n")
    done = sending(written, store)
    assert done.synchronise(alive=False).refused == 0
    keys = {key for key, _ in store.points(done.progress.run_id)[1]}
    assert {"up", "a_b", "ends"} < keys
    assert len(keys) == 6


def test_metrics_that_mlflow_would_call_the_same_are_kept_apart_in_every_session(written: RunFolder, store: Store) -> None:
    names = ("recall(cat)", "recall[cat]", "recall_cat_")
    for step in (11, 12):
        with written.metrics.open("a") as journal:
            journal.write(json.dumps({"step": step, "time_ms": 1, "metrics": {name: step + number for number, name in enumerate(names)}}) + "\n")
        done = sending(written, store)  # another sender, which begins behind what was sent
        done.synchronise(alive=step == 11)
        names = (*names[1:], names[0])
    points = store.points(done.progress.run_id)[1]
    series = {key: (value, points[key, 12]) for (key, step), value in points.items() if step == 11}
    assert series.pop("recall_cat_") == (11, 14)
    assert sorted(series.values()) == [(12, 12), (13, 13)]


EIGHT = """
import os, sys
from samewise.runner.tracking.store import open_client, artifact_location
uri = sys.argv[1]
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        client = open_client(uri)
        run = client.create_run("0")
        for step in range(20):
            client.log_metric(run.info.run_id, "loss", step / 3, step=step, timestamp=step)
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))
"""


@pytest.mark.slow
def test_eight_processes_that_start_on_a_fresh_file_share_one_whole_store(tmp_path: Path) -> None:
    fresh = Store(tmp_path / "deep" / "mlflow.db")
    done = subprocess.run([sys.executable, "-c", EIGHT, fresh.uri], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert fresh.rows("select count(*), count(distinct run_uuid) from metrics") == [(160, 8)]
    assert fresh.rows("select count(*) from alembic_version") == [(1,)]
    assert {path.name for path in fresh.path.parent.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}
