"""Opens a run's copies in its backends, and synchronises them until they are complete.

Only the chosen backends are imported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.address import REFUSED, describe_failure, without_sql
from samewise.runner.tracking.backends import TITLES, Backend, RunGone
from samewise.runner.tracking.link import FAILING, REACHED, TROUBLE

_LOG = logging.getLogger("samewise.tracking")
_LONGEST_WAIT_S = 5.0


def open_backend(name: str, folder: RunFolder, settings: Mapping[str, Any]) -> Backend:
    """Open the run's copy in one backend."""
    if name == "tensorboard":
        from samewise.runner.tracking.tensorboard import TensorBoard

        return TensorBoard(folder)
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

    @property
    def is_refused(self) -> bool:
        """Whether the last attempt failed because this user has no access, which no retry gives."""
        return REFUSED in describe_failure(self.trouble)

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
