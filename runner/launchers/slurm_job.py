"""Run on the cluster's machine: start the run's processes, and requeue a job that is not finished.

The batch script, and one of several ranks that srun starts on the job's machines:

    python -m samewise.runner.launchers.slurm_job SWEEP/slurm/0001.json
    python -m samewise.runner.launchers.slurm_job rank SWEEP NUMBER

The run is a step (srun) whatever its size: SLURM notifies steps before a preemption and before
their time runs out, and signals them when it ends the job itself (scancel, scontrol requeue, a
preemption whose grace is over). So this process passes no signal on.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from samewise.runner.errors import INTERRUPTED
from samewise.runner.launchers import job
from samewise.runner.launchers.submission import Submitted, describe_exit_code
from samewise.runner.strategies.sealed import SECRET, new_secret

_POLL_S = 1.0
_STOP_CODES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""srun's exit codes for a run that was told to stop before it could handle the signal."""


class Batch:
    """Batch script of one job."""

    def __init__(self, job: Submitted) -> None:
        self._job, self._record, self._sweep = job, job.record, job.sweep
        # Not SLURM_JOB_ID: for an array's last job it is the id of the whole array
        self._id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{job.index}"
        self._mark = job.mark(self._id)

    def run(self) -> int:
        """Start the run, wait for it, then requeue or end the job; return the exit code."""
        # The run itself gets the signal, and this process waits for it
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        tries = self._sweep.word(self._job.number).get("tries", 0)
        code = 0 if self._mark.exists() else self._train()
        if self._mark.exists():
            return self._end_job("scancel", self._id, code=code)
        if self._state() != "RUNNING":
            # SLURM has ended the job, and knows why
            return code
        record = self._sweep.word(self._job.number)
        has_recorded_end = record.get("tries", 0) > tries and "ended" in record
        if (has_recorded_end and record["exit_code"] == INTERRUPTED) or (
            not has_recorded_end and code in _STOP_CODES
        ):
            if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self._record["requeues"]:
                return self._end_job("scontrol", "requeue", self._id, code=code)
            print("requeued too often; launcher.requeues sets the limit", file=sys.stderr)
        elif code and not has_recorded_end:
            message = describe_exit_code(128 - code if code - 128 in set(signal.Signals) else code)
            self._sweep.note(self._job.number, ended=time.time(), exit_code=code, said=message)
        return code

    def _train(self) -> int:
        """Run the step, and return its exit code as a shell would."""
        submission = self._record
        ranks = submission["nodes"] * submission["tasks"]
        step = ["srun", "--mpi=none", "--input=none", "--kill-on-bad-exit=0", "--wait=120"]
        step += [
            f"--nodes={submission['nodes']}",
            f"--ntasks={ranks}",
            f"--ntasks-per-node={submission['tasks']}",
            f"--cpus-per-task={submission['cpus']}",
        ]
        point = [str(self._sweep.path), str(self._job.number)]
        module = (
            ["samewise.runner.launchers.slurm_job", "rank", *point]
            if ranks > 1
            else ["samewise.runner.launchers.job", *point]
        )
        rendezvous = {"MASTER_PORT": str(_free_port()), SECRET: new_secret()} if ranks > 1 else {}
        command = [*step, submission["python"], "-P", "-u", "-m", *module]
        process = subprocess.Popen(command, env={**os.environ, **self._job.variables, **rendezvous})
        stop_time = 0.0
        while True:
            try:
                code = process.wait(_POLL_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if stop_time and time.monotonic() > stop_time + submission["notice_s"]:
                    # The run does not stop; the end of the job will end it
                    return 128 + signal.SIGKILL
                if not stop_time and self._mark.exists():
                    stop_time = time.monotonic()
                    # srun passes SIGUSR1 on to all ranks; at SIGTERM it would kill them
                    process.send_signal(signal.SIGUSR1)

    def _state(self) -> str:
        """Return SLURM's name for the job's state; empty if it does not say."""
        match = re.search(
            r"\bJobState=(\w+)", _output_of("scontrol", "show", "job", "--oneliner", self._id)
        )
        return match[1] if match else ""

    def _end_job(self, *command: str, code: int) -> int:
        """Make SLURM end or requeue this job, and wait for that."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(_output_of(*command), file=sys.stderr, end="")
        time.sleep(60)
        return code


def be_rank(sweep: Path, number: int) -> int:
    """Train as one of several ranks, with SLURM's variables in place of torchrun's."""
    variables = {
        "RANK": "PROCID",
        "WORLD_SIZE": "NTASKS",
        "LOCAL_RANK": "LOCALID",
        "MASTER_ADDR": "LAUNCH_NODE_IPADDR",
    }
    os.environ.update(
        {name: os.environ[f"SLURM_{slurm_name}"] for name, slurm_name in variables.items()}
    )
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]
    return job.main(sweep, number)


def _output_of(*command: str) -> str:
    """Run a command, and return its output and errors."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.stdout + result.stderr


def _free_port() -> int:
    """Return a free port on this machine, which runs rank 0."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(be_rank(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(Batch(Submitted.read(Path(sys.argv[1]), int(os.environ["SLURM_ARRAY_TASK_ID"]))).run())
