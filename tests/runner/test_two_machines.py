"""One run across two machines, each with its own address: two network namespaces joined by a cable (a veth pair), torchrun in each."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

TINY = [*DIGITS, "model.width=8", "replicas=2", "batch_size=8", "max_steps=6", "strategy=elastic"]
ADDRESSES = ["192.0.2.1", "192.0.2.2"]
"""Reserved for documentation (RFC 5737): nobody owns them, and they only exist in the namespaces."""
PORT = 29500
"""It is free: nothing else runs in these namespaces."""


@dataclass(frozen=True)
class Machine:
    """A network namespace, and its end of the cable."""

    name: str
    interface: str
    address: str

    def start(self, arguments: list[str], said: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with said.open("wb") as file:
            command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
            return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def received(self) -> int:
        """The number of bytes received over the cable."""
        (link,) = json.loads(ip("-n", self.name, "-json", "-statistics", "link", "show", "dev", self.interface))
        return link["stats64"]["rx"]["bytes"]

    def remove(self) -> None:
        """Removes it with everything still running there; the cable disappears with its end."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines that can reach each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip (of iproute2) to make network namespaces with")
    me = os.getpid()
    made = [Machine(f"samewise-{me}-{number}", f"sw{me}n{number}", address) for number, address in enumerate(ADDRESSES)]
    try:
        try:
            for machine in made:
                ip("netns", "add", machine.name)
            ip("link", "add", made[0].interface, "netns", made[0].name, "type", "veth", "peer", "name", made[1].interface, "netns", made[1].name)
        except subprocess.CalledProcessError as refused:
            pytest.skip(f"network namespaces cannot be made here, which takes root: {refused.stderr.strip()}")
        for machine in made:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.interface)
            ip("-n", machine.name, "link", "set", machine.interface, "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield made
    finally:
        for machine in made:
            machine.remove()


@pytest.mark.slow
def test_two_machines_give_the_bits_of_one_process(machines, samewise, tmp_path):
    jobs = []
    for number, machine in enumerate(machines):
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=one",
            f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
            f"--rdzv-conf=is_host={1 - number},timeout=120",  # torchrun would tell them apart by host name, and both have the same one
            f"--local-addr={machine.address}",
        ]
        train = ["-m", "samewise", "train", *TINY, f"run_root={tmp_path / 'shared'}", "strategy.join_timeout_s=120", "--json"]
        jobs.append(machine.start([*torchrun, *train], tmp_path / f"said-{number}"))
    codes = [job.wait(timeout=200) for job in jobs]
    said = [(tmp_path / f"said-{number}").read_text() for number in range(2)]
    assert codes == [0, 0], said
    summaries = [line for text in said for line in text.splitlines() if line.startswith("{")]
    assert len(summaries) == 1, "rank 0 alone prints the summary"
    assert min(machine.received() for machine in machines) > 2**20, "the gradients went over the cable"
    alone = samewise("train", *TINY, f"run_root={tmp_path / 'alone'}", "strategy=single", "--json")
    assert json.loads(summaries[0])["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    traces = [next((tmp_path / name).glob("*/*/trace.jsonl")).read_bytes() for name in ("shared", "alone")]
    assert traces[0] == traces[1]
