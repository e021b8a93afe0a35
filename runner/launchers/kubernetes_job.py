"""What a pod does: starts the run of its index, has it save when the pod is told to end, and says by its exit code what is to follow.

    python -m samewise.runner.launchers.kubernetes_job SWEEP/kubernetes/0001.json

Exit codes: 0, there is nothing left to do for this index; 3, saved, to be started again; 1 and 2, failed, and would again; any other, killed.
It is the pod's first process, for which Linux drops a signal that has no handler: so the run is a process of its own, and this one passes SIGTERM on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from samewise.runner.errors import INTERRUPTED
from samewise.runner.records.files import read_json
from samewise.runner.records.sweep_folder import SweepFolder

_EVERY_S = 1.0


@dataclass
class Pod:
    """One try of one run.

    Args:
        file: Of the submission.
        index: In its Job.
    """

    file: Path
    index: int
    _run: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _is_asked: bool = field(default=False, init=False)
    _is_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._given: dict[str, Any] = read_json(self.file)
        self._number = int(self._given["points"][self.index])
        self._sweep = SweepFolder(self.file.parents[1])
        self._mark = self.file.parent / "cancelled" / f"{self.file.stem}-{self.index}"

    def run(self) -> int:
        """Start the run and wait for its end. The exit code."""
        signal.signal(signal.SIGTERM, self._ask)
        if self._is_over():
            print(f"point {self._number} is not wanted any more")
            return 0
        tries = self._sweep.word(self._number).get("tries", 0)
        code = self._train()
        word = self._sweep.word(self._number)
        has_said = word.get("tries", 0) > tries and "ended" in word
        if code == -signal.SIGTERM and self._is_told and not has_said:
            code = INTERRUPTED  # before it could hear
        elif code and not has_said:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} before it could say why"
            self._sweep.note(self._number, ended=time.time(), exit_code=code, said=how)
        print(self._sweep.word(self._number).get("said") or f"ended with exit code {code}")
        if code == INTERRUPTED and self._is_over():
            return 0
        return 128 - code if code < 0 else code

    def _train(self) -> int:
        log = self._sweep.log(self._number)
        print(f"point {self._number}: its output goes to {log}")
        with open(log, "ab") as output:
            self._run = subprocess.Popen(
                [sys.executable, "-u", "-m", "samewise.runner.launchers.job", str(self._sweep.path), str(self._number)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._given["variables"][self.index]},
            )
        while True:
            if self._is_asked or self._mark.exists():
                self._tell()
            try:
                return self._run.wait(_EVERY_S)
            except subprocess.TimeoutExpired:
                continue

    def _is_over(self) -> bool:
        """Cancelled, or stopped for good by the sweep's pruner."""
        return self._mark.exists() or bool(self._sweep.word(self._number).get("pruned"))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._run is not None:
            self._tell()

    def _tell(self) -> None:
        """Once: at a second time the run would not save."""
        if not self._is_told and self._run is not None:
            self._is_told = True
            self._run.send_signal(signal.SIGTERM)


def main(file: Path) -> int:
    """Be the pod of one index."""
    if not file.is_file():
        print(f"error:\n  {file} is not here: the volume that holds the sweep must be mounted where it is on the machine that submitted it", file=sys.stderr)
        return 2
    return Pod(file, int(os.environ["JOB_COMPLETION_INDEX"])).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
