"""`launcher=ray` on a real Ray, in a network namespace of its own: detached, cancelled, failing; the same bits as alone."""

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

TINY = [*DIGITS, "model.width=8", "launcher=ray", "launcher.poll_s=0.5"]
ADDRESS = "192.0.2.1"
"""An address reserved for documentation (RFC 5737), which exists only in the namespace. Ray does not accept 127.0.0.1."""
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of one node with two CPUs, which accepts jobs with the token. It can be reached only from its namespace.

    Args:
        namespace: The name of its network namespace.
        token: The token that it requires.
        ray: Its command.
        folder: Its files; the path is short, because names of sockets must be short.
    """

    namespace: str
    token: str
    ray: str
    folder: Path

    def start(self, environment: dict[str, str]) -> None:
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", "r0", "netns", self.namespace, "type", "veth", "peer", "name", "r1", "netns", self.namespace)
        run("ip", "-n", self.namespace, "address", "add", f"{ADDRESS}/24", "dev", "r0")
        for interface in ("lo", "r0", "r1"):
            run("ip", "-n", self.namespace, "link", "set", interface, "up")
        head = [self.ray, "start", "--head", f"--node-ip-address={ADDRESS}", "--num-cpus=2", "--num-gpus=0", "--disable-usage-stats"]
        head += ["--object-store-memory=100000000", f"--temp-dir={self.folder}"]
        run("ip", "netns", "exec", self.namespace, *head, env={**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token})

    def stop(self) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread into the namespace, as `ip netns exec` does with a new process."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/{self.namespace}") as there:
            assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                libc.setns(home.fileno(), 0)


def run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def ray_command(folder: Path, environment: dict[str, str]) -> str:
    """Ray's command: the one on the path, or one from an environment made for these tests."""
    if (found := shutil.which("ray")) is not None:
        return found
    run(sys.executable, "-m", "venv", str(folder), env=environment)
    pip = subprocess.run(
        [str(folder / "bin" / "pip"), "install", "--quiet", "ray[default]>=2.50"], capture_output=True, text=True, check=False, env=environment
    )
    if pip.returncode:
        pytest.skip(f"Ray cannot be installed here: {(pip.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return str(folder / "bin" / "ray")


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory, clean_environment) -> Iterator[Cluster]:
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip (of iproute2) to make a network namespace with")
    tried = subprocess.run(["ip", "netns", "add", f"tried-{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here, which takes root: {tried.stderr.strip()}")
    run("ip", "netns", "delete", f"tried-{os.getpid()}")
    command = ray_command(tmp_path_factory.mktemp("ray") / "env", clean_environment)
    cluster = Cluster(f"samewise-ray-{os.getpid()}", secrets.token_hex(32), command, Path(tempfile.mkdtemp(prefix="ray-")))
    try:
        cluster.start(clean_environment)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def nothing_set(monkeypatch, tmp_path) -> None:
    """None of Ray's variables, and no file with a token."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def cluster(running_cluster: Cluster, nothing_set, monkeypatch) -> Iterator[Cluster]:
    """The cluster, set in the variables of this process."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setenv("RAY_AUTH_TOKEN", running_cluster.token)
    with running_cluster.inside():
        yield running_cluster


def points(samewise, *sweep: str) -> list[dict]:
    return json.loads(samewise("sweep", *sweep, "--status", "--json").stdout)["points"]


def wait_for(what: str, is_so: Callable[[], object], *, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.5)


@pytest.mark.slow
def test_three_jobs_give_the_bits_of_runs_alone(samewise, cluster, tmp_path, monkeypatch):
    sweep = [*TINY, f"run_root={tmp_path}", "seed=range(3)"]
    with monkeypatch.context() as without:
        without.delenv("RAY_AUTH_TOKEN")
        refused = samewise("sweep", *sweep)
    assert refused.returncode == 2
    assert "Ray refused the request: Unauthorized" in refused.stderr
    assert "3 jobs submitted" in samewise("sweep", *sweep).stderr
    assert "3 points, 0 to run" in samewise("sweep", *sweep).stderr  # queued or running: not submitted twice
    done = samewise("sweep", *sweep, "--wait", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)["points"]
    assert [(point["state"], point["tries"]) for point in found] == [("finished", 1)] * 3
    alone = samewise("train", *TINY, f"run_root={tmp_path / 'alone'}", "seed=2", "--json")
    assert found[2]["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert len({point["weights_sha256"] for point in found}) == 3


@pytest.mark.slow
def test_cancelled_jobs_save_and_resume_when_submitted_again(samewise, cluster, tmp_path):
    sweep = [*TINY, f"run_root={tmp_path}", "seed=0,1", "max_steps=null", "max_epochs=1000000", "evaluate.every_epochs=null", "launcher.cpus=2"]
    samewise("sweep", *sweep)
    wait_for("the first step", lambda: points(samewise, *sweep)[0]["steps"])
    assert [point["state"] for point in points(samewise, *sweep)] == ["running", "waiting"]
    samewise("sweep", *sweep, "--cancel")
    wait_for("the end of the first", lambda: points(samewise, *sweep)[0]["state"] == "interrupted")
    first, second = points(samewise, *sweep)
    assert "STOPPED; step " in first["reason"]
    assert "stopped by SIGTERM, and saved" in first["reason"]
    assert (second["state"], second["reason"], second["tries"]) == ("interrupted", "STOPPED while waiting", 0)
    journal = Path(first["folder"], "metrics.jsonl")
    before = journal.read_bytes()

    samewise("sweep", *sweep)
    wait_for("further steps", lambda: points(samewise, *sweep)[0]["tries"] == 2 and points(samewise, *sweep)[0]["steps"] > first["steps"])
    samewise("sweep", *sweep, "--cancel")
    wait_for("the end of both", lambda: {point["state"] for point in points(samewise, *sweep)} == {"interrupted"})
    assert journal.read_bytes().startswith(before)  # with the times of the first try: no step was repeated
