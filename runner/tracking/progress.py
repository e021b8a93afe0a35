"""The progress of the copy in MLflow: `tracking.json`.

Written only by the process that holds `RunFolder.sending`.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from samewise.runner.errors import DamagedFile, TrainingError
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, read_mapping, set_aside, write_json
from samewise.runner.records.folder import RunFolder

_LOG = logging.getLogger("samewise.tracking")


@dataclass
class TrackingState:
    """How much of a run MLflow has.

    Args:
        store: The store's URI, absolute and without password.
        experiment_id: The MLflow experiment's.
        intent: Written before the MLflow run is made, and given to it as a tag: a run made just
            before a crash is found again by it.
        run_id: The MLflow run's.
        sent: By journal, how many bytes of it have been sent.
        status: The status that MLflow has.
        ended: The last status in the journal.
        last_ms: The time of the journal's last line that was sent, in milliseconds since 1970.
        described: A digest of the config and environment whose params, tags and inputs have been
            sent.
        files: By path in the run's artifacts, size and modification time (ns) of what was uploaded.
        model: The logged model's id.
        registered: By name in the model registry, the version that the model is.
        others: The progress in stores that the run was sent to before, by URI.
    """

    store: str = ""
    experiment_id: str | None = None
    intent: str | None = None
    run_id: str | None = None
    sent: dict[str, int] = field(default_factory=dict[str, int])
    status: str | None = None
    ended: str | None = None
    last_ms: int = 0
    described: str | None = None
    files: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    model: str | None = None
    registered: dict[str, str] = field(default_factory=dict[str, str])
    others: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def at(self, store: str) -> TrackingState:
        """The progress in `store`: this one, an earlier one, or none."""
        if store == self.store:
            return self
        others: dict[str, dict[str, Any]] = {
            **self.others,
            **({self.store: {**asdict(self), "others": {}}} if self.run_id else {}),
        }
        known = others.pop(store, {})
        return _make_state({**known, "store": store, "others": others})

    def empty_copy(self) -> TrackingState:
        """An empty progress in this store."""
        return TrackingState(store=self.store, others=self.others)


def load(folder: RunFolder) -> TrackingState:
    """Load the saved progress, or an empty one.

    A damaged file counts as empty and is set aside, since it may contain the MLflow run's id.
    """
    try:
        return _make_state(read_json(folder.tracking, shapes.TRACKING) or {})
    except DamagedFile as error:
        kept = set_aside(folder.tracking, "damaged").name
        _LOG.warning(
            "%s; everything is sent to a new MLflow run; the old file is kept as %s",
            replace(error.problems[0], hint=""),
            kept,
        )
        return TrackingState()


def is_behind(folder: RunFolder) -> bool:
    """Whether the journal has something that was not sent, including how the run ended."""
    known = read_mapping(folder.tracking, shapes.TRACKING)
    unsent = (
        folder.metrics.exists()
        and (known.get("sent") or {}).get(folder.metrics.name, 0) < folder.metrics.stat().st_size
    )
    return unsent or (
        known.get("ended") in ("FINISHED", "FAILED", "KILLED")
        and known.get("status") != known["ended"]
    )


def _make_state(value: dict[str, Any]) -> TrackingState:
    known = {one.name for one in fields(TrackingState)}
    return TrackingState(**{name: entry for name, entry in value.items() if name in known})


def save(folder: RunFolder, progress: TrackingState) -> None:
    """Save the progress durably.

    Errors of a full disk are ignored: what is sent twice is stored once.
    """
    try:
        write_json(folder.tracking, asdict(progress))
    except TrainingError as error:
        _LOG.warning("%s", error)
