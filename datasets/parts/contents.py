"""What a data set's fingerprint takes from its files: their sizes, and the bytes of some of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from samewise.datasets.parts.limits import Hash, add_content

CONTENTS = 64
"""Files whose bytes count."""
SIZES = 100_000
"""Files whose sizes count."""


def spaced_indices(length: int, wanted: int) -> list[int]:
    """Up to `wanted` of the indices, evenly spaced."""
    return (
        list(range(length))
        if length <= wanted
        else [place * length // wanted for place in range(wanted)]
    )


def add_sizes(digest: Hash, path: Callable[[int], Path], count: int, *, most: int = SIZES) -> None:
    """Update a hash with the sizes of `count` files, of up to `most` of them, evenly spaced."""
    digest.update(
        repr([os.path.getsize(path(index)) for index in spaced_indices(count, most)]).encode()
    )


def add_files(digest: Hash, path: Callable[[int], Path], count: int, *, most: int = SIZES) -> None:
    """The same, plus the bytes of 64 files."""
    add_sizes(digest, path, count, most=most)
    for index in spaced_indices(count, CONTENTS):
        add_content(digest, path(index))
