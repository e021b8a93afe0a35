"""Limits on the resources that a data set's file may require, checked from its header before it is
decoded.

Each limit is above what real data sets have. A user who has larger files raises it by the
environment variable that the message names; a config cannot.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Protocol

from samewise.runner.errors import DataError, Problem, limit_from

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Limit:
    """An upper limit.

    Args:
        variable: The environment variable that sets another.
        usual: Without it.
        what: What is counted, in words that follow "has N".
    """

    variable: str
    usual: int
    what: str

    @property
    def most(self) -> int:
        """Raises ConfigError unless the variable is a whole number greater than 0."""
        return limit_from(self.variable, self.usual)

    def check(self, path: str | os.PathLike[str], count: int) -> None:
        """Raise a DataError, with the file, its size and how to allow it, if `count` exceeds the
        limit.
        """
        if count > (most := self.most):
            hint = (
                "if the file is meant to be so large, set the environment variable "
                f"{self.variable}={count}; decoding it then takes more memory"
            )
            raise DataError(
                Problem(
                    os.fspath(path),
                    f"has {count:,} {self.what}, more than the limit",
                    expected=f"at most {most:,}",
                    hint=hint,
                )
            )


PIXELS = Limit("SAMEWISE_MAX_PIXELS", 100_000_000, "pixels")
"""The most pixels that an image may have: 100 million unless set."""
SAMPLE_RATE = Limit("SAMEWISE_MAX_SAMPLE_RATE", 384_000, "samples a second")
"""The highest sample rate that a recording may have, in Hz: 384,000 unless set."""
SAMPLES = Limit("SAMEWISE_MAX_SAMPLES", 3600 * 192_000, "samples of sound over all channels")
"""The most samples of a recording that are decoded at once, at the file's rate and at the one
that it is resampled to: an hour at 192 kHz, twelve hours at 16 kHz, unless set."""
FILTER = Limit("SAMEWISE_MAX_FILTER", 25_000_000, "values in the filter that resamples it")
"""The most values of the filter that resamples a recording: 25 million unless set. It grows with
the product of the two rates in lowest terms: 44,100 to 16,000 Hz needs 80,000 values, 191,999
to 16,000 Hz would need 3 billion."""
ROWS = Limit("SAMEWISE_MAX_ROWS", 10_000_000, "rows")
"""The most rows of a Parquet table, in which a value that is repeated takes next to no room: 10
million unless set."""
BYTES = Limit("SAMEWISE_MAX_FILE_BYTES", 4 << 30, "bytes")
"""The most bytes of a file that is read whole (an image, a list, annotations), and of a Parquet
table's values once they are unpacked: 4 GiB unless set."""


def require_regular(path: str | os.PathLike[str], *, whole: bool = True) -> None:
    """Raise a DataError unless a name is a regular file (devices may never end, pipes never begin).

    With `whole`, also if it is too large.

    Raises:
        OSError: it does not exist.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for test, words in _KINDS if test(found.st_mode)), "a special file")
        raise DataError(
            Problem(
                os.fspath(path),
                f"is {kind}, not a regular file",
                hint="name a file, or leave it out",
            )
        )
    if whole:
        BYTES.check(path, found.st_size)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file within the size limit."""
    require_regular(path)
    with open(path, "rb") as file:
        return file.read()


class Hash(Protocol):
    """An object with hashlib's interface."""

    def update(self, data: bytes, /) -> None: ...


def add_content(digest: Hash, path: str | os.PathLike[str]) -> None:
    """Update a hash with all bytes of a regular file of any size."""
    require_regular(path, whole=False)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
