"""The trainer's side of tracking: appends to the journal, which a sender sends to the backends.

Imports neither mlflow nor torch.
"""

import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.address import REFUSED, check_uri, remove_password, sqlite_file
from samewise.runner.tracking.backends import (
    LOG,
    TITLES,
    backends_of,
    log_size,
    problems,
    troubles,
)
from samewise.runner.tracking.journal import Journal

_LOG = logging.getLogger("samewise.tracking")
_MOST_STARTS = 5


class Tracker:
    """Records a run in its folder only.

    No method raises errors of a store, a server or the disk.
    """

    def __init__(self, folder: RunFolder, *, resume_step: int | None) -> None:
        self.folder = folder
        self._journal = Journal(folder.metrics, resume_step=resume_step)

    def start(self) -> None:
        """Start, once `config.yaml` and `environment.json` are in the folder."""
        self._journal.status("RUNNING")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values at an optimizer step, in a few microseconds.

        A (key, step) that was logged before keeps its first value and time.
        """
        self._journal.log(metrics, step)

    def before_checkpoint(self, step: int) -> None:
        """Make logged values durable before the checkpoint of `step`."""
        # A run that resumes from a checkpoint does not log the steps before it again
        self._journal.sync()

    def finish(self, status: str) -> None:
        """End as FINISHED, FAILED or KILLED (interrupted, resumable).

        The files under `artifacts/` are complete by then.
        """
        self._journal.status(status)
        self._journal.close()

    def run_id(self) -> str | None:
        """Return the MLflow run's id, or None until there is one."""
        return None

    def last_step(self) -> int:
        """Return the last step in the journal, or -1."""
        return self._journal.last_step


class Silent(Tracker):
    """Records nothing, since another process of the run does."""

    def __init__(self) -> None:
        pass

    def _do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        pass

    start = log = before_checkpoint = finish = _do_nothing


class WithSender(Tracker):
    """Starts a sender process, which runs until the trainer has ended and everything is sent.

    The journal records how a run ends.
    """

    def __init__(
        self, folder: RunFolder, settings: dict[str, Any], *, resume_step: int | None
    ) -> None:
        super().__init__(folder, resume_step=resume_step)
        self._settings = settings
        self._sender: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._log_began = log_size(folder.path)
        self._warned = set[str]()

    def start(self) -> None:
        """Start, with the sender."""
        super().start()
        self._start_sender()

    def before_checkpoint(self, step: int) -> None:
        """Make logged values durable, and restart a sender that has ended.

        Warns once of each backend that refuses this user, since no retry helps.
        """
        super().before_checkpoint(step)
        self._revive()
        refusals = {
            title: reason
            for title, reason in self._troubles().items()
            if REFUSED in reason and title not in self._warned
        }
        for title, reason in refusals.items():
            _LOG.warning(
                "nothing is sent to %s: %s; training continues", self._place(title), reason
            )
        self._warned |= refusals.keys()

    def finish(self, status: str) -> None:
        """End, and wait up to `flush_timeout_s` until the sender has sent everything."""
        super().finish(status)
        self._revive()
        sender = self._sender
        if sender is None or not _wait_for_end(sender, float(self._settings["flush_timeout_s"])):
            troubles = self._troubles()
            titles = [TITLES[name] for name in backends_of(self._settings)]
            # An empty reason says that everything has arrived
            behind = [title for title in titles if troubles.get(title) != ""] or titles
            reasons = "; ".join(dict.fromkeys(filter(None, map(troubles.get, behind))))
            _LOG.warning(
                "not everything has reached %s yet%s; run `samewise sync %s` to send the rest",
                " and ".join(map(self._place, behind)),
                f": {reasons}" if reasons else "",
                shlex.quote(str(self.folder.path)),
            )

    def run_id(self) -> str | None:
        """Return the MLflow run's id, once the sender has created the run."""
        return read_mapping(self.folder.tracking, shapes.TRACKING).get("run_id")

    def _troubles(self) -> dict[str, str]:
        return troubles(self.folder.path, since=self._log_began)

    def _place(self, title: str) -> str:
        """Return a backend's name for messages: its title, or MLflow's address."""
        return remove_password(self._settings["uri"]) if title == TITLES["mlflow"] else title

    def _start_sender(self) -> None:
        self._starts += 1
        self._sender = _start(self.folder.path, self._settings)

    def _revive(self) -> None:
        if (
            self._sender is None or self._sender.poll() is not None
        ) and self._starts < _MOST_STARTS:
            self._start_sender()


