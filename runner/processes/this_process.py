"""Role of this process (a rank, a job of a sweep), and how it ends with its parent.

Imports neither torch nor mlflow.
"""

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
"""Set for a job by its sweeper: a `samewise.runner.interfaces.Callback` as JSON with a `_target_`.

The job's process makes it. It reports the run's progress to the sweeper and may ask the run to
stop. No config holds it, so it changes no experiment.
"""

PROJECT = "SAMEWISE_PROJECT"
"""Set for a job by its launcher: a copy of the code, which the job uses as the user's project."""

ENDS_WITH_LAUNCHER = "SAMEWISE_ENDS_WITH_LAUNCHER"
"""Set for a job by its launcher: the job saves and stops when its parent process dies."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 64 << 20


@contextmanager
def on_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Handle these signals within the context, and restore the previous handlers afterwards.

    SIGHUP stays ignored where it is, as under nohup.
    """
    # Python allows only the main thread to set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    previous = {
        number: signal.signal(number, handler)
        for number in numbers
        if not (nohup and number == signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def is_rank() -> bool:
    """Return whether torchrun or `samewise train` started this process as one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_rank(code: int) -> NoReturn:
    """End this process as Python would, including `atexit`, but leave its interpreter as it is."""
    # Finalising now and then aborts a rank after Python has gone ("terminate called without an
    # active exception" from torch's threads). `_shutdown` waits for other threads.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to signal this process when its parent dies, even by SIGKILL.

    If the parent is no longer `parent`, which then died earlier, signal at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)


def reopen_files() -> None:
    """Give each file that a forked process reads a position of its own.

    A descriptor inherited from the parent shares its position, so a data set that keeps a file open
    would read where another worker has just been. Regular files on Linux only, also temporary ones
    without a name. The parent keeps its locks.
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
                # /proc opens the same file anew by its descriptor; `dup` would share the position.
                reopened = os.open(
                    f"/proc/self/fd/{number}", flags & (os.O_ACCMODE | os.O_APPEND) | os.O_CLOEXEC
                )
                os.lseek(reopened, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(reopened, number, inheritable=os.get_inheritable(number))
                os.close(reopened)


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of a process that then ends, and wait for it up to ten seconds."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, as each training step allocates the same sizes.

    Changes no bits; the process stays as large as it has been. Does nothing where the environment
    sets malloc's options (`MALLOC_...`, `GLIBC_TUNABLES`), or with another C library.
    """
    if sys.platform != "linux" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        # Otherwise the kernel maps each tensor of more than 32 MB anew, page by page, each filled
        # with zeros, as it does with the end of the heap.
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD)):
            libc.mallopt(option, value)


def has_fixed_hash_seed() -> bool:
    """Return whether sets of strings have the same order in every process.

    The command ensures it; a script or notebook may not.
    """
    return not sys.flags.hash_randomization
