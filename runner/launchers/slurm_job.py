"""Runs on the cluster's machine: starts the run's processes, and requeues the job if the run has
saved and is not finished.

    python -m samewise.runner.launchers.slurm_job SWEEP/slurm/0001.json     the batch script python
    -m samewise.runner.launchers.slurm_job rank SWEEP NUMBER         one of several ranks, started
    by srun on the job's machines

The run is a step (srun) whatever its size: SLURM notifies steps before a preemption and before
their time runs out. So this process passes nothing on. Where SLURM ends the job itself (scancel,
scontrol requeue, a preemption whose grace is over), it signals the step as well.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from samewise.runner.errors import INTERRUPTED
from samewise.runner.launchers import job
from samewise.runner.launchers.submission import Submitted, describe_exit_code
from samewise.runner.strategies.sealed import SECRET, new_secret

_EVERY_S = 1.0
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""srun's exit codes for a run that was told to stop before it could handle the signal."""


class Batch:
    """The batch script of one job."""

    def __init__(self, job: Submitted) -> None:
        self._job, self._given, self._sweep = job, job.given, job.sweep
        # Not SLURM_JOB_ID: for an array's last job it is the id of the whole array
        self._id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{job.index}"
        self._mark = job.mark(self._id)

    def run(self) -> int:
        """Start the run and wait for it, then requeue or end the job; return the exit code."""
        signal.signal(signal.SIGTERM, _ignore_signal)
        tries = self._sweep.word(self._job.number).get("tries", 0)
        code = 0 if self._mark.exists() else self._train()
        if self._mark.exists():
            return self._leave("scancel", self._id, code=code)
        if self._state() != "RUNNING":  # SLURM has ended it, and knows why
            return code
        word = self._sweep.word(self._job.number)
        told = word.get("tries", 0) > tries and "ended" in word
        if (told and word["exit_code"] == INTERRUPTED) or (not told and code in _STOPPED):
            if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self._given["requeues"]:
                return self._leave("scontrol", "requeue", self._id, code=code)
            print("requeued too often; launcher.requeues sets the limit", file=sys.stderr)
        elif code and not told:
            said = describe_exit_code(128 - code if code - 128 in set(signal.Signals) else code)
            self._sweep.note(self._job.number, ended=time.time(), exit_code=code, said=said)
        return code

    def _train(self) -> int:
        given = self._given
        ranks = given["nodes"] * given["tasks"]
        step = ["srun", "--mpi=none", "--input=none", "--kill-on-bad-exit=0", "--wait=120"]
        step += [
            f"--nodes={given['nodes']}",
            f"--ntasks={ranks}",
            f"--ntasks-per-node={given['tasks']}",
            f"--cpus-per-task={given['cpus']}",
        ]
        point = [str(self._sweep.path), str(self._job.number)]
        module = (
            ["samewise.runner.launchers.slurm_job", "rank", *point]
            if ranks > 1
            else ["samewise.runner.launchers.job", *point]
        )
        meeting = {"MASTER_PORT": str(_free_port()), SECRET: new_secret()} if ranks > 1 else {}
        command = [*step, given["python"], "-P", "-u", "-m", *module]
        process = subprocess.Popen(command, env={**os.environ, **self._job.variables, **meeting})
        told = 0.0
        while True:
            try:
                code = process.wait(_EVERY_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if told and time.monotonic() > told + given["notice_s"]:
                    return 128 + signal.SIGKILL  # it does not stop; the end of the job will end it
                if not told and self._mark.exists():
                    told = time.monotonic()
                    # Srun passes it on to all ranks; at SIGTERM it would kill them
                    process.send_signal(signal.SIGUSR1)

    def _state(self) -> str:
        found = re.search(
            r"\bJobState=(\w+)", _output_of("scontrol", "show", "job", "--oneliner", self._id)
        )
        return found[1] if found else ""

    def _leave(self, *command: str, code: int) -> int:
        """Make SLURM end this job, and wait for that."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(_output_of(*command), file=sys.stderr, end="")
        time.sleep(60)
        return code


def be_rank(sweep: Path, number: int) -> int:
    """Train as one of several ranks, with SLURM's variables in place of torchrun's."""
    names = {
        "RANK": "PROCID",
        "WORLD_SIZE": "NTASKS",
        "LOCAL_RANK": "LOCALID",
        "MASTER_ADDR": "LAUNCH_NODE_IPADDR",
    }
    os.environ.update({name: os.environ[f"SLURM_{its}"] for name, its in names.items()})
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]
    return job.main(sweep, number)


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def _free_port() -> int:
    """A free port on this machine, which runs rank 0."""
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The run itself gets the signal; this process waits for it to end."""


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(be_rank(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(Batch(Submitted.read(Path(sys.argv[1]), int(os.environ["SLURM_ARRAY_TASK_ID"]))).run())
