"""What ranks tell each other carries the mark of a secret that whoever started them has handed to them, and to no other process: it is unpickled only then.

`samewise train` hands one to the ranks that it starts, and `launcher=slurm` to those of its jobs on several machines. Ranks that something else has started
(torchrun) share what SAMEWISE_SECRET has there; without it the mark proves nothing, and only the network keeps strangers out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from samewise.runner.errors import Problem, TrainingError

SECRET = "SAMEWISE_SECRET"
"""A variable of the ranks' environment, which other users cannot read."""

MARK = hashlib.sha256().digest_size
"""Bytes that a message grows by."""


def new_secret() -> str:
    """For the ranks of one run."""
    return secrets.token_hex(32)


def seal(said: bytes, purpose: str) -> bytes:
    """A message with its mark before it."""
    return _mark(said, purpose) + said


def unseal(heard: bytes, purpose: str) -> bytes:
    """The message, where a process with the secret has said it for this purpose; else a TrainingError."""
    mark, said = heard[:MARK], heard[MARK:]
    if not hmac.compare_digest(mark, _mark(said, purpose)):
        words = f"received a message that no rank of this run has sent ({purpose}); it has not been used"
        hint = f"another process may have sent it; ranks that are started by hand need the same {SECRET}, or none"
        raise TrainingError(Problem(f"rank {os.environ.get('RANK', '?')}", words, hint=hint))
    return said


def _mark(said: bytes, purpose: str) -> bytes:
    return hmac.digest(f"{os.environ.get(SECRET, '')} {purpose}".encode(), said, "sha256")
