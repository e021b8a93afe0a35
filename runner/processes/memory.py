"""How much memory is free.

Limits on the memory of parts of this process, and on the number of processes. Imports neither torch
nor mlflow.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from samewise.runner.errors import ConfigError, Problem

_SHARE: Final = 0.9
_LEAST: Final = 2 << 30
"""Bytes that may be asked for however little is free: of what is asked for, much is never touched.
"""
_GROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes still available on the machine or in this process's control group, including those
    used as file cache.
    """
    import psutil  # here, since most commands ask for no memory

    free = psutil.virtual_memory().available
    for names in _GROUPS:
        limit, used, details = (groups / name for name in names)
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
            counts = (
                dict(line.split() for line in details.read_text().splitlines() if line)
                if details.is_file()
                else {}
            )
            cached = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
            free = min(free, int(text) - int(used.read_text()) + cached)
    return max(free, 0)


@contextmanager
def refuse_too_much_memory() -> Generator[None]:
    """Raise a MemoryError (or an allocator's own error) instead of exhausting the memory.

    The kernel would kill this process or another.

    By Linux's RLIMIT_DATA, which counts what a process can write and shares with no other.
    Elsewhere nothing is bound.
    """
    import psutil

    try:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = held + max(_LEAST, round(_SHARE * (free_memory() + psutil.swap_memory().free)))
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (
            min([bound, *(limit for limit in (before, most) if limit != resource.RLIM_INFINITY)]),
            most,
        ),
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def require_few(path: str, count: int) -> None:
    """Raise a ConfigError for thousands of processes, which overload a machine before any of them
    loads a sample.
    """
    cores = os.cpu_count() or 1
    if count > max(64, 8 * cores):
        raise ConfigError(
            Problem(
                path,
                f"is more processes than this machine with {cores} cores can run",
                count,
                f"at most {max(64, 8 * cores)}",
            )
        )
