"""Count the tries of a line of work in a file that shows whether it was rewritten.

RUN_ROOT/gate.jsonl               the ledger, append-only: each line has the digest of the one before
RUN_ROOT/comparisons/ledger.json  number of its lines, and the last one's digest
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.compare.sides import FOLDER
from samewise.runner.errors import DamagedFile
from samewise.runner.paired import LEVEL
from samewise.runner.records import locks
from samewise.runner.records.files import (
    cut_torn_line,
    damaged_file,
    parse_json,
    read_json,
    read_lines,
    require_shape,
    write_json,
)

_LINE = {"before": str, "question": str, "try": int, "level": float, "verdict": str}
_END = {"lines": int, "sha256": str}


def level_of(number: int) -> float:
    """Return the level of a try: those of all tries, however many, add up to 5 %.

    Args:
        number: Its number, from 1; 0: nothing is claimed.
    """
    return LEVEL / (number * (number + 1)) if number else 0.0


class Ledger:
    """The tries of a line of work, which is all that is tried in a run root.

    Args:
        run_root: The folder of runs.
    """

    def __init__(self, run_root: Path) -> None:
        self.file = run_root / "gate.jsonl"
        self._end = run_root / FOLDER / "ledger.json"

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Return the lines, and the last one's digest.

        Raises:
            DamagedFile: A line was changed or taken out.
        """
        lines, digests = list[dict[str, Any]](), [""]
        for number, text in read_lines(self.file):
            # Left by a process that died as it wrote: its verdict was not shown
            if not text.endswith(b"\n"):
                break
            try:
                line = parse_json(text)
            except ValueError as error:
                raise damaged_file(self.file, f"line {number}: {error}") from None
            lines.append(require_shape(self.file, line, _LINE, f"line {number}"))
            self._require(line["before"] == digests[-1], f"line {number} does not follow")
            digests.append(hashlib.sha256(text).hexdigest())
        if end := read_json(self._end, _END):
            is_there = digests[end["lines"] :][:1] == [end["sha256"]]
            self._require(is_there, f"line {end['lines']} is not the one that was written")
        return lines, digests[-1]

    def record(self, question: str, verdict: str, *, claims: bool, **facts: Any) -> dict[str, Any]:
        """Append a line durably, and return it with its own digest.

        Args:
            question: Which sides and which metric. Asked again, it is the same try.
            verdict: The answer, or `begun`.
            claims: Whether a difference may be claimed, which is a try.
            facts: What else to record.

        Raises:
            DamagedFile: The ledger was rewritten.
        """
        self._end.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(self.file, wait=True, sign=False):
            lines, before = self.read()
            tries: Mapping[str, int] = {x["question"]: x["try"] for x in lines if x["try"]}
            number = tries.get(question, len(tries) + 1) if claims else 0
            line = {"before": before, "question": question, "try": number}
            line |= {"level": level_of(number), "verdict": verdict, **facts}
            text = (json.dumps(line) + "\n").encode()
            with self.file.open("ab+") as handle:
                cut_torn_line(handle.fileno())
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            digest = hashlib.sha256(text).hexdigest()
            write_json(self._end, {"lines": len(lines) + 1, "sha256": digest})
        return {**line, "sha256": digest}

    def _require(self, is_sound: bool, why: str) -> None:
        DamagedFile.raise_if(
            not is_sound,
            str(self.file),
            f"was rewritten: {why}, so the tries cannot be counted",
            hint="restore it and its comparisons folder from a copy; another run root has a ledger "
            "of its own",
        )
