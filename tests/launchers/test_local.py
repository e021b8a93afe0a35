"""`launcher=local` divides this machine's devices among its jobs. The jobs here are real processes that print which devices they were given."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from samewise.runner.launchers.base import Job, Standing
from samewise.runner.launchers.local import Local
from samewise.runner.records.sweep_folder import SweepFolder


class PrintsDevices(Job):
    """Prints which devices it sees, and keeps running."""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", "echo devices $CUDA_VISIBLE_DEVICES; exec sleep 600"]


class Started:
    """A launcher on a machine with four devices, and its jobs."""

    def __init__(self, folder: Path, jobs: int | None) -> None:
        self.folder, self.launcher = folder, Local(jobs=jobs, pin=False, preload=False)
        self.running = dict[int, Job]()

    def start(self, processes: int = 1) -> str:
        """Start one more job; return its devices."""
        job = PrintsDevices(len(list(self.folder.glob("logs/*"))), "", self.folder, processes=processes, wants_gpu=True)
        assert self.launcher.room(list(self.running.values())) == 1
        self.launcher.submit([job])
        self.running[job.number] = job
        while not (said := SweepFolder(job.sweep).log(job.number).read_text()).endswith("\n"):
            time.sleep(0.01)
        return said.removeprefix("devices").strip()

    def end(self, number: int) -> None:
        self.launcher.cancel([number], kill=True)
        while self.launcher.look([number])[number].standing is not Standing.ended:
            time.sleep(0.01)
        del self.running[number]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Started]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (tmp_path / "logs").mkdir()
    made = Started(tmp_path, request.param)
    yield made
    for number in list(made.running):
        made.end(number)


@pytest.mark.parametrize("started", [8], indirect=True)
def test_a_later_job_takes_the_device_with_the_fewest_running_jobs(started: Started) -> None:
    taken = [started.start() for _ in range(8)]
    started.end(2)
    started.end(6)
    started.end(1)
    assert {taken[2], taken[6]} == {"2"}
    assert [started.start() for _ in range(3)] == ["2", "1", "2"]
