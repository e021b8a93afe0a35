"""Writes event files for TensorBoard to the run's folder, under tensorboard/.

They are made of the journal alone: a sender that starts writes them from the beginning and empties
those of the sender before it, so each point is there once, whatever was killed. A TensorBoard that
is open meanwhile drops the points it has read: the new file says that a session starts at step 0
(`SessionLog.START`, as in tensorboard.backend.event_processing). It would never go on from a file
that was removed, so the old ones stay, empty. Once everything is written, tensorboard.json names
the sizes and times of its sources: while those are the same, nothing is written again. Imports
tensorboard.
"""

import os
import time
from pathlib import Path
from typing import Any, cast

import yaml
from PIL import Image
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from samewise.runner.config.tree import flat
from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping, read_text, require_no_link, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import redact_values
from samewise.runner.tracking import describing, journal
from samewise.runner.tracking.backends import Sent

# Protobuf creates its classes on import, where type checkers do not see them
_EVENTS: Any = event_pb2
_SUMMARY: Any = cast(Any, summary_pb2).Summary
_PREFIX = "events.out.tfevents."


class TensorBoard:
    """A run in TensorBoard: scalars by step, the config as text and hyperparameters, pictures.

    Numbers are float32.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.sent = Sent()
        self._place = folder.path / "tensorboard"
        self._file = folder.path / "tensorboard.json"
        self._read: dict[Path, int] = {folder.metrics: 0, folder.system: 0}
        self._step = 0
        self._writer: Any = None

    def synchronise(self, *, alive: bool) -> Sent:
        """Write what is new.

        On first use everything is written, replacing older files, unless these have everything.
        """
        older = list(self._place.glob(f"{_PREFIX}*")) if self._writer is None else []
        require_no_link(self._place, *older)
        sources = self._sources()
        is_there = (
            any(path.stat().st_size for path in older)
            and read_mapping(self._file, shapes.TENSORBOARD).get("written") == sources
        )
        if is_there and not alive:
            return self.sent
        # Until everything is written, no file may say that it is
        self._file.unlink(missing_ok=True)
        if self._writer is None:
            self._writer = EventFileWriter(str(self._place))
            self._writer.add_event(
                _EVENTS.Event(
                    wall_time=time.time(),
                    step=0,
                    session_log=_EVENTS.SessionLog(status=_EVENTS.SessionLog.START),
                )
            )
            self._describe()
        for path in self._read:
            self._scalars(path)
        if not alive:
            self._draw()
        self._writer.flush()
        for path in older:
            os.truncate(path, 0)
        if not alive:
            write_json(self._file, {"written": sources})
        return self.sent

    def _sources(self) -> dict[str, list[int]]:
        """Return the size and time of each file from which the events are made."""
        files = [
            *self._read,
            self.folder.config,
            *(path for _, path in describing.pictures(self.folder)),
        ]
        stats = {
            path.relative_to(self.folder.path).as_posix(): path.stat()
            for path in files
            if path.exists()
        }
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def _describe(self) -> None:
        config = redact_values(read_yaml(read_text(self.folder.config) or "") or {})
        text = yaml.safe_dump(config, sort_keys=False)
        # A Markdown code block, which nothing in the text can end
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        now = time.time()
        self._writer.add_event(_EVENTS.Event(wall_time=now, summary=text_pb("config", indented)))
        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flat(config, lists=False)
        }
        self._writer.add_event(
            _EVENTS.Event(wall_time=now, summary=hparams_pb(values, trial_id=self.folder.path.name))
        )

    def _scalars(self, path: Path) -> None:
        for entry, next_offset in journal.read_entries(path, offset=self._read[path]):
            if entry.metrics:
                values = [
                    _SUMMARY.Value(tag=name, simple_value=value)
                    for name, value in entry.metrics.items()
                ]
                self._writer.add_event(
                    _EVENTS.Event(
                        wall_time=entry.time_ms / 1000,
                        step=entry.step,
                        summary=_SUMMARY(value=values),
                    )
                )
                self.sent.metrics += len(values)
                self._step = (
                    max(self._step, entry.step) if path == self.folder.metrics else self._step
                )
            self._read[path] = next_offset
            self.sent.moved = time.monotonic()

    def _draw(self) -> None:
        """Add the final pictures among the artifacts."""
        for name, path in describing.pictures(self.folder):
            with Image.open(path, formats=["PNG"]) as picture:
                width, height = picture.size
            image = _SUMMARY.Image(
                width=width, height=height, encoded_image_string=path.read_bytes()
            )
            summary = _SUMMARY(value=[_SUMMARY.Value(tag=name, image=image)])
            self._writer.add_event(
                _EVENTS.Event(wall_time=time.time(), step=self._step, summary=summary)
            )
            self.sent.files += 1
