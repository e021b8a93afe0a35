"""Run in a pod: start the run of its index, and make it save when the pod is asked to stop.

    python -m samewise.runner.launchers.kubernetes_job SWEEP/kubernetes/0001.json

The exit code tells Kubernetes what happens next: 0, nothing is left to do for this index; 3, saved,
start it again; 1 and 2, failed, and would fail again; any other, killed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from samewise.runner.errors import INTERRUPTED
from samewise.runner.launchers.submission import Submitted, describe_exit_code
from samewise.runner.secrets import filter_output

_POLL_S = 1.0


class Pod:
    """One attempt at a run."""

    def __init__(self, job: Submitted) -> None:
        self._job, self._number, self._sweep = job, job.number, job.sweep
        self._run: subprocess.Popen[bytes] | None = None
        self._should_stop = self._has_signalled = False

    def run(self) -> int:
        """Start the run and wait for it; return the exit code."""
        signal.signal(signal.SIGTERM, self._request_stop)
        if self._is_over():
            print(f"point {self._number} was cancelled or pruned: nothing to do")
            return 0
        tries = self._sweep.word(self._number).get("tries", 0)
        code = self._train()
        record = self._sweep.word(self._number)
        has_recorded_end = record.get("tries", 0) > tries and "ended" in record
        if code == -signal.SIGTERM and self._has_signalled and not has_recorded_end:
            # The signal came before the run could handle it
            code = INTERRUPTED
        elif code and not has_recorded_end:
            self._sweep.note(
                self._number, ended=time.time(), exit_code=code, said=describe_exit_code(code)
            )
        print(self._sweep.word(self._number).get("said") or f"ended with exit code {code}")
        if code == INTERRUPTED and self._is_over():
            return 0
        return 128 - code if code < 0 else code

    def _train(self) -> int:
        log = self._sweep.log(self._number)
        print(f"point {self._number}: its output goes to {log}")
        with open(log, "ab") as output:
            # A separate process, to which this one passes SIGTERM: Linux drops signals without a
            # handler for a pod's first process
            self._run = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-u",
                    "-m",
                    "samewise.runner.launchers.job",
                    str(self._sweep.path),
                    str(self._number),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._job.variables},
            )
        while True:
            if self._should_stop or self._job.mark().exists():
                self._signal_run()
            try:
                return self._run.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _is_over(self) -> bool:
        """Whether the run was cancelled, or stopped for good by the sweep's pruner."""
        return self._job.mark().exists() or bool(self._sweep.word(self._number).get("pruned"))

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._should_stop = True
        if self._run is not None:
            self._signal_run()

    def _signal_run(self) -> None:
        """Ask the run to save, once."""
        # A second signal would stop the run without saving
        if not self._has_signalled and self._run is not None:
            self._has_signalled = True
            self._run.send_signal(signal.SIGTERM)


@filter_output()
def main(file: Path) -> int:
    """Run as the pod of one index."""
    if not file.is_file():
        print(
            f"error:\n  {file} does not exist: the sweep's volume must be mounted at the "
            "same path as on the machine that submitted it",
            file=sys.stderr,
        )
        return 2
    return Pod(Submitted.read(file, int(os.environ["JOB_COMPLETION_INDEX"]))).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
