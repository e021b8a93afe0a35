"""Writes a run's metrics to metrics.csv in its folder, as Lightning's CSVLogger does.

There is a column for each metric, by name, and a row for each step that logged any. The file is
made of the journal alone, whole each time, so a resumed run loses no row and repeats none.
"""

import csv
import io
import time
from typing import Any

from samewise.runner.records.files import write_atomically
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import journal
from samewise.runner.tracking.backends import Sent

_SHARE = 0.05
"""The largest share of the time that writing takes, while more and more rows are written."""


class MetricsCsv:
    """A run's metrics.csv. The numbers are those of the journal, in Python's spelling."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.sent = Sent()
        self._due = 0.0
        self._size = -1

    def synchronise(self, *, alive: bool) -> Sent:
        """Write the file if there is more to write; while the trainer is alive, not too often."""
        start, path = time.monotonic(), self.folder.metrics
        size = path.stat().st_size if path.exists() else 0
        if size == self._size or (alive and start < self._due):
            return self.sent
        rows = dict[int, dict[str, Any]]()
        for entry, _ in journal.read_entries(path, end=size):
            if entry.metrics:
                rows.setdefault(entry.step, {"step": entry.step}).update(entry.metrics)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, sorted({"step"}.union(*rows.values())))
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))
        write_atomically(self.folder.path / "metrics.csv", text.getvalue())
        self.sent.metrics = sum(len(row) - 1 for row in rows.values())
        self.sent.moved, self._size = time.monotonic(), size
        self._due = start + (self.sent.moved - start) / _SHARE
        return self.sent
