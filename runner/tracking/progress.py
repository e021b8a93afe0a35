"""Stores the progress of the copy in MLflow: `tracking.json`.

Only the process that holds `RunFolder.sending` writes it.
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
    """The part of a run that MLflow has.

    Args:
        store: The store's URI, absolute and without password.
        experiment_id: Id of the MLflow experiment.
        intent: A tag of the MLflow run, written here before that is created: it finds a run that
            was created just before a crash.
        run_id: Id of the MLflow run.
        sent: By journal, the number of its bytes that have been sent.
        status: The status that MLflow has.
        ended: The last status in the journal.
        last_ms: Time of the last line that was sent, in milliseconds since 1970.
        described: A digest of the config and environment whose params, tags and inputs have been
            sent.
        files: By path in the run's artifacts, size and modification time (ns) of uploaded files.
        model: Id of the logged model.
        registered: By name in the model registry, the version that the model is.
        others: The progress in stores to which the run was sent before, by URI.
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
        """Return the progress in `store`: this one, an earlier one, or an empty one."""
        if store == self.store:
            return self
        others: dict[str, dict[str, Any]] = {
            **self.others,
            **({self.store: {**asdict(self), "others": {}}} if self.run_id else {}),
        }
        return _make_state({**others.pop(store, {}), "store": store, "others": others})


def load(folder: RunFolder) -> TrackingState:
    """Load the saved progress, or an empty one.

    A damaged file counts as empty and is set aside, since it may contain the MLflow run's id.
    """
    try:
        return _make_state(read_json(folder.tracking, shapes.TRACKING) or {})
    except DamagedFile as error:
        name = set_aside(folder.tracking, "damaged").name
        _LOG.warning(
            "%s; everything is sent to a new MLflow run; the old file is kept as %s",
            replace(error.problems[0], hint=""),
            name,
        )
        return TrackingState()


def is_behind(folder: RunFolder) -> bool:
    """Whether the journal has metrics or a final status that were not sent."""
    state = read_mapping(folder.tracking, shapes.TRACKING)
    unsent = (
        folder.metrics.exists()
        and (state.get("sent") or {}).get(folder.metrics.name, 0) < folder.metrics.stat().st_size
    )
    return unsent or (
        state.get("ended") in ("FINISHED", "FAILED", "KILLED")
        and state.get("status") != state["ended"]
    )


def _make_state(value: dict[str, Any]) -> TrackingState:
    names = {field.name for field in fields(TrackingState)}
    return TrackingState(**{name: entry for name, entry in value.items() if name in names})


def save(folder: RunFolder, progress: TrackingState) -> None:
    """Save the progress durably."""
    try:
        write_json(folder.tracking, asdict(progress))
    except TrainingError as error:
        # A full disk does no harm: what is sent twice is stored once
        _LOG.warning("%s", error)
