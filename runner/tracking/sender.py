"""The sender: a process that copies the run's folder to MLflow and other backends.

    python -m samewise.runner.tracking.sender RUNFOLDER --trainer PID

On standard input it reads a line with the settings as JSON, then nothing until the trainer ends. It
outlives the trainer until everything is sent, and ends with exit code 0 if all was sent, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import select
import shlex
import signal
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.records.folder import RunFolder
from samewise.runner.records.locks import hold
from samewise.runner.secrets import filter_output
from samewise.runner.tracking.address import REFUSED, describe_failure, without_sql
from samewise.runner.tracking.backends import (
    FAILING,
    REACHED,
    TITLES,
    TROUBLE,
    Backend,
    RunGone,
    backends_of,
)

if TYPE_CHECKING:
    from samewise.runner.tracking.system import Sampler

_LOG = logging.getLogger("samewise.tracking")
_NICE = 10
_LONGEST_WAIT_S = 5.0


class Lifeline:
    """Detects the trainer's end, by a message on standard input or the end of its process.

    Args:
        trainer: The id of the trainer's process, which started this one.
    """

    def __init__(self, trainer: int) -> None:
        self._trainer = trainer
        self._ended = False

    def has_ended(self, wait_s: float) -> bool:
        """Whether the trainer has ended, after waiting up to `wait_s` seconds for it."""
        if self._ended:
            time.sleep(wait_s)
        else:
            ready, _, _ = select.select([0], [], [], max(wait_s, 0.0))
            self._ended = bool(ready) or os.getppid() != self._trainer
        return self._ended


def prepare_environment() -> None:
    """Set mlflow's environment variables, before it is imported.

    No retries, since the sender retries itself; no threads, no telemetry, no other hosts.
    """
    settings = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        # MLflow would send tokens to any host that a server redirects to, or lets download from
        "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
        "MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        # MLflow logs a traceback for each failed request
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    os.environ.update({name: x for name, x in settings.items() if name not in os.environ})


@contextlib.contextmanager
def quiet_mlflow() -> Generator[None]:
    """Set that environment within the context, and restore the previous, such as a notebook's."""
    previous_names = set(os.environ)
    prepare_environment()
    try:
        yield
    finally:
        for name in set(os.environ) - previous_names:
            del os.environ[name]


def open_backend(name: str, folder: RunFolder, settings: Mapping[str, Any]) -> Backend:
    """Open the run's copy in one backend."""
    if name == "tensorboard":
        from samewise.runner.tracking.tensorboard import TensorBoard

        return TensorBoard(folder)
    if name == "csv":
        from samewise.runner.tracking.metrics_csv import MetricsCsv

        return MetricsCsv(folder)
    if name == "wandb":
        from samewise.runner.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(folder, settings)
    from samewise.runner.tracking.sending import Sending
    from samewise.runner.tracking.store import open_client

    return Sending(folder, settings, open_client(settings["uri"]))


class Copy:
    """A run's copy in one backend, retried until it is complete.

    Errors of a backend do not affect the others.
    """

    def __init__(self, name: str, folder: RunFolder, settings: dict[str, Any]) -> None:
        self._name, self._folder, self._settings = name, folder, settings
        self._backend: Backend | None = None
        self.trouble = ""
        self.is_complete = False
        self.wait = 0.0

    @property
    def moved(self) -> float:
        """Time at which the copy last received anything (`time.monotonic`, in seconds)."""
        return self._backend.sent.moved if self._backend is not None else -math.inf

    def bring_up(self, *, ended: bool) -> None:
        """Send what is new. Log repeated failures once."""
        if self.is_complete:
            return
        try:
            if self._backend is None:
                self._backend = open_backend(self._name, self._folder, self._settings)
            self._backend.synchronise(alive=not ended)
            if self.trouble:
                _LOG.info("sending again")
            if ended:
                _LOG.info("%s %s", REACHED, TITLES[self._name])
            self.trouble, self.is_complete = "", ended
            self.wait = float(self._settings["send_every_s"])
        except RunGone as error:
            _LOG.warning("%s", error)
            self.wait = 0.0
        except Exception as error:
            # After any error the journal still has what was not sent, and the next pass sends it
            message = without_sql(f"{type(error).__name__}: {error}")[:2000]
            if message != self.trouble:
                _LOG.warning("%s %s%s %s", FAILING, TITLES[self._name], TROUBLE, message)
            self.wait = min(_LONGEST_WAIT_S, max(0.25, 2 * self.wait) if self.trouble else 0.25)
            self.trouble = message


