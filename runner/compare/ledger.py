"""Count the tries of a line of work in a file that shows whether it was rewritten.

RUN_ROOT/gate.jsonl               the ledger, append-only: each line has the digest of the one before
RUN_ROOT/comparisons/ledger.json  number of its lines, and the last one's digest
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from samewise.runner.compare.sides import FOLDER
from samewise.runner.errors import DamagedFile
from samewise.runner.paired import LEVEL
from samewise.runner.records import locks
from samewise.runner.records.files import (
    append_lines,
    damaged_file,
    parse_json,
    read_json,
    read_lines,
    require_shape,
    write_json,
)

_LINE = {"before": str, "question": str, "try": int, "level": float, "verdict": str}
_END = {"lines": int, "sha256": str}


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
                line = require_shape(self.file, parse_json(text), _LINE, f"line {number}")
            except ValueError as error:
                raise damaged_file(self.file, f"line {number}: {error}") from None
            lines.append(line)
            self._require(line["before"] == digests[-1], f"line {number} does not follow")
            digests.append(hashlib.sha256(text).hexdigest())
        end: dict[str, Any] = read_json(self._end, _END) or {"lines": 0, "sha256": ""}
        is_there = digests[end["lines"] :][:1] == [end["sha256"]]
        self._require(is_there, f"line {end['lines']} is not the one that was written")
        return lines, digests[-1]

    def record(self, question: str, verdict: str, *, claims: bool, **facts: Any) -> dict[str, Any]:
        """Append a line durably, and return it with its own digest.

        The level of try i is 5 % / (i (i + 1)): those of all tries, however many, add up to 5 %.

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
            tries = {x["question"]: x["try"] for x in lines if x["try"]}
            number = tries.get(question, len(tries) + 1)
            line = {
                "before": before,
                "question": question,
                "try": number if claims else 0,
                "level": LEVEL / (number * (number + 1)) if claims else 0.0,
                "verdict": verdict,
                **facts,
            }
            text = json.dumps(line) + "\n"
            append_lines(self.file, text)
            digest = hashlib.sha256(text.encode()).hexdigest()
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