def open_tracker(folder: RunFolder, settings: DictConfig, *, resume_step: int | None) -> Tracker:
    """Open the tracker for `tracking`; call `start` after writing the folder's files.

    Raises:
        ConfigError: `tracking.report_to` or `tracking.uri` cannot be used here, or the store's
            folder cannot be created.
    """
    backends = backends_of(cast(Mapping[str, Any], settings))
    if not backends:
        return Tracker(folder, resume_step=resume_step)
    plain: Any = OmegaConf.to_container(settings, resolve=True)
    ConfigError.raise_all(problems(backends))
    if "mlflow" in backends:
        plain["uri"] = check_uri(plain["uri"])
        if file := sqlite_file(plain["uri"]):
            _require_file(file, plain["uri"])
    return WithSender(folder, plain, resume_step=resume_step)


def _require_file(file: Path, uri: str) -> None:
    """Raise a ConfigError now for a store that the sender could not use later, unnoticed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        open(file, "ab").close()
    except OSError as error:
        raise ConfigError(
            Problem(
                "tracking.uri",
                f"the store cannot be written: {error.strerror}",
                uri,
                "a writable file in a writable folder",
                "ask its owner for access, or keep runs and store in a folder of your own: "
                "run_root=FOLDER",
            )
        ) from None


def _start(folder: Path, settings: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Start a sender, in milliseconds; its imports run during training.

    None, with a warning, if it cannot be started.
    """
    command = [
        sys.executable,
        # No module of the current folder is imported
        "-P",
        "-m",
        "samewise.runner.tracking.sender",
        str(folder.absolute()),
        "--trainer",
        str(os.getpid()),
    ]
    try:
        with open(folder / LOG, "ab") as log:
            sender = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                # A session of its own, so that Ctrl-C in the terminal does not reach it
                start_new_session=True,
            )
    except OSError as error:
        _LOG.warning("the process that sends metrics cannot be started: %s", error)
        return None
    _write(sender, json.dumps(settings))
    return sender


def _environment() -> dict[str, str]:
    """Return a sender's environment variables: the same samewise, and one thread."""
    import samewise

    home = os.path.dirname(os.path.dirname(os.path.abspath(samewise.__file__)))
    python_path = os.environ.get("PYTHONPATH", "")
    path = (
        python_path
        # An installed samewise is found without PYTHONPATH
        if "site-packages" in home or home in python_path.split(os.pathsep)
        else os.pathsep.join(filter(None, [python_path, home]))
    )
    return {**os.environ, **({"PYTHONPATH": path} if path else {}), "OMP_NUM_THREADS": "1"}


def _wait_for_end(sender: subprocess.Popen[bytes], seconds: float) -> bool:
    """Tell a sender that the trainer ends, and wait; Ctrl-C stops the waiting.

    Returns:
        Whether it has sent everything in this time.
    """
    start_time = time.monotonic()
    # By a line, and not by end of file, since forked loader workers hold the pipe open
    _write(sender, "end")
    try:
        return sender.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    except KeyboardInterrupt:
        _LOG.warning("stopped waiting for MLflow after %.0f s", time.monotonic() - start_time)
        return False


def _write(sender: subprocess.Popen[bytes], line: str) -> None:
    assert sender.stdin is not None
    # It may have been killed
    with contextlib.suppress(OSError):
        sender.stdin.write(line.encode() + b"\n")