def run(
    folder: RunFolder, settings: dict[str, Any], lifeline: Lifeline, trainer: int, *, since: float
) -> int:
    """Send until everything has arrived, or sending is hopeless; return 0 or 1.

    After the trainer's end, the sender gives up once nothing has succeeded for `flush_timeout_s`,
    or if all that remains is refused.

    Args:
        folder: The run's folder.
        settings: The config's `tracking`.
        lifeline: Detects the trainer's end.
        trainer: The trainer's process id.
        since: Time from which another sender has tried before this one (`time.monotonic`), so that
            not every sender of many killed trainings waits anew.
    """
    sampler = _sampler(folder, trainer) if settings["log_system"] else None
    copies = [Copy(name, folder, settings) for name in backends_of(settings)]
    wait = 0.0
    ended_at = since if lifeline.has_ended(0.0) else None
    while True:
        ended = lifeline.has_ended(wait)
        if ended and ended_at is None:
            ended_at = time.monotonic()
        if sampler is not None and not ended:
            sampler.sample()
        for copy in copies:
            copy.bring_up(ended=ended)
        incomplete = [copy for copy in copies if not copy.is_complete]
        if ended and not incomplete:
            return 0
        last_moves = [copy.moved for copy in incomplete if copy.trouble]
        is_over = (
            ended_at is not None
            and last_moves
            and time.monotonic() - max(ended_at, *last_moves) > float(settings["flush_timeout_s"])
        )
        # No retry gives a user access
        is_refused = all(REFUSED in describe_failure(copy.trouble) for copy in incomplete)
        if is_over or (ended and is_refused):
            _LOG.warning(
                "gave up; run `samewise sync %s` to send the rest", shlex.quote(str(folder.path))
            )
            return 1
        wait = min([copy.wait for copy in incomplete], default=float(settings["send_every_s"]))


def _sampler(folder: RunFolder, trainer: int) -> Sampler | None:
    try:
        from samewise.runner.tracking.system import Sampler

        return Sampler(folder, trainer)
    except Exception as error:
        # Measurements are optional, and the trainer may have ended already
        _LOG.info("no system metrics: %s", error)
        return None


@filter_output()
def be(folder: RunFolder, trainer: int) -> int:
    """Run as a run's sender, with settings from standard input; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # A scheduler that stops a job signals all its processes; this one ends after the trainer
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        # The trainer comes first
        os.nice(_NICE)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    _LOG.setLevel(logging.INFO)
    lifeline = Lifeline(trainer)
    # Not buffered, since what follows the line tells `Lifeline` that the trainer ends
    with open(0, "rb", buffering=0, closefd=False) as trainers:
        line = trainers.readline()
    if not line.endswith(b"\n"):
        return 1
    prepare_environment()
    since = time.monotonic()
    # The sender of an earlier process of this run may still be at work
    with hold(folder.sending, wait=True):
        return run(folder, json.loads(line), lifeline, trainer, since=since)


def main() -> int:
    """Parse the command line, and run as the sender."""
    parser = argparse.ArgumentParser(prog="samewise-sender")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainer", type=int, required=True)
    arguments = parser.parse_args()
    return be(RunFolder(arguments.folder), arguments.trainer)


if __name__ == "__main__":
    raise SystemExit(main())
