import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
