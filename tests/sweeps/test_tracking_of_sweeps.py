"""Whole sweeps that log to a real MLflow server while it and some jobs are killed: every value arrives once, by count and by sum."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from samewise_mlflow_server import Server

Point = tuple[str, int, float]
"""Key, step, value."""
POSTGRES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/lib/postgresql/bin"))
STEPS = 80
TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", f"max_steps={STEPS}", f"max_epochs={STEPS}", "evaluate.every_epochs=5")
LOGGED = ("checkpoint.every_steps=10", "tracking.log_every_steps=1", "tracking.send_every_s=0.2", "tracking.flush_timeout_s=120", "launcher.jobs=4")


class Postgres:
    """A PostgreSQL server from Debian's package, with a database for MLflow, which listens only on a socket in its folder.

    It refuses to run as root: then the user `postgres`, whom the package creates, owns its files.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samewise-pg-"))  # short: a socket's address has at most 107 characters
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        self._do("initdb", "-D", str(self.folder / "data"), "-U", "mlflow", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        self.start()
        self._do("createdb", "-h", str(self.folder), "-U", "mlflow", "mlflow")

    @property
    def uri(self) -> str:
        return f"postgresql+psycopg2://mlflow@/mlflow?host={self.folder}"

    def start(self) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self.folder}"
        self._do("pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-o", options, "-w", "-t", "120", "start")

    def crash(self) -> None:
        """End it at once, as if power were lost: it recovers from its own log."""
        self._do("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop")

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.crash()
        shutil.rmtree(self.folder)

    def _do(self, program: str, *arguments: str) -> None:
        who = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        subprocess.run([*who, str(POSTGRES / program), *arguments], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=180)


def wait_for(true: Callable[[], Any], seconds: float, told: Callable[[], str]) -> Any:
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, told()
        time.sleep(0.02)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    made.kill()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    made = Postgres()
    yield made
    made.close()


class Swept:
    """A running `samewise sweep`, and the state of its jobs.

    Args:
        folder: Where it is started.
        overrides: What is swept.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.overrides = folder, overrides
        self.killed: list[int] = []
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.folder / "sweep.log", "ab") as log:
            command = [sys.executable, "-m", "samewise", "sweep", *self.overrides]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def __enter__(self) -> Swept:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def describe(self) -> str:
        return (self.folder / "sweep.log").read_text()

    def jobs(self) -> dict[int, dict[str, Any]]:
        """The record of each job that has started, by its point."""
        return {int(file.stem): json.loads(file.read_text()) for file in self.folder.glob("runs/sweeps/*/jobs/*.json")}

    def runs(self) -> list[Path]:
        """The run folder of each point."""
        points = next(self.folder.glob("runs/sweeps/*/points.jsonl")).read_text().splitlines()
        return [self.folder / json.loads(line)["folder"] for line in points]

    def steps(self) -> int:
        """The number of steps of all jobs, including repeated ones."""
        return sum(file.read_bytes().count(b"train/loss") for file in self.folder.glob("runs/*/*/metrics.jsonl"))

    def wait_for_steps(self, count: int) -> None:
        wait_for(lambda: self.steps() >= count, 300, self.describe)

    def kill_one(self, *, with_sender: bool = False, first: Callable[[], None] = lambda: None) -> None:
        """Kill a job by SIGKILL that has saved a checkpoint and is still training; before that, do `first`."""
        number, pid = wait_for(self._in_the_middle, 300, self.describe)
        first()
        senders = [sender_of(self.runs()[number])] if with_sender else []
        for victim in (pid, *senders):
            os.kill(victim, signal.SIGKILL)
        self.killed.append(number)

    def _in_the_middle(self) -> tuple[int, int] | None:
        for number, job in self.jobs().items():
            journal = self.runs()[number] / "metrics.jsonl"
            if number not in self.killed and "ended" not in job and journal.is_file() and STEPS // 5 < journal.read_bytes().count(b"train/loss") < STEPS // 2:
                return number, job["pid"]
        return None

    def finish(self) -> None:
        """Wait until the command ends, and repeat it until it has nothing more to do."""
        for _ in range(4):
            code = self.process.wait(500)
            if code == 0:
                return
            self.process = self._start()
        raise AssertionError(self.describe())


def sender_of(run: Path) -> int:
    """The process that sends a run to MLflow, found by its output file, the run's `sender.log`."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(run / "sender.log") for file in process.open_files()):
                return process.pid
    raise AssertionError(f"nothing sends {run}")


