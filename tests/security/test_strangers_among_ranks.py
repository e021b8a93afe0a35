"""The ranks of a run communicate only with each other.

No other machine reaches ranks that share one machine, and a message from another process in place of a rank is not unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
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
CALLS = """
import os, sys
import torch.distributed as dist
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed import autograd, rpc
from torch.distributed.rpc import api
from samewise.runner.strategies.rpc import seal_calls

class Attack:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)

rank, address = int(sys.argv[1]), sys.argv[2]
store = dist.HashStore()  # of this process alone: it says of the other what this process wants
for one in (0, 1):
    store.set(f"names/{one}", f"rank{one}")
    store.set(f"addrs/rank{one}", address)
seal_calls()
autograd._init(rank)
agent = TensorPipeAgent(store, f"rank{rank}", rank, 2, rpc.TensorPipeRpcBackendOptions(rpc_timeout=20, init_method="env://"), {}, [])
api._set_and_start_rpc_agent(agent)
api._init_rpc_states(agent)
if rank == 0:
    print(store.get("addrs/rank0").decode(), flush=True)
    sys.stdin.read()
else:
    try:
        print(rpc.rpc_sync("rank0", abs, args=(Attack(),), timeout=20), flush=True)
    except Exception as error:
        print(error, flush=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["another", "the secret"])
def test_a_stranger_s_remote_call_is_not_unpickled(tmp_path, clean_environment, guess) -> None:
    """strategy=rpc takes calls at a port that anybody on the machine can connect to."""
    more = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TP_SOCKET_IFNAME": "lo"}

    def start(rank: int, secret: str, address: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CALLS, str(rank), address, str(tmp_path / "mark")]
        environment = {**clean_environment, **more, "SAMEWISE_SECRET": secret}
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    served = start(0, "the secret")
    try:
        assert served.stdout is not None
        told = start(1, guess, served.stdout.readline().strip()).communicate(timeout=90)[0]
    finally:
        served.communicate(timeout=30)
    assert (tmp_path / "mark").exists() == (guess == "the secret"), told  # with the secret the call is made, otherwise the test could not fail
    assert guess == "the secret" or "received a message that no rank of this run sent (a remote call)" in told


def test_a_config_that_a_stranger_has_put_into_the_store_is_not_trained(tmp_path, monkeypatch) -> None:
    from samewise.runner.config.compose import compose
    from samewise.runner.config.project import Project
    from samewise.runner.errors import SamewiseError
    from samewise.runner.strategies import meeting
    from samewise.runner.training.launch import rank

    store = dist.HashStore()
    store.set("config", json.dumps({"config": "model: null", "done": {"status": "finished"}}))
    monkeypatch.setattr(meeting, "_met", {"store": store})
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "SAMEWISE_SECRET": "secret"}.items():
        monkeypatch.setenv(name, value)
    composed = compose(["experiment=resnet18_digits", f"run_root={tmp_path}"], project=Project(tmp_path))
    with pytest.raises(SamewiseError, match="no rank of this run sent"):
        rank(composed, as_json=False, look=lambda: None, check=lambda: None)


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


@pytest.mark.slow
def test_ranks_listen_locally_and_unpickle_nothing_from_their_store(training, tmp_path) -> None:
    places = listening(training)
    assert places
    assert {host for host, _ in places} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, places
    ranks = [one for one in training.children(recursive=True) if "launch" in " ".join(one.cmdline())]
    store = dist.TCPStore("127.0.0.1", int(ranks[0].environ()["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    keys, payload = store.list_keys(), pickle.dumps(Attack(tmp_path / "mark"))
    assert keys
    for key in keys:
        store.set(key, payload)
    ranks[-1].kill()  # the others, and the agent, look into their store
    with contextlib.suppress(psutil.TimeoutExpired):
        training.wait(30)
    assert not (tmp_path / "mark").exists()


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
