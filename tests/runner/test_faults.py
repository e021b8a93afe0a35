"""A process hangs, or its device is lost: the run ends in time and names the rank, the step and the exchange, or continues with fewer processes."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from samewise_forked import Forked
from samewise_runner_launched import TINY, ranks_of, start, wait_for_step

from samewise.runner.errors import TrainingError
from samewise.runner.strategies.peers import Processes

TIMED_OUT = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


def rank(store: object, number: int, doing: str) -> Processes:
    peers = Processes(store, rank=number, size=4, timeout_s=5)
    peers.PATIENCE_S = 0.3
    peers.doing = doing
    return peers


def test_a_missing_rank_is_named_with_the_waiting_ranks_and_their_exchanges() -> None:
    store = dist.HashStore()
    for number in (1, 3):
        store.set(f"waited/{number}", "while exchanging small values at step 7")
    told = rank(store, 0, "exchanging bucket 2 of the gradients").explain(TIMED_OUT, step=7)
    assert isinstance(told, TrainingError)
    assert "rank 2: did not respond" in str(told)
    assert "rank 0 waited 5 s while exchanging bucket 2 of the gradients at step 7" in str(told)
    assert "ranks 1 and 3 waited 5 s while exchanging small values at step 7" in str(told)
    assert "strategy.timeout_s" in str(told)


def test_ranks_that_wait_for_each_other_are_reported() -> None:
    store = dist.HashStore()
    for number in (0, 1, 2):
        store.set(f"waited/{number}", "while exchanging small values at step 7")
    told = rank(store, 3, "waiting for a message from rank 0").explain(TIMED_OUT, step=8)
    assert "wait for each other" in str(told)
    assert "rank 3 waited 5 s while waiting for a message from rank 0 at step 8" in str(told)


@contextlib.contextmanager
def launch(run_root: Path, *overrides: str) -> Iterator[Forked]:
    process = start(run_root, *overrides)
    try:
        yield process
    finally:
        for one in [*ranks_of(process).values(), process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.kill()


def wait_for_another(process: Forked, number: int, before: int) -> psutil.Process:
    """The process that is rank `number` after the one with the id `before`."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        found = ranks_of(process).get(number)
        if found and found.pid != before:
            return found
        time.sleep(0.01)
    raise AssertionError("it was not started again")


def weights(samewise, run_root: Path, *overrides: str) -> str:
    done = samewise("train", *TINY, f"run_root={run_root}", *overrides, "--json", code=0)
    return json.loads(done.stdout)["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_hangs_ends_the_run_within_the_timeout_and_is_named(tmp_path, stopped) -> None:
    with launch(tmp_path, "strategy.nproc=2", "strategy.timeout_s=6", "max_steps=4000") as process:
        wait_for_step(process, tmp_path, 3)
        ranks_of(process)[stopped].send_signal(signal.SIGSTOP)
        code, said = process.wait(200), process.errors
    assert code == 1, said
    assert f"rank {stopped}: did not respond: rank {1 - stopped} waited 6 s while exchanging" in said
    assert " at step " in said
    assert "gloo:" in said, "torch's flight recorder names the collective"
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_dies_twice_is_dropped_and_the_result_is_the_same(samewise, tmp_path) -> None:
    """Its device is lost: it is killed, restarted, and killed before the next checkpoint. Then two processes carry what four did."""
    overrides = ["max_steps=16", "checkpoint.every_steps=6"]
    with launch(tmp_path / "lost", "strategy.nproc=4", "strategy.max_restarts=5", "strategy.shrink=true", *overrides) as process:
        wait_for_step(process, tmp_path / "lost", 8)
        first = ranks_of(process)[3]
        first.kill()
        wait_for_another(process, 3, first.pid).kill()
        code, output, said = process.wait(400), process.output, process.errors
    assert code == 0, said
    assert "rank 3: was killed by SIGKILL" in said
    assert "with 2 processes" in said
    assert json.loads(output)["weights_sha256"] == weights(samewise, tmp_path / "alone", "strategy=single", *overrides)
