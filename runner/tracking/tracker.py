"""What the trainer knows of tracking: it appends to the journal. A process of its own sends to the backends. Nothing here imports mlflow or torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import link
from samewise.runner.tracking.address import REFUSED, check_uri, sqlite_file, without_password
from samewise.runner.tracking.backends import TITLES, backends_of, problems
from samewise.runner.tracking.journal import Journal

_LOG = logging.getLogger("samewise.tracking")
_MOST_STARTS = 5


class Tracker:
    """Takes what is to be known of a run, whose folder is the only record. No method raises because a store, a server or the disk fails."""

    def __init__(self, folder: RunFolder, *, resume_step: int | None) -> None:
        self.folder = folder
        self._journal = Journal(folder.metrics, resume_step=resume_step)

    def start(self) -> None:
        """Begin. `config.yaml` and `environment.json` are in the folder."""
        self._journal.status("RUNNING")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Note the values at an optimizer step; a few microseconds. A (key, step) that was noted before keeps its first value and time."""
        self._journal.log(metrics, step)

    def before_checkpoint(self, step: int) -> None:
        """Make durable what was logged, before the checkpoint of `step` is: what lies before a checkpoint is never logged again."""
        self._journal.sync()

    def finish(self, status: str) -> None:
        """End, as FINISHED, FAILED or KILLED (interrupted, resumable). The files under `artifacts/` are complete."""
        self._journal.status(status)
        self._journal.close()

    def run_id(self) -> str | None:
        """The MLflow run's id, or None as long as there is none."""
        return None


class Silent(Tracker):
    """Another process of the run keeps the record."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        """Nothing."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing."""

    def before_checkpoint(self, step: int) -> None:
        """Nothing."""

    def finish(self, status: str) -> None:
        """Nothing."""


class WithSender(Tracker):
    """Starts a sender process, which lives as long as the trainer and then drains. How a run ends is in the journal."""

    def __init__(self, folder: RunFolder, settings: dict[str, Any], *, resume_step: int | None) -> None:
        super().__init__(folder, resume_step=resume_step)
        self._settings = settings
        self._sender: link.Link | None = None
        self._starts = 0
        self._log_began = link.log_size(folder.path)
        self._told = False

    def start(self) -> None:
        """Begin, and start the sender."""
        super().start()
        self._start_sender()

    def before_checkpoint(self, step: int) -> None:
        """Make durable what was logged; start the sender again if something ended it. Say once that the server refuses this user, which no later try mends."""
        super().before_checkpoint(step)
        self._revive()
        trouble = "" if self._told else link.last_trouble(self.folder.path, since=self._log_began)
        if REFUSED in trouble:
            self._told = True
            _LOG.warning("nothing is sent to %s%s; training continues", without_password(self._settings["uri"]), trouble)

    def finish(self, status: str) -> None:
        """End, and wait up to `flush_timeout_s` for the sender to send everything."""
        super().finish(status)
        self._revive()
        sender = self._sender
        if sender is None or not sender.tell_end() or not link.wait_for(sender, float(self._settings["flush_timeout_s"])):
            words = "not everything has reached %s yet%s; run `samewise sync %s` to send the rest"
            names = [without_password(self._settings["uri"]) if name == "mlflow" else TITLES[name] for name in backends_of(self._settings)]
            _LOG.warning(words, " and ".join(names), link.last_trouble(self.folder.path, since=self._log_began), self.folder.path)

    def run_id(self) -> str | None:
        """The MLflow run's id, once the sender has made the run."""
        return read_mapping(self.folder.tracking, shapes.TRACKING).get("run_id")

    def _start_sender(self) -> None:
        self._starts += 1
        self._sender = link.start(self.folder.path, self._settings)

    def _revive(self) -> None:
        if (self._sender is None or self._sender.ended()) and self._starts < _MOST_STARTS:
            self._start_sender()


def open_tracker(folder: RunFolder, settings: DictConfig, *, resume_step: int | None) -> Tracker:
    """The tracker that `tracking` asks for. Call `start` on it once the folder's files are written.

    Raises:
        ConfigError: `tracking.report_to` or `tracking.uri` is not possible here, or the store's folder cannot be made.
    """
    backends = backends_of(cast(Mapping[str, Any], settings))
    if not backends:
        return Tracker(folder, resume_step=resume_step)
    plain: Any = OmegaConf.to_container(settings, resolve=True)
    if found := problems(backends):
        raise ConfigError(*found)
    if "mlflow" not in backends:
        return WithSender(folder, plain, resume_step=resume_step)
    plain["uri"] = check_uri(plain["uri"])
    file = sqlite_file(plain["uri"])
    if file is not None:
        _require_file(file, plain["uri"])
    return WithSender(folder, plain, resume_step=resume_step)


def _require_file(file: Path, uri: str) -> None:
    """Refuse now what the sender would only find out later, beside a training that nobody sees."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(Problem("tracking.uri", f"the store's folder cannot be made: {error.strerror}", uri, "a writable folder")) from None
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(Problem("tracking.uri", "the store's folder cannot be written", uri, "a writable folder"))
    if file.exists():
        with open(file, "rb") as handle:
            head = handle.read(16)
        if head and head != b"SQLite format 3\0":
            raise ConfigError(Problem("tracking.uri", "this is not an SQLite file", uri, "a new file, or a store made by MLflow"))
