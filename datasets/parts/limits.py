"""Limits on the resources that a data set's file may require.

They are checked by the file's header before it is decoded. Each limit is above what real data sets
have. A user who has larger files raises it by the environment variable that the message names; a
config cannot.
"""

import hashlib
import os
import stat
from dataclasses import dataclass

from samewise.runner.errors import DataError, Problem, limit_from


@dataclass(frozen=True)
class Limit:
    """Upper limit on a count.

    Args:
        variable: The environment variable that overrides it.
        usual: The limit without the variable.
        what: The counted noun, which follows "has N" in messages.
    """

    variable: str
    usual: int
    what: str

    @property
    def most(self) -> int:
        """The limit in force.

        Raises:
            ConfigError: The variable is not a whole number greater than 0.
        """
        return limit_from(self.variable, self.usual)

    def check(self, path: str | os.PathLike[str], count: int) -> None:
        """Raise a DataError if `count` exceeds the limit; it names the file and how to allow it."""
        if count > (most := self.most):
            raise DataError(
                Problem(
                    os.fspath(path),
                    f"has {count:,} {self.what}, more than the limit",
                    expected=f"at most {most:,}",
                    hint="if the file is meant to be so large, set the environment variable "
                    f"{self.variable}={count}; decoding it then takes more memory",
                )
            )


PIXELS = Limit("SAMEWISE_MAX_PIXELS", 100_000_000, "pixels")
"""Most pixels of an image: 100 million by default."""
SAMPLE_RATE = Limit("SAMEWISE_MAX_SAMPLE_RATE", 384_000, "samples a second")
"""Highest sample rate of a recording in Hz: 384,000 by default."""
SAMPLES = Limit("SAMEWISE_MAX_SAMPLES", 3600 * 192_000, "samples of sound over all channels")
"""Most samples of a recording that are decoded at once, at the file's rate and after resampling.

By default an hour at 192 kHz, or twelve hours at 16 kHz.
"""
FILTER = Limit("SAMEWISE_MAX_FILTER", 25_000_000, "values in the filter that resamples it")
"""Most values of the filter that resamples a recording: 25 million by default.

It grows with the product of the two rates in lowest terms: 44,100 to 16,000 Hz needs 80,000 values,
191,999 to 16,000 Hz would need 3 billion.
"""
ROWS = Limit("SAMEWISE_MAX_ROWS", 10_000_000, "rows")
"""Most rows of a Parquet table, where repeated values take almost no room: 10 million by default.
"""
BYTES = Limit("SAMEWISE_MAX_FILE_BYTES", 4 << 30, "bytes")
"""Most bytes of a file that is read whole, and of a Parquet table's unpacked values: 4 GiB."""


def require_regular(path: str | os.PathLike[str], *, into_memory: bool = True) -> None:
    """Raise a DataError unless a path is a regular file, not too large to read `into_memory`.

    Raises:
        OSError: The file does not exist.
    """
    status = os.stat(path)
    # Reading a device may never end, and reading a pipe may never begin
    if not stat.S_ISREG(status.st_mode):
        kind = next(
            (description for test, description in _KINDS if test(status.st_mode)), "a special file"
        )
        raise DataError(
            Problem(
                os.fspath(path),
                f"is {kind}, not a regular file",
                hint="name a file, or leave it out",
            )
        )
    if into_memory:
        BYTES.check(path, status.st_size)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file within the size limit."""
    require_regular(path)
    with open(path, "rb") as file:
        return file.read()


def add_content(digest: hashlib.blake2b, path: str | os.PathLike[str]) -> None:
    """Update a hash with all bytes of a regular file of any size."""
    require_regular(path, into_memory=False)
    with open(path, "rb") as file:
        hashlib.file_digest(file, lambda: digest)


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
