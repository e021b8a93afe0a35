"""Runs in a pod: starts the run of its index, makes it save when the pod is asked to stop, and
reports by exit code what happens next.

    python -m samewise.runner.launchers.kubernetes_job SWEEP/kubernetes/0001.json

Exit codes: 0, there is nothing left to do for this index; 3, saved; it will be started again; 1 and
2, failed, and would again; any other, killed. It is the pod's first process, for which Linux drops
signals without a handler: so the run is a separate process, to which this one passes SIGTERM.
"""

from __future__ import annotations

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

_EVERY_S = 1.0


class Pod:
    """One attempt at a run."""

    def __init__(self, job: Submitted) -> None:
        self._job, self._number, self._sweep = job, job.number, job.sweep
        self._run: subprocess.Popen[bytes] | None = None
        self._is_asked = self._is_told = False

    def run(self) -> int:
        """Start the run and wait for it; return the exit code."""
        signal.signal(signal.SIGTERM, self._ask)
        if self._is_over():
            print(f"point {self._number} was cancelled or pruned: nothing to do")
            return 0
        tries = self._sweep.word(self._number).get("tries", 0)
        code = self._train()
        word = self._sweep.word(self._number)
        has_said = word.get("tries", 0) > tries and "ended" in word
        if code == -signal.SIGTERM and self._is_told and not has_said:
            code = INTERRUPTED  # before it could handle the signal
        elif code and not has_said:
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
            if self._is_asked or self._job.mark().exists():
                self._tell()
            try:
                return self._run.wait(_EVERY_S)
            except subprocess.TimeoutExpired:
                continue

    def _is_over(self) -> bool:
        """Whether the run was cancelled, or stopped for good by the sweep's pruner."""
        return self._job.mark().exists() or bool(self._sweep.word(self._number).get("pruned"))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._run is not None:
            self._tell()

    def _tell(self) -> None:
        """Ask the run to save, once: a second signal would stop it without saving."""
        if not self._is_told and self._run is not None:
            self._is_told = True
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
