"""What this process was started as: one of several ranks, a job of a sweep; and that it ends with what started it. Imports neither torch nor mlflow."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from types import FrameType

REPORTER = "SAMEWISE_REPORTER"
"""A variable of a job's environment: a `samewise.runner.interfaces.Callback`, as JSON with a `_target_`, made in the job's process. It tells the sweeper how
the run goes and may ask it to stop; it is in no config, so it changes no experiment."""

PROJECT = "SAMEWISE_PROJECT"
"""A variable that names a copy of the code, which a job then takes for the user's project."""

ENDS_WITH_LAUNCHER = "SAMEWISE_ENDS_WITH_LAUNCHER"
"""A variable that has a job save and stop when the process that started it dies."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 64 << 20


@contextmanager
def on_signals(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Within it, these signals call the handler; afterwards what they called before. Python gives signals to the main thread alone: in another, none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def is_rank() -> bool:
    """Whether something (torchrun, `samewise train` itself) has started this process as one of several that train together."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when the one that started it dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of a process that ends with it, and wait some seconds for that."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for what is asked for next, as steps of a training on the CPU ask for the same again and again.

    Otherwise each tensor of more than 32 MB comes from the kernel and goes back to it, and so does what lies at the end of the heap: page by page, each filled
    with zeros. It changes no bits; the process stays as large as it has been. Where the environment says how malloc is to work (`MALLOC_...`,
    `GLIBC_TUNABLES`), or the C library is another, nothing is done.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD)):
            libc.mallopt(option, value)
