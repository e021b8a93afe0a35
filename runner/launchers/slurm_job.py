"""A job on a machine of the cluster: starts the run's processes, and puts the job back into the queue where the run has saved and is not done.

    python -m samewise.runner.launchers.slurm_job SWEEP/slurm/0001.json     the batch script
    python -m samewise.runner.launchers.slurm_job rank SWEEP NUMBER         one of several ranks, started by srun on the job's machines

The run is a step (srun) whatever its size: it is steps that SLURM tells of a preemption before it comes, and of the end of their time. So this process passes
nothing on. Where SLURM ends the job itself (scancel, scontrol requeue, a preemption whose grace is over), it signals the step as well.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from samewise.runner.errors import INTERRUPTED
from samewise.runner.launchers import job
from samewise.runner.records.files import read_json
from samewise.runner.records.sweep_folder import SweepFolder

_EVERY_S = 1.0
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""srun's exit codes for a run that was told to stop before it could hear it."""


@dataclass
class Batch:
    """The batch script of one job.

    Args:
        file: Of the submission.
        index: In its array.
    """

    file: Path
    index: int
    given: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.given = read_json(self.file)
        self.number = int(self.given["points"][self.index])
        self.sweep = SweepFolder(self.file.parents[1])
        self.id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{self.index}"  # not SLURM_JOB_ID: that of an array's last job is the whole array's
        self._mark = self.file.parent / "cancelled" / self.id

    def run(self) -> int:
        """Start the run and wait for its end; then what has to be done about the job. The exit code."""
        signal.signal(signal.SIGTERM, _go_on)
        tries = self.sweep.word(self.number).get("tries", 0)
        code = 0 if self._mark.exists() else self._train()
        if self._mark.exists():
            return self._leave("scancel", self.id, code=code)
        if self._state() != "RUNNING":  # SLURM has ended it, and knows why
            return code
        word = self.sweep.word(self.number)
        told = word.get("tries", 0) > tries and "ended" in word
        if (told and word["exit_code"] == INTERRUPTED) or (not told and code in _STOPPED):
            if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self.given["requeues"]:
                return self._leave("scontrol", "requeue", self.id, code=code)
            print("put back into the queue too often: launcher.requeues", file=sys.stderr)
        elif code and not told:
            self.sweep.note(self.number, ended=time.time(), exit_code=code, said=_how(code))
        return code

    def _train(self) -> int:
        given = self.given
        ranks = given["nodes"] * given["tasks"]
        step = ["srun", "--mpi=none", "--input=none", "--kill-on-bad-exit=0", "--wait=120"]
        step += [f"--nodes={given['nodes']}", f"--ntasks={ranks}", f"--ntasks-per-node={given['tasks']}", f"--cpus-per-task={given['cpus']}"]
        point = [str(self.sweep.path), str(self.number)]
        module = ["samewise.runner.launchers.slurm_job", "rank", *point] if ranks > 1 else ["samewise.runner.launchers.job", *point]
        meeting = {"MASTER_PORT": str(_free_port())} if ranks > 1 else {}
        command = [*step, given["python"], "-u", "-m", *module]
        process = subprocess.Popen(command, env={**os.environ, **given["variables"][self.index], **meeting})
        told = 0.0
        while True:
            try:
                code = process.wait(_EVERY_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if told and time.monotonic() > told + given["notice_s"]:
                    return 128 + signal.SIGKILL  # it does not stop; the job's end will end it
                if not told and self._mark.exists():
                    told = time.monotonic()
                    process.send_signal(signal.SIGUSR1)  # which srun passes on to all ranks; at SIGTERM it would kill them

    def _state(self) -> str:
        """The job's state, as SLURM sees it."""
        found = re.search(r"\bJobState=(\w+)", _said("scontrol", "show", "job", "--oneliner", self.id))
        return found[1] if found else ""

    def _leave(self, *command: str, code: int) -> int:
        """Have SLURM end this job, and wait until it does."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(_said(*command), file=sys.stderr, end="")
        time.sleep(60)
        return code


def be_rank(sweep: Path, number: int) -> int:
    """Train as one of several ranks: what torchrun would have told it is in SLURM's variables."""
    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID", "MASTER_ADDR": "LAUNCH_NODE_IPADDR"}
    os.environ.update({name: os.environ[f"SLURM_{its}"] for name, its in names.items()})
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]
    return job.main(sweep, number)


def _how(code: int) -> str:
    """How a step ended that has left no word."""
    return f"killed by {signal.Signals(code - 128).name}" if code - 128 in set(signal.Signals) else f"ended with exit code {code} before it could say why"


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def _free_port() -> int:
    """On this machine, which is rank 0's."""
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def _go_on(number: int, frame: FrameType | None) -> None:
    """The run itself is told; this process waits for its end."""


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(be_rank(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(Batch(Path(sys.argv[1]), int(os.environ["SLURM_ARRAY_TASK_ID"])).run())
