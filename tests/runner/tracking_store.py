"""Shared by tests of the sender: a store that is read without MLflow, and trainers. Tests import this as `samewise_runner_tracking_store`."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from samewise.runner.records.folder import RunFolder

TRAINER = Path(__file__).with_name("tracking_trainer.py")


Points = dict[tuple[str, int], float]


class Store:
    """An SQLite store, read without MLflow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = f"sqlite:///{path}"

    @classmethod
    def made_in(cls, folder: Path) -> Store:
        from samewise.runner.tracking.store import open_client

        made = cls(folder / "mlflow.db")
        open_client(made.uri)
        return made

    def rows(self, query: str, *values: Any) -> list[Any]:
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def points(self, run: str) -> tuple[int, Points]:
        """The number of rows, and the values by key and step, without system metrics."""
        rows = self.rows("select key, step, value from metrics where run_uuid = ? and key not like 'system/%'", run)
        return len(rows), {(key, step): value for key, step, value in rows}

    def status(self, run: str) -> str:
        return self.rows("select status from runs where run_uuid = ?", run)[0][0]


def start(folder: RunFolder, uri: str, steps: int, pause: float = 0.0, status: str = "FINISHED") -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAINER), str(folder.path), uri, str(steps), str(pause), status]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "samewise sync" not in err, err
    return out.strip()


def expected(steps: int) -> Points:
    return {(key, step): value for step in range(1, steps + 1) for key, value in (("train/loss", 1 / step), ("train/step", float(step)))}


def sending(folder: RunFolder, store: Store) -> Any:
    """What sends a run to the store."""
    from samewise.runner.tracking.sending import Sending
    from samewise.runner.tracking.store import open_client

    return Sending(folder, {"uri": store.uri, "experiment": "tried"}, open_client(store.uri))


def write(folder: RunFolder) -> RunFolder:
    """A run of ten steps that has ended and of which nothing was sent."""
    from samewise.runner.tracking.journal import Journal

    folder.create()
    journal = Journal(folder.metrics, resume_step=None)
    for step in range(1, 11):
        journal.log({"train/loss": 1 / step, "train/step": float(step)}, step)
    journal.status("FINISHED")
    journal.close()
    return folder
