"""Where the processes of a run meet: MASTER_ADDR and MASTER_PORT, tcp://, file://; over the backends that torch is built with."""

import os
import socket
import subprocess
import sys

import pytest

from samewise.runner.errors import ConfigError, PeerFailed
from samewise.runner.strategies import lost_connections, meeting


@pytest.fixture
def as_rank_0(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meeting, "_met", {})


def refusal(init_method: str | None) -> str:
    meeting._met.clear()
    with pytest.raises(ConfigError) as caught:
        meeting.meeting_point(2.0, init_method)
    return str(caught.value)


def test_a_meeting_file_serves_one_job_and_a_leftover_one_is_refused(as_rank_0, tmp_path) -> None:
    place = f"file://{tmp_path}/meet"
    store = meeting.meeting_point(2.0, place)
    store.set("joined/0", "")
    assert store.check(["joined/0"])
    assert "left by another job" in refusal(place)
    assert f"rm {tmp_path}/meet" in refusal(place)


@pytest.mark.parametrize("agent_keeps_a_store", [False, True])
def test_a_tcp_address_with_a_taken_port_is_refused_naming_the_setting(as_rank_0, monkeypatch, agent_keeps_a_store) -> None:
    if agent_keeps_a_store:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        told = refusal(f"tcp://localhost:{taken.getsockname()[1]}")
    assert "strategy.init_method: another program uses this port" in told


def test_a_connection_lost_before_training_names_the_rank_that_is_gone(as_rank_0, monkeypatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(
        lost_connections,
        "places",
        {0: [lost_connections.machine_name(), str(os.getpid())], 1: [lost_connections.machine_name(), str(gone.pid)], 2: ["elsewhere", str(gone.pid)]},
    )
    found = lost_connections.explain(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36811"))
    assert isinstance(found, PeerFailed)
    assert str(found).startswith("rank 0: lost rank 1, whose process is gone, before the training began")
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert lost_connections.explain(other) is other
