"""The journal of a run's metrics: one JSON line per call, append-only.

It is the source of truth; MLflow gets a copy. Imports neither torch nor mlflow.

A line is `{"step": 12, "time_ms": 1700000000000, "metrics": {"train/loss": 0.5}}`, or `{"status":
"RUNNING", "time_ms": ...}` when a process begins to log and when it ends. Numbers have Python's own
spelling, so floats come back exactly. NaN and the infinities, which JSON lacks, are the strings
"NaN", "Infinity" and "-Infinity"; older versions wrote them without quotes, and are read too.
"""

import functools
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from samewise.runner.records import shapes
from samewise.runner.records.files import cut_torn_line, open_to_read, parse_json, read_lines

_LOG = logging.getLogger("samewise.tracking")
# Seconds between writes if lines come faster: a system call for each line would take a tenth of a
# small network's step
_EVERY_S = 0.1
_RETRY_S = 0.5


@dataclass(frozen=True)
class Entry:
    """One line of a journal.

    Args:
        time_ms: Time of logging, in milliseconds since 1970.
        step: The optimizer step, or -1 in a line with a status.
        metrics: Values by name; empty in a line with a status.
        status: RUNNING, FINISHED, FAILED or KILLED, or None in a line of metrics.
    """

    time_ms: int
    step: int
    metrics: Mapping[str, float]
    status: str | None = None


class Journal:
    """Appends metrics to a file in batches of a tenth of a second.

    `log` takes a few microseconds and never raises disk errors.

    After a restart from a checkpoint, steps are logged again that the journal already holds. A
    (key, step) in the journal is not written a second time, so it keeps its first timestamp, and
    readers of the journal see each point once.

    Args:
        path: The file, created if missing; an incomplete last line is cut off.
        resume_step: The step of the checkpoint that training resumes from; None: from the
            beginning. Only lines at this step or later are remembered.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        # Refuses a pipe or a device in the journal's place
        if (handle := open_to_read(path)) is not None:
            handle.close()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        cut_torn_line(self._file)
        self._known, self.last_step = _points(
            path, from_step=-1 if resume_step is None else resume_step
        )
        self._held = list[bytes]()
        self._write_at = 0.0
        self._is_full = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the values of one step, except those already in the journal."""
        if logged_keys := self._known.get(step):
            metrics = {key: value for key, value in metrics.items() if key not in logged_keys}
        if not metrics:
            return
        keys = tuple(metrics)
        # After the last step of the journal, only the current step can be logged again
        if step > self.last_step:
            self._known, self.last_step = {step: keys}, step
        else:
            self._known[step] = (*self._known.get(step, ()), *keys)
        values = tuple(map(float, metrics.values()))
        # One test for all: a sum with NaN or an infinity in it is not finite
        numbers = values if math.isfinite(sum(values)) else tuple(map(_spelled, values))
        self._held.append((_line(keys) % (step, time.time_ns() // 1_000_000, *numbers)).encode())
        if time.monotonic() >= self._write_at:
            self._write_held()

    def status(self, status: str) -> None:
        """Append that a process begins to log (RUNNING), or how it ended."""
        self._held.append(
            f'{{"status": "{status}", "time_ms": {time.time_ns() // 1_000_000}}}\n'.encode()
        )
        self._write_held()

    def sync(self) -> bool:
        """Make the logged values durable.

        Returns:
            False if some of them are still in memory, because the disk is full.
        """
        self._write_held()
        try:
            os.fsync(self._file)
        except OSError as error:
            _LOG.warning("%s: cannot be flushed to disk: %s", self.path, error.strerror)
            return False
        return not self._held

    def close(self) -> None:
        """Write the lines in memory, if the disk accepts them, and close the file."""
        if not self.sync():
            _LOG.warning(
                "%s: the disk is full; %d lines of metrics are lost",
                self.path,
                b"".join(self._held).count(b"\n"),
            )
        os.close(self._file)

    def _write_held(self) -> None:
        """Write the lines in memory; if a full disk takes only a part, the rest follows later."""
        # An interruption may lose lines, which a resumed run logs again, but duplicates none
        rest, self._held = b"".join(self._held), []
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if not self._is_full:
                _LOG.warning(
                    "%s: cannot be written (%s); metrics are held in memory until it can",
                    self.path,
                    error.strerror,
                )
            self._is_full, self._write_at = True, time.monotonic() + _RETRY_S
        else:
            if self._is_full:
                _LOG.warning("%s: is writable again", self.path)
            self._is_full, self._write_at = False, time.monotonic() + _EVERY_S
        if rest:
            self._held.append(rest)


def read_entries(
    path: Path, *, offset: int = 0, end: int | None = None
) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a journal, each with the offset after it in bytes.

    An incomplete last line is left for later; invalid lines are skipped.

    Args:
        path: The journal; a missing file is empty.
        offset: Where to begin: 0, or an offset that came with an entry.
        end: Where to stop; None: at the end of the file.
    """
    unreadable = 0
    for _, line in read_lines(path, offset=offset):
        if not line.endswith(b"\n"):
            break
        offset += len(line)
        entry = parse_line(line)
        if entry is not None:
            yield entry, offset
        unreadable += entry is None
        if end is not None and offset >= end:
            break
    if unreadable:
        _LOG.warning(
            "%s: %d line%s cannot be read and are left out",
            path,
            unreadable,
            "s" * (unreadable > 1),
        )


def logged_values(path: Path) -> dict[tuple[int, str], float]:
    """Return the values in a journal, by step and name."""
    return {
        (entry.step, name): value
        for entry, _ in read_entries(path)
        for name, value in entry.metrics.items()
    }


def last_evaluation(path: Path) -> tuple[int, dict[str, float]]:
    """Return the step and metrics of the last evaluation in a journal; -1 and {} without one."""
    step, metrics = -1, dict[str, float]()
    for entry, _ in read_entries(path):
        if evaluation := {
            name: value for name, value in entry.metrics.items() if "/valid/" in f"/{name}"
        }:
            step, metrics = entry.step, evaluation
    return step, metrics


def parse_line(line: bytes) -> Entry | None:
    """Parse a line; None if it is not an entry."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    if shapes.describe_misfit(value, shapes.JOURNAL_LINE):
        return None
    if "status" in value:
        return Entry(value["time_ms"], -1, {}, value["status"])
    return Entry(
        value["time_ms"],
        value["step"],
        {key: float(number) for key, number in value["metrics"].items()},
    )


def _spelled(value: float) -> str:
    """Return a number as JSON, or its name as a JSON string."""
    return json.dumps(value) if math.isfinite(value) else f'"{json.dumps(value)}"'


# Steps log the same names repeatedly: everything but the numbers is formatted once
@functools.lru_cache(256)
def _line(keys: tuple[str, ...]) -> str:
    """Return a template for a line with these keys."""
    values = ", ".join([json.dumps(key).replace("%", "%%") + ": %s" for key in keys])
    return '{"step": %d, "time_ms": %d, "metrics": {' + values + "}}\n"


def _points(path: Path, *, from_step: int) -> tuple[dict[int, tuple[str, ...]], int]:
    """Return the keys in the journal by step, from `from_step` on, and its last step, or -1."""
    keys: dict[int, tuple[str, ...]] = {}
    last = -1
    for entry, _ in read_entries(path):
        last = max(last, entry.step)
        if entry.status is None and entry.step >= from_step:
            keys[entry.step] = (*keys.get(entry.step, ()), *entry.metrics)
    return keys, last
