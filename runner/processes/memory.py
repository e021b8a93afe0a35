"""Free memory, and limits on this process's memory and on the number of processes.

Imports neither torch nor mlflow.
"""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from samewise.runner.errors import ConfigError

_SHARE: Final = 0.9
_LEAST: Final = 2 << 30
"""Bytes that are always allowed: much allocated memory is never touched."""
# Files of control groups in version 2, then in version 1
_GROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes still available on the machine or in this process's control group.

    Memory used as file cache counts as available.
    """
    # Most commands do not ask for memory; they start faster without the import.
    import psutil

    free = psutil.virtual_memory().available
    for names in _GROUPS:
        limit, used, details = (groups / name for name in names)
        # Without a limit, version 2 has the word `max`
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
    """Make an allocation beyond the memory fail, so that the kernel does not kill a process.

    It raises MemoryError or the allocator's own error. Systems other than Linux have no limit.
    """
    import psutil

    try:
        # The sixth number is data and stack in pages (proc(5))
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + max(_LEAST, round(_SHARE * (free_memory() + psutil.swap_memory().free)))
    resource.setrlimit(
        # RLIMIT_DATA counts the pages that a process can write and shares with no other.
        resource.RLIMIT_DATA,
        (
            # RLIM_INFINITY is -1, which is less than any limit
            min([limit, *(x for x in (soft_limit, hard_limit) if x != resource.RLIM_INFINITY)]),
            hard_limit,
        ),
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))


def require_few(path: str, count: int) -> None:
    """Raise a ConfigError for thousands of processes, which overload a machine as they start."""
    cores = os.cpu_count() or 1
    ConfigError.raise_if(
        count > max(64, 8 * cores),
        path,
        f"is more processes than this machine with {cores} cores can run",
        count,
        f"at most {max(64, 8 * cores)}",
    )
