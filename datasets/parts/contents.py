"""Hashes sizes and contents of a data set's files for its fingerprint."""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from samewise.datasets.parts.limits import add_content
from samewise.runner.errors import DataError, Problem

CONTENTS = 64
"""Number of files whose bytes count."""
SIZES = 100_000
"""Number of files whose sizes count."""


def spaced_indices(length: int, most: int) -> list[int]:
    """Return up to `most` indices of a sequence, evenly spaced."""
    return (
        list(range(length)) if length <= most else [place * length // most for place in range(most)]
    )


def add_sizes(
    digest: blake2b, path: Callable[[int], Path], count: int, *, most: int = SIZES
) -> None:
    """Update a hash with the sizes of up to `most` of `count` files, evenly spaced."""
    digest.update(
        repr([os.path.getsize(path(index)) for index in spaced_indices(count, most)]).encode()
    )


def add_files(
    digest: blake2b, path: Callable[[int], Path], count: int, *, most: int = SIZES
) -> None:
    """Update a hash with the sizes of up to `most` files, and the bytes of 64.

    Raises:
        DataError: A file cannot be read, such as a link that leads nowhere.
    """
    try:
        add_sizes(digest, path, count, most=most)
        for index in spaced_indices(count, CONTENTS):
            add_content(digest, path(index))
    except OSError as error:
        raise DataError(
            Problem(os.fspath(error.filename), f"cannot be read: {error.strerror}")
        ) from None
