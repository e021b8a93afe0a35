"""What a pod does: starts the run of its index, has it save when the pod is told to end, and says by its exit code what is to follow.

    python -m samewise.runner.launchers.kubernetes_job SWEEP/kubernetes/0001.json

Exit codes: 0, there is nothing left to do for this index; 3, saved; it will be started again; 1 and 2, failed, and would again; any other, killed.
It is the pod's first process, for which Linux drops a signal that has no handler: so the run is a process of its own, and this one passes SIGTERM on.
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
from samewise.runner.launchers.submission import Submitted, unexplained_exit
from samewise.runner.secrets import plain_output

_EVERY_S = 1.0


class Pod:
    """One try of one run."""

    def __init__(self, job: Submitted) -> None:
        self._job, self._number, self._sweep = job, job.number, job.sweep
        self._run: subprocess.Popen[bytes] | None = None
        self._is_asked = self._is_told = False

    def run(self) -> int:
        """Start the run and wait for its end. The exit code."""
        signal.signal(signal.SIGTERM, self._ask)
        if self._is_over():
            print(f"point {self._number} is no longer wanted")
            return 0
        tries = self._sweep.word(self._number).get("tries", 0)
        code = self._train()
        word = self._sweep.word(self._number)
        has_said = word.get("tries", 0) > tries and "ended" in word
        if code == -signal.SIGTERM and self._is_told and not has_said:
            code = INTERRUPTED  # before it could hear
        elif code and not has_said:
            self._sweep.note(self._number, ended=time.time(), exit_code=code, said=unexplained_exit(code))
        print(self._sweep.word(self._number).get("said") or f"ended with exit code {code}")
        if code == INTERRUPTED and self._is_over():
            return 0
        return 128 - code if code < 0 else code

    def _train(self) -> int:
        log = self._sweep.log(self._number)
        print(f"point {self._number}: its output goes to {log}")
        with open(log, "ab") as output:
            self._run = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "samewise.runner.launchers.job", str(self._sweep.path), str(self._number)],
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
        """Cancelled, or stopped for good by the sweep's pruner."""
        return self._job.mark().exists() or bool(self._sweep.word(self._number).get("pruned"))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._run is not None:
            self._tell()

    def _tell(self) -> None:
        """Once: at a second time the run would not save."""
        if not self._is_told and self._run is not None:
            self._is_told = True
            self._run.send_signal(signal.SIGTERM)


@plain_output()
def main(file: Path) -> int:
    """Be the pod of one index."""
    if not file.is_file():
        print(f"error:\n  {file} is not here: the sweep's volume must be mounted at the same path as on the machine that submitted it", file=sys.stderr)
        return 2
    return Pod(Submitted.read(file, int(os.environ["JOB_COMPLETION_INDEX"]))).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
