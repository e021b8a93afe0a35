"""Authenticates messages between ranks with a secret that only they get from the process that
started them; only then are they unpickled.

`samewise train` hands one to the ranks that it starts, and `launcher=slurm` to those of its jobs on
several machines. Ranks that something else has started (torchrun) share what SAMEWISE_SECRET has
there; without it the mark proves nothing, and only the network keeps strangers out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from samewise.runner.errors import Problem, TrainingError

SECRET = "SAMEWISE_SECRET"
"""A long random text that all ranks have in their environment, where other users cannot read it;
launchers set it, torchrun does not."""

MARK = hashlib.sha256().digest_size
"""Bytes that a message grows by."""


def new_secret() -> str:
    """Create a secret for the ranks of one run."""
    return secrets.token_hex(32)


def seal(said: bytes, purpose: str) -> bytes:
    """Prepend a message's authentication code."""
    return _mark(said, purpose) + said


def unseal(heard: bytes, purpose: str) -> bytes:
    """The message, if a process with the secret sent it for this purpose.

    Otherwise a TrainingError.
    """
    mark, said = heard[:MARK], heard[MARK:]
    if not hmac.compare_digest(mark, _mark(said, purpose)):
        words = f"received a message that no rank of this run sent ({purpose}), and did not use it"
        hint = (
            "another process may have sent it; if you start the ranks by hand, give all of "
            f"them the same {SECRET}, or none"
        )
        raise TrainingError(Problem(f"rank {os.environ.get('RANK', '?')}", words, hint=hint))
    return said


def _mark(said: bytes, purpose: str) -> bytes:
    return hmac.digest(f"{os.environ.get(SECRET, '')} {purpose}".encode(), said, "sha256")
