"""An MLflow store made by someone else leads to no file outside its folder, and no query of it takes unlimited time or memory."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess

import pytest

from samewise.runner.errors import ConfigError
from samewise.runner.tracking import store_places


def test_places_outside_the_stores_folder_are_refused_until_trusted(tmp_path) -> None:
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"

    def add(location: str, *runs: str) -> None:
        with contextlib.closing(sqlite3.connect(file)) as store:
            store.executescript("CREATE TABLE IF NOT EXISTS experiments (artifact_location); CREATE TABLE IF NOT EXISTS runs (artifact_uri)")
            store.execute("INSERT INTO experiments VALUES (?)", (location,))
            store.executemany("INSERT INTO runs VALUES (?)", [(run,) for run in runs])
            store.commit()

    def refusal() -> str:
        with pytest.raises(ConfigError) as told:
            store_places.require(uri, trust=False)
        return str(told.value)

    add(str(tmp_path / "mlartifacts" / "1"), f"{tmp_path}/mlartifacts/1/a/artifacts", "mlflow-artifacts:/1")
    store_places.require(uri, trust=False)
    add("s3://mine/1", "s3://mine/1/a/artifacts")
    assert ": s3://mine/1; hint: if these places are yours" in refusal()
    store_places.require(uri, trust=True)
    add("s3://mine/1", "s3://mine/1/b/artifacts")  # another run in the same place
    store_places.require(uri, trust=False)
    add("file:///home/me/%2Essh", f"{tmp_path}/mlartifacts/../../secret")
    assert "mlflow.db: the store names places outside its folder" in refusal()
    for place in ("/home/me/.ssh", str(tmp_path.parent / "secret"), "s3://mine/1", "--trust"):
        assert place in refusal()
    file.with_name(".mlflow.db.places").write_text(f"/home/me/.ssh\n{tmp_path.parent}/secret\ns3://mine/1\n")  # a stranger's own list
    assert "/home/me/.ssh" in refusal()
    with contextlib.closing(sqlite3.connect(file)) as store:  # where a logged model's files are
        store.executescript("CREATE TABLE logged_models (artifact_location)")
        store.executemany("INSERT INTO logged_models VALUES (?)", [("s3://mine/1/models/m-1",), ("/etc/ssl/private",)])
        store.commit()
    assert "/etc/ssl/private" in refusal()
    assert "m-1" not in refusal()


ELSEWHERE = {
    "a registered model": "INSERT INTO model_versions VALUES ('/etc/ssl/private', NULL)",
    "a registered model's copy": "INSERT INTO model_versions VALUES ('models:/m-1', '/etc/ssl/private')",
    "a trace": "INSERT INTO trace_tags VALUES ('mlflow.artifactLocation', '/etc/ssl/private')",
    "who is told of a model": "INSERT INTO webhooks VALUES ('https://stranger.example/ssl/private')",
    "a trigger": "CREATE TRIGGER \"of /etc/ssl/private\" AFTER INSERT ON trace_tags BEGIN UPDATE experiments SET artifact_location = '/etc'; END",
    "a trigger by the name of MLflow's": """CREATE TRIGGER prevent_secrets_aad_mutation AFTER INSERT ON trace_tags BEGIN
        UPDATE experiments SET artifact_location = '/etc/ssl/private'; END""",
    "a view": "DROP TABLE runs; CREATE VIEW runs AS SELECT '/etc/ssl/private' AS artifact_uri",
    "beside what is no text": "INSERT INTO experiments VALUES (CAST(x'ff2e' AS TEXT)), ('/etc/ssl/private')",
}


@pytest.mark.parametrize("way", ELSEWHERE)
def test_anything_in_a_store_that_leads_outside_its_folder_is_reported(tmp_path, way) -> None:
    """A model version, a trace and a webhook name places too; a trigger could change them after the check, since `ui` itself writes tags."""
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.executescript(
            "CREATE TABLE experiments (artifact_location); CREATE TABLE runs (artifact_uri); CREATE TABLE model_versions (source, storage_location);"
            f"CREATE TABLE trace_tags (key, value); CREATE TABLE webhooks (url); INSERT INTO experiments VALUES ('{tmp_path}/mlartifacts')"
        )
        store_places.require(f"sqlite:///{tmp_path}/mlflow.db", trust=False)
        store.executescript(ELSEWHERE[way])
        store.commit()
    with pytest.raises(ConfigError) as told:
        store_places.require(f"sqlite:///{tmp_path}/mlflow.db", trust=False)
    assert "/private" in str(told.value) or "trigger prevent_secrets_aad_mutation" in str(told.value)
    store_places.require(f"sqlite:///{tmp_path}/mlflow.db", trust=True)
    store_places.require(f"sqlite:///{tmp_path}/mlflow.db", trust=False)


ENDLESS = "CREATE VIEW {name} AS WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT {columns} FROM x {rest}"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rest", ["WHERE n < 0", "ORDER BY -n"], ids=["no rows", "sorted"])
def test_a_store_with_an_endless_view_is_reported(tmp_path, monkeypatch, rest) -> None:
    monkeypatch.setattr(store_places, "LONGEST_S", 1.0)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.executescript(ENDLESS.format(name="runs", columns="'/x' || n AS artifact_uri", rest=rest))
    with pytest.raises(ConfigError, match=r"mlflow\.db: cannot be read: (interrupted|it takes too much memory)"):
        store_places.require(f"sqlite:///{tmp_path}/mlflow.db", trust=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a view without end", "a large value"])
def test_reading_an_endless_or_huge_store_is_stopped(samewise, tmp_path, monkeypatch, caplog, way) -> None:
    from samewise.runner.tracking.store import open_client

    caplog.set_level("CRITICAL", "mlflow")  # as when samewise imports mlflow
    monkeypatch.setattr(store_places, "LONGEST_S", 5.0)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    run = client.create_run("0", tags={"samewise.fingerprint": "0" * 64})
    assert samewise("runs", "--uri", uri).returncode == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        if way == "a large value":
            store.execute("UPDATE runs SET name = CAST(zeroblob(200000000) AS TEXT)")
        else:
            columns = ", ".join(f"r.{row[1]}" for row in store.execute("PRAGMA table_info(runs)"))
            store.execute("PRAGMA legacy_alter_table=ON")
            store.execute("ALTER TABLE runs RENAME TO kept")
            store.execute(ENDLESS.format(name="runs", columns=columns, rest=", kept r WHERE n < 0"))
        store.commit()
    for command in (["runs"], ["verify", run.info.run_id]):
        done = samewise(*command, "--uri", uri)
        assert done.returncode == 2
        assert "its database did not answer" in done.stderr or "too big" in done.stderr
        assert "--debug" not in done.stderr
    monkeypatch.setattr(store_places, "LONGEST_S", -1.0)
    assert samewise("runs", "--uri", uri).returncode == 2
    assert client.search_experiments()  # on the same connection, which is no longer limited


def test_a_store_that_cannot_be_read_is_not_shown(samewise, tmp_path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    done = samewise("ui", "--run-root", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path / 'mlflow.db'}: cannot be read: " in done.stderr


def test_ui_starts_no_server_for_a_store_that_names_other_folders(samewise, tmp_path, monkeypatch) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.executescript("CREATE TABLE experiments (artifact_location); CREATE TABLE runs (artifact_uri); INSERT INTO experiments VALUES ('/etc')")
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: started.append(given))
    done = samewise("ui", "--run-root", tmp_path)
    assert done.returncode == 2
    assert "/etc" in done.stderr
    assert "--trust" in done.stderr
    assert not started
