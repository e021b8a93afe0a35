"""The ranks of a run communicate only with each other.

No other machine reaches ranks that share one machine, and a message from another process in place of a rank is not unpickled.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from samewise_forked import Forked
from samewise_tiny import DIGITS

TINY = (*DIGITS, "model.width=4", "max_epochs=100000", "max_steps=100000")
RANKS = (*TINY, "strategy=elastic", "replicas=2", "strategy.nproc=2")
SAYS = """
import os, sys
import torch.distributed as dist
from samewise.runner.strategies.peers import Processes

class Attack:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)

rank = int(os.environ["RANK"])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
peers = Processes(store, rank=rank, size=2, timeout_s=30)
said = Attack() if os.environ["STRANGER"] == str(rank) else "a rank"
try:
    heard = peers.gather(said) if sys.argv[3] == "gather" else peers.first(lambda: said)
except Exception as error:
    print(error, flush=True)
    os._exit(1)
os._exit(0)
"""


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    ("way", "guess"),
    [
        ("gather", "another"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("gather", "the secret"), ("first", "the secret"), ("first", "another"))),
    ],
)
def test_a_message_from_a_stranger_in_place_of_a_rank_is_not_unpickled(tmp_path, clean_environment, way, guess) -> None:
    mark, stranger = tmp_path / "mark", 1 if way == "gather" else 0
    started = []
    for rank in (0, 1):
        secret = {"SAMEWISE_SECRET": guess if rank == stranger else "the secret"}
        environment = {**clean_environment, **secret, "RANK": str(rank), "WORLD_SIZE": "2", "STRANGER": str(stranger)}
        environment |= {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", SAYS, str(tmp_path / "store"), str(mark), way]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [one.communicate(timeout=90)[0] for one in started]
    if guess == "the secret":  # otherwise the test could not fail
        assert mark.exists(), said
        return
    victim = 1 - stranger
    assert started[victim].returncode == 1
    assert "received a message that no rank of this run sent" in said[victim]
    assert not mark.exists()


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    """A run of two ranks on this machine, once both take steps."""
    started = Forked("train", *getattr(request, "param", RANKS), f"run_root={tmp_path}", said=tmp_path / "said")
    process = psutil.Process(started.pid)
    try:
        end = time.monotonic() + 120
        while not any(path.read_bytes().count(b"\n") > 2 for path in tmp_path.glob("*/*/trace.jsonl")):
            assert started.poll() is None, started.errors
            assert time.monotonic() < end, started.errors
            time.sleep(0.1)
        yield process
    finally:
        family = [process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=20)


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """The addresses at which a process and its children accept connections."""
    family = [process, *process.children(recursive=True)]
    return [tuple(one.laddr) for each in family for one in each.net_connections("inet") if one.status == psutil.CONN_LISTEN]


OTHERS = {
    "ddp": ("replicas=2", "strategy.nproc=2"),
    "fsdp": ("replicas=2", "strategy.nproc=2"),
    "pipeline": ("accumulate=2", "strategy.split=[layer2]"),
    "rpc": ("strategy.split=[layer2]",),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [pytest.param((*TINY, f"strategy={name}", *more), id=name, marks=[pytest.mark.fsdp] * (name == "fsdp")) for name, more in OTHERS.items()],
    indirect=True,
)
def test_ranks_of_every_strategy_listen_only_locally(training) -> None:
    places = listening(training)
    assert places
    assert {host for host, _ in places} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, places
