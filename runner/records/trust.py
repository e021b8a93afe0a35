"""Signs the runs and sweeps that this user has made or trusts, with a key that only they can read.

A run's config.yaml names the classes that `eval`, `predict` and `verify` instantiate; a sweep's
sweep.json names the launcher, and the overrides that `samewise sweep` runs again. In a received
folder they are a stranger's text. A digest in the folder would be the stranger's own, so the
signature has a key: HMAC-SHA256 over the file's bytes, stored beside it in `.signature`. Imports
neither torch nor mlflow.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import sys
from pathlib import Path

from samewise.runner.errors import ConfigError, Problem, TrainingError
from samewise.runner.records.files import read_text, write_atomically

SIGNATURE = ".signature"
_OF_FOLDERS = ("config.yaml", "sweep.json")
NOT_YOURS = "is not signed by you"
MAKES = "instantiates what its config.yaml names: classes of samewise, torch and your own packages"
RUNS = "runs the launcher, and trains with the overrides, that its sweep.json names"
_KEY_DIGITS = 64


def sign(file: Path, text: str | None = None) -> bool:
    """Record that this user has made, or trusts, a config.yaml or a sweep.json.

    Args:
        file: The file.
        text: The text that is about to be written to it; None: its present text.

    Returns:
        Whether it is signed: without a home that can be written, nothing is.
    """
    key, text = _key(), read_text(file) if text is None else text
    if key is None or text is None:
        return False
    try:
        write_atomically(_signature_file(file), _signature(key, file, text) + "\n")
    except TrainingError:
        # The folder cannot be written: it is trusted this time only
        return False
    return True


def is_signed(file: Path) -> bool:
    """Whether this user has signed the file's current content."""
    try:
        signature, text = read_text(_signature_file(file)), read_text(file)
    except ConfigError:
        return False
    key = _key() if signature else None
    return (
        key is not None
        and text is not None
        and hmac.compare_digest(
            str(signature).strip().encode(), _signature(key, file, text).encode()
        )
    )


def is_trusted(file: Path, *, trust: bool) -> bool:
    """Whether this user has signed the file, or trusts it now (`--trust`), which is recorded.

    Read the file first, so that no damaged file is trusted.
    """
    if is_signed(file):
        return True
    if trust and not sign(file):
        print(
            f"note: {file.parent} cannot be signed, so --trust is not remembered for it",
            file=sys.stderr,
        )
    return trust


def require(file: Path, *, trust: bool, uses: str, received: str = "") -> None:
    """Raise a ConfigError for a file without a signature of this user's.

    Args:
        file: A config.yaml or sweep.json.
        trust: Whether the user trusts it now, as in `is_trusted`.
        uses: The effect of the command on the file's content, for the message.
        received: The name by which the user called it, if it was unpacked for this command alone.
    """
    if not is_trusted(file, trust=trust):
        hint = (
            f"this command {uses}. If you trust whoever made "
            f"{'it' if received else 'the folder'}, add "
            f"--trust{'' if received else '; it is remembered'}"
        )
        path = received or (file.parent if file.name in _OF_FOLDERS else file)
        unsigned = (
            f"{NOT_YOURS}: someone else made it, it was altered, or you made it with another "
            "home directory or an early version"
        )
        raise ConfigError(
            Problem(
                str(path),
                "does not show who made it, even if you did" if received else unsigned,
                hint=hint,
            )
        )


def _signature_file(file: Path) -> Path:
    """Return the signature's path; a config that was copied under another name has its own."""
    return file.with_name(SIGNATURE if file.name in _OF_FOLDERS else f".{file.name}{SIGNATURE}")


def _signature(key: str, file: Path, text: str) -> str:
    # With the name, so that a signed config does not pass for a signed sweep
    return hmac.new(
        bytes.fromhex(key), f"samewise {file.name}\0{text}".encode(), hashlib.sha256
    ).hexdigest()


def _key() -> str | None:
    """Return the user's key, created if missing; None if that fails."""
    try:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        file = home / "samewise" / "key"
        return _read(file) or _make(file)
    except (OSError, ConfigError, RuntimeError):
        # In containers a user may have no home, which is a RuntimeError
        return None


def _read(file: Path) -> str | None:
    text = (read_text(file) or "").strip()
    return (
        text
        if len(text) == _KEY_DIGITS and all(digit in "0123456789abcdef" for digit in text)
        else None
    )


def _make(file: Path) -> str | None:
    """Create the key, and return it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # Private from the beginning, not by a later chmod
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as handle:
            handle.write(secrets.token_hex(_KEY_DIGITS // 2) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        # A link, unlike a rename, replaces nothing: of two processes that create the key at once,
        # both read the key of the first
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(file)
