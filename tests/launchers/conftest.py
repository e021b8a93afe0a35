"""A SLURM cluster of two nodes on this machine, which runs for the tests of one file, and a project whose runs wait for the test."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CONF = """
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=1
SlurmdParameters=config_overrides
KillWait=20
JobRequeue=1
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
"""Nodes with one CPU each, so that two jobs run at a time, however many cores this machine has."""


HOLD = '''
import pathlib, time
from samewise.runner.interfaces import Callback

class Hold(Callback):
    """At the fifth step, waits while there is a file for its seed, or until the run is asked to stop: no clock decides what a test finds."""

    def __init__(self, folder: str, seed: int) -> None:
        self.file = pathlib.Path(folder, str(seed))

    def on_step(self, run, outcome):
        while run.step == 5 and self.file.exists() and not run.is_stopping:
            (self.file.parent / f"{self.file.name}.held").touch()
            time.sleep(0.05)
'''


class Cluster:
    """Two nodes, `n1` and `n2`, in two partitions: `main`, and `high`, which preempts it.

    Args:
        folder: Holds all its files; the path is short, because names of sockets must be short.
    """

    def __init__(self, folder: Path) -> None:
        self.conf = folder / "slurm.conf"
        self._folder = folder
        self._daemons = list[subprocess.Popen[bytes]]()
        ports = dict(zip(("controller", "first", "second"), _free_ports(3), strict=True))
        self.conf.write_text(CONF.format(host=socket.gethostname().split(".")[0], folder=folder, user=getpass.getuser(), **ports))

    def start(self) -> None:
        folder = self._folder
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}={folder / file}" for name, file in (("socket", "munge.sock"), ("log-file", "munged.log"), ("seed-file", "seed"))]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--pid-file={folder / 'munged.pid'}", *files)
        self.wait_for("munged", lambda: (folder / "munge.sock").exists())
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self.conf))
        self.wait_for("two idle nodes", lambda: self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle", "idle"])

    def clear(self) -> None:
        """End all jobs, so that a failed test leaves none to the next one."""
        self.call("scancel", "--partition=main")
        self.call("scancel", "--partition=high")
        until = time.monotonic() + 60
        while self.call("squeue", "-h") and time.monotonic() < until:
            time.sleep(0.2)

    def stop(self) -> None:
        self.clear()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def call(self, *command: str) -> str:
        """Run one of SLURM's commands; return its output."""
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SLURM_CONF": str(self.conf)}, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()

    def jobs(self, *states: str) -> list[str]:
        """The jobs in some states, as ARRAY_INDEX."""
        return self.call("squeue", "-h", "-r", "-o", "%i", f"--states={','.join(states) or 'all'}").split()

    def wait_for(self, what: str, is_so: Callable[[], object], *, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, f"waited in vain for {what}\n{self.call('squeue', '-r', '--states=all')}"
            time.sleep(0.1)

    def _daemon(self, name: str, *arguments: str) -> None:
        path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
        assert path
        with open(self._folder / f"{name}.out", "ab") as log:
            environment = {**os.environ, "SLURM_CONF": str(self.conf)}
            command = ["setpriv", "--pdeathsig", "TERM", path, *arguments]  # it also ends where the tests are killed
            self._daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True))


class Lab:
    """A project with a callback that holds runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holds = folder / "holds"
        self.code = folder / "lab" / "hold.py"
        for one in ("holds", "lab", "configs/callbacks"):
            (folder / one).mkdir(parents=True)
        (folder / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab"]\nconfigs = "configs"\n')
        (folder / "lab" / "__init__.py").touch()
        self.code.write_text(HOLD)
        target = f"hold:\n  _target_: lab.hold.Hold\n  folder: {self.holds}\n  seed: ${{seed}}\n"
        (folder / "configs" / "callbacks" / "hold.yaml").write_text(f"# Waits at a step\n{target}")

    def hold(self, *seeds: int) -> None:
        for seed in seeds:
            (self.holds / str(seed)).touch()

    def held(self, *seeds: int) -> bool:
        return all((self.holds / f"{seed}.held").exists() for seed in seeds)


@pytest.fixture(scope="session")
def make_lab() -> type[Lab]:
    return Lab


def _free_ports(count: int) -> list[int]:
    several = [socket.socket() for _ in range(count)]
    for one in several:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in several]
    for one in several:
        one.close()
    return ports


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[Cluster]:
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not (shutil.which(name) or shutil.which(name, path="/usr/sbin"))]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; on Debian: apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, set as the one that commands in this process use."""
    monkeypatch.setenv("SLURM_CONF", str(running_cluster.conf))
    yield running_cluster
    running_cluster.clear()
