"""What this process was started as (a rank, a job of a sweep), and how it ends with its parent.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

REPORTER = "SAMEWISE_REPORTER"
"""Set for a job by its sweeper: a `samewise.runner.interfaces.Callback`, as JSON with a
`_target_`, made in the job's process. It tells the sweeper how the run goes and may ask it to
stop; it is in no config, so it changes no experiment."""

PROJECT = "SAMEWISE_PROJECT"
"""Set for a job by its launcher: a copy of the code, which the job takes for the user's project."""

ENDS_WITH_LAUNCHER = "SAMEWISE_ENDS_WITH_LAUNCHER"
"""Set for a job by its launcher: the job saves and stops when the process that started it dies."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 64 << 20


@contextmanager
def on_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Within it, these signals call the handler.

    Afterwards the previous handlers. Only the main thread can set handlers, so others set none.

    SIGHUP stays ignored where it is, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if not (nohup and number == signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def is_rank() -> bool:
    """Whether this process was started (by torchrun, or `samewise train` itself) as one of several
    that train together.
    """
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_rank(code: int) -> NoReturn:
    """End this process as Python would, up to what is registered with `atexit`, but leave its
    interpreter as it is.

    Otherwise torch now and then aborts a rank of several that has finished ("terminate called
    without an active exception"), after Python is gone.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  (waits for other threads)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to signal this process when its parent dies, even by SIGKILL.

    At once if that is no longer `parent`, which has died before.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)


def reopen_files() -> None:
    """In a forked process, give each file that is open for reading, or for both, a position of its
    own: until then it has one with its parent and siblings.

    Otherwise a data set that keeps a file open would read wherever another worker has just been. Of
    regular files, and on Linux, where the same file can be opened again by its descriptor, even a
    temporary one without a name. The parent keeps its locks.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):
            number = int(name)
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if (
                number > 2
                and stat.S_ISREG(os.fstat(number).st_mode)
                and flags & os.O_ACCMODE != os.O_WRONLY
            ):
                again = os.open(
                    f"/proc/self/fd/{number}", flags & (os.O_ACCMODE | os.O_APPEND) | os.O_CLOEXEC
                )
                os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, number, inheritable=os.get_inheritable(number))
                os.close(again)


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of a process that then ends, and wait some seconds for it."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, since training steps on the CPU allocate the same
    sizes again and again.

    Otherwise each tensor of more than 32 MB comes from the kernel and goes back to it, and so does
    what lies at the end of the heap: page by page, each filled with zeros. It changes no bits; the
    process stays as large as it has been. Where the environment says how malloc is to work
    (`MALLOC_...`, `GLIBC_TUNABLES`), or the C library is another, nothing is done.
    """
    if sys.platform != "linux" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD)):
            libc.mallopt(option, value)


def has_fixed_hash_seed() -> bool:
    """Whether sets of strings have the same order in every process: the command sees to it, a
    script or notebook may not.
    """
    return not sys.flags.hash_randomization
