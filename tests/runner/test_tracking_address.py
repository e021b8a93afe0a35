from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from samewise.runner.config.schema import Tracking
from samewise.runner.errors import ConfigError
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import copies
from samewise.runner.tracking.address import check_uri, describe_failure, problem, sqlite_file
from samewise.runner.tracking.tracker import open_tracker


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("mlruns", "sqlite:///mlruns/mlflow.db"),
        ("./runs/mlflow.db", "sqlite:///./runs/mlflow.db"),
        ("file:///data/mlruns", "sqlite:////data/mlruns/mlflow.db"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlte:///runs/mlflow.db", "did you mean 'sqlite'?"),
        ("htp://host", "did you mean 'http'?"),
        ("http://", "server's name is missing"),
        ("postgresql://me@host/db", "name the driver"),
        ("postgresql+no_such_driver://me:secret@host/db", "no_such_driver"),
    ],
)
def test_a_uri_that_mlflow_would_reject_is_refused_with_what_to_write(uri: str, word: str) -> None:
    found = problem(uri)
    assert found is not None
    assert word in str(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize("uri", ["sqlite:///runs/mlflow.db", "sqlite:////tmp/x.db?timeout=60", "http://host:5000", "https://host/mlflow"])
def test_a_uri_that_mlflow_accepts_is_not_a_problem(uri: str) -> None:
    assert problem(uri) is None


def test_an_sqlite_file_becomes_absolute_and_keeps_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_uri("sqlite:///runs/mlflow.db?timeout=60") == f"sqlite:///{tmp_path}/runs/mlflow.db?timeout=60"
    assert sqlite_file(check_uri("sqlite:///runs/mlflow.db?timeout=60")) == tmp_path / "runs" / "mlflow.db"
    assert check_uri(check_uri("sqlite:///x.db")) == check_uri("sqlite:///x.db")


def test_a_file_that_is_not_an_sqlite_store_is_refused_before_training(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (tmp_path / "mlflow.db").write_text("these are not the bytes of a database")
    with pytest.raises(ConfigError, match="not an SQLite file"):
        open_tracker(folder, OmegaConf.structured(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db")), resume_step=None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder cannot be made"):
        open_tracker(folder, OmegaConf.structured(Tracking(uri=f"sqlite:///{tmp_path}/file/mlflow.db")), resume_step=None)


def test_a_store_that_cannot_be_written_is_reported_once_in_the_databases_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking.dbmodels.models import SqlExperiment
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    Base.metadata.tables["experiments"].create(create_engine(f"sqlite:///{tmp_path}/mlflow.db"))
    read_only = create_engine(f"sqlite:///file:{tmp_path}/mlflow.db?mode=ro&uri=true")
    names = iter("ab")

    def open_backend(*_: object) -> object:
        with Session(read_only) as session:
            session.add(SqlExperiment(name=next(names)))
            return session.query(SqlExperiment).all()

    monkeypatch.setattr(copies, "open_backend", open_backend)
    copy = copies.Copy("mlflow", RunFolder(tmp_path), {})
    copy.bring_up(ended=True)
    copy.bring_up(ended=True)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot send to MLflow, retrying: OperationalError: (sqlite3.OperationalError) attempt to write a readonly database"
    ]
    assert describe_failure(copy.trouble).endswith(
        "attempt to write a readonly database: you need access, to read and to write, to the store's file and folder"
    )


def test_without_tracking_the_journal_is_the_only_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    tracker = open_tracker(folder, OmegaConf.structured(Tracking(enabled=False, uri="nonsense://")), resume_step=None)
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    tracker.finish("FINISHED")
    assert tracker.run_id() is None
    assert folder.metrics.read_text().count("\n") == 3
    assert not folder.tracking.exists()