def journalled(run: Path) -> list[Point]:
    """What a run has recorded, including metrics of the machine."""
    lines = [line for name in ("metrics.jsonl", "system.jsonl") if (run / name).exists() for line in (run / name).read_text().splitlines()]
    entries = [json.loads(line) for line in lines]
    return sorted((key, entry["step"], value) for entry in entries for key, value in entry.get("metrics", {}).items())


def tracked(client: Any, run_id: str) -> list[Point]:
    """What MLflow holds for a run, except the best values, which are derived from the others."""
    keys = [key for key in client.get_run(run_id).data.metrics if not key.startswith("best/")]
    return sorted((key, point.step, point.value) for key in keys for point in client.get_metric_history(run_id, key))


def require_every_value_once(swept: Swept, uri: str, *, jobs: int, kills: int) -> None:
    """Compare MLflow with the journals, by count, by sum, and value by value."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("samewise").experiment_id], max_results=1000)
    by_folder = {run.data.tags["samewise.folder"]: run for run in found}
    assert len(found) == len(by_folder) == len(swept.runs()) == jobs
    assert Counter(job["tries"] for job in swept.jobs().values()) == {1: jobs - kills, 2: kills}, swept.describe()
    count, total, journal_count, journal_total = 0, 0.0, 0, 0.0
    for folder in swept.runs():
        run = by_folder[str(folder)]
        assert run.info.status == "FINISHED"
        here, there = journalled(folder), tracked(client, run.info.run_id)
        assert len({(key, step) for key, step, _ in here}) == len(here)
        assert [step for key, step, _ in here if key == "train/loss"] == list(range(1, STEPS + 1))
        assert there == here
        count, total = count + len(there), total + math.fsum(value for _, _, value in there)
        journal_count, journal_total = journal_count + len(here), journal_total + math.fsum(value for _, _, value in here)
    assert count == journal_count >= jobs * STEPS * 2
    assert total == journal_total
    assert math.isfinite(total)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_killing_the_server_twice_and_three_jobs_loses_and_doubles_nothing(server: Server, tmp_path: Path) -> None:
    server.start()
    values = ("optimizer.lr=0.02,0.05,0.1,0.2", "seed=range(4)", f"tracking.uri={server.uri}")
    with Swept(tmp_path, *TINY, *LOGGED, *values) as swept:
        swept.wait_for_steps(STEPS)
        swept.kill_one()
        swept.wait_for_steps(4 * STEPS)
        swept.kill_one(with_sender=True, first=server.kill)  # like a scheduler that ends a whole job before everything has been sent
        server.start()
        swept.wait_for_steps(9 * STEPS)
        swept.kill_one(first=server.kill)
        server.start()
        swept.finish()
        require_every_value_once(swept, server.uri, jobs=16, kills=3)


@pytest.mark.slow
@pytest.mark.skipif(not (POSTGRES / "initdb").exists(), reason="PostgreSQL is not installed: apt-get install postgresql")
@pytest.mark.skipif(importlib.util.find_spec("psycopg2") is None, reason="psycopg2 is not installed")
def test_killing_a_server_and_its_postgresql_loses_and_doubles_nothing(postgres: Postgres, tmp_path: Path) -> None:
    server = Server(tmp_path / "server", store=postgres.uri)
    try:
        server.start()
        values = ("optimizer.lr=0.02,0.05,0.1", f"tracking.uri={server.uri}")
        with Swept(tmp_path, *TINY, *LOGGED, *values) as swept:
            swept.kill_one(with_sender=True, first=server.kill)
            server.start()
            postgres.crash()
            time.sleep(1.0)  # the server is running, but its database is not
            postgres.start()
            swept.finish()
            require_every_value_once(swept, server.uri, jobs=3, kills=1)
    finally:
        server.kill()
