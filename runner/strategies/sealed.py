"""Authenticates messages between ranks, before they are unpickled, with a secret of the run.

`samewise train` passes it to the ranks that it starts, and `launcher=slurm` to those of its jobs on
several machines. Ranks started otherwise (torchrun) share the value of SAMEWISE_SECRET; without one
the code proves nothing, and only the network keeps strangers out.
"""

import hashlib
import hmac
import os
import secrets

from samewise.runner.errors import Problem, TrainingError

SECRET = "SAMEWISE_SECRET"
"""Variable with a long random text in the environment of all ranks.

Other users cannot read it. Launchers set it, torchrun does not.
"""

MARK = hashlib.sha256().digest_size
"""Bytes of a message's authentication code."""


def new_secret() -> str:
    """Create a secret for the ranks of one run."""
    return secrets.token_hex(32)


def seal(message: bytes, purpose: str) -> bytes:
    """Prepend a message's authentication code."""
    return _mark(message, purpose) + message


def unseal(sealed: bytes, purpose: str) -> bytes:
    """Return the message, if a process with the secret sent it for this purpose.

    Raises:
        TrainingError: No such process sent it.
    """
    mark, message = sealed[:MARK], sealed[MARK:]
    if not hmac.compare_digest(mark, _mark(message, purpose)):
        raise TrainingError(
            Problem(
                f"rank {os.environ.get('RANK', '?')}",
                f"received a message that no rank of this run sent ({purpose}), and did not use it",
                hint="another process may have sent it; if you start the ranks by hand, give all "
                f"of them the same {SECRET}, or none",
            )
        )
    return message


def _mark(message: bytes, purpose: str) -> bytes:
    # The purpose is part of the key, so that a message passes for no other one
    return hmac.digest(f"{os.environ.get(SECRET, '')} {purpose}".encode(), message, "sha256")
