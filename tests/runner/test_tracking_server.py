from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from samewise_mlflow_server import Server

TRAINER = Path(__file__).with_name("tracking_trainer.py")


def points(server: Server) -> list[tuple[str, int, float]]:
    connection = sqlite3.connect(server.database, timeout=30)
    try:
        return connection.execute("select key, step, value from metrics where key not like 'system/%' order by key, step").fetchall()
    finally:
        connection.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    made.kill()


def expected(steps: int) -> list[tuple[str, int, float]]:
    return [("train/loss", step, 1 / step) for step in range(1, steps + 1)] + [("train/step", step, float(step)) for step in range(1, steps + 1)]


def start(folder: Path, uri: str, steps: int, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAINER), str(folder), uri, str(steps), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killing_the_server_twice_and_the_trainer_once_loses_and_doubles_nothing(server: Server, tmp_path: Path) -> None:
    folder, steps = tmp_path / "tried" / "0123456789ab", 1500
    server.start()
    trainer = start(folder, server.uri, steps, 0.01)
    time.sleep(5.0)
    server.kill()
    time.sleep(1.0)
    trainer.kill()
    trainer.communicate()
    trainer = start(folder, server.uri, steps, 0.01)
    time.sleep(1.0)
    server.start()
    time.sleep(3.0)
    server.kill()
    time.sleep(1.0)
    server.start()
    _, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err
    assert points(server) == expected(steps)
    connection = sqlite3.connect(server.database)
    assert connection.execute("select status from runs").fetchall() == [("FINISHED",)]
    assert len(list((server.folder / "files").rglob("confusion.txt"))) == 1
    connection.close()


@pytest.mark.slow
def test_what_an_absent_server_missed_is_sent_by_sync(server: Server, samewise: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tried" / "0123456789ab"
    trainer, said = start(folder, server.uri, 200, 0.0), folder / "sender.log"
    until = time.monotonic() + 120
    while not (said.exists() and "cannot send to MLflow" in said.read_text()):
        assert time.monotonic() < until
        time.sleep(0.1)
    everything = [trainer.pid, *(child.pid for child in psutil.Process(trainer.pid).children(recursive=True))]
    for pid in everything:  # like a scheduler that kills a whole job
        os.kill(pid, signal.SIGKILL)
    trainer.communicate()
    assert not server.database.exists()
    server.start()
    done = samewise("sync", "--run-root", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sent 400 metrics" in done.stdout
    assert points(server) == expected(200)
    again = samewise("sync", "--run-root", tmp_path / "runs", "--json")
    assert '"metrics": 0' in again.stdout
