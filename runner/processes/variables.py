"""Environment variables that torch and its libraries read when they are loaded: set before torch is
imported. Imports nothing heavy.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from samewise.runner.errors import ConfigError, Problem

VARIABLES = (
    *(
        "ATEN_CPU_CAPABILITY",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    *(
        "OMP_NUM_THREADS",
        "OMP_DYNAMIC",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "OMP_SCHEDULE",
        "OMP_STACKSIZE",
        "OMP_THREAD_LIMIT",
        "OMP_WAIT_POLICY",
    ),
    *(
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "KMP_DETERMINISTIC_REDUCTION",
        "KMP_HW_SUBSET",
        "OPENBLAS_CORETYPE",
        "OPENBLAS_NUM_THREADS",
    ),
    *(
        "MKL_CBWR",
        "MKL_DYNAMIC",
        "MKL_ENABLE_INSTRUCTIONS",
        "MKL_NUM_THREADS",
        "ONEDNN_CPU_ISA_HINTS",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA",
    ),
)
"""Variables that choose how numbers are computed. Any other could run a stranger's program (PATH,
LD_PRELOAD, OMP_TOOL_LIBRARIES) or write a file (MKL_VERBOSE_OUTPUT_FILE).
"""

# The number of threads changes bits, so nothing but the config may choose it: not OpenMP or MKL by
# the load (OMP_DYNAMIC=true hangs torch altogether), not a limit of the user's environment.
# OpenBLAS, behind NumPy, never starts more threads than there are cores, so it gets one.
ALWAYS = {
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "OMP_THREAD_LIMIT": str(2**31 - 1),
    "OPENBLAS_NUM_THREADS": "1",
}
# Threads that wait leave the core to others, which may be the ones that they wait for; but first
# they look a while (libgomp reckons with 100 turns a microsecond), where there are cores for all of
# them. This changes no bits, so what the user's environment says stays.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""For ranks, jobs and other processes that this one starts; the command starts with it
(.package/samewise/__main__.py)."""
CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Where Inductor keeps what it has compiled, and runs it from."""
_REPLACED: Final[dict[str, str | None]] = {}
"""The values, in this process, of the variables that experiments have changed since."""


def prepare(settings: Any) -> None:
    """Set the environment variables that torch, MKL, oneDNN and cuBLAS read on start.

    ConfigError if torch is already imported and a variable that it may have read would have to
    change, perhaps back from what another experiment of this process has set. cuBLAS reads its own
    when it is first used.
    """
    # Without determinism there is no promise that another experiment's variables could break.
    replaced = _REPLACED if settings.deterministic else {}
    wanted = replaced | {name: str(value) for name, value in settings.variables.items()}
    changed = [name for name, value in wanted.items() if os.environ.get(name) != value]
    if late := [name for name in changed if _is_read(name)]:
        raise ConfigError(
            *(
                _too_late(name, wanted[name]) if name in settings.variables else _from_earlier(name)
                for name in late
            )
        )
    for name in changed:
        _REPLACED.setdefault(name, os.environ.pop(name, None))
    os.environ.update(
        HASH_SEED
        | thread_variables(settings.threads)
        | {name: value for name, value in wanted.items() if value is not None}
    )
    use_own_inductor_cache()


def use_own_inductor_cache() -> None:
    """Set Inductor's cache to a folder that belongs to this user, unless the user sets one.

    Torch's own is /tmp/torchinductor_USER, whose name another user can take first, and fill with
    code. Torch chooses it as it is imported, compiled or not.
    """
    given = os.environ.get(CACHE, "")
    if given and not given.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return
    try:
        place = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "samewise"
            / "inductor"
        )
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not os.access(place, os.W_OK):
            raise PermissionError(f"others can write to {place}")
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        place = Path(tempfile.mkdtemp(prefix="samewise-inductor-"))
        atexit.register(_remove, place, os.getpid())
    os.environ[CACHE] = str(place)


def _remove(place: Path, made_by: int) -> None:
    if os.getpid() == made_by:  # not in a process that was forked from it
        shutil.rmtree(place, ignore_errors=True)


def thread_variables(threads: int) -> dict[str, str]:
    """Variables that make the libraries compute with this number of threads on any number of cores,
    and wait cheaply.
    """
    waiting = (
        {}
        if "OMP_WAIT_POLICY" in os.environ
        else {name: value for name, value in WAITING.items() if name not in os.environ}
    )
    return {**waiting, **ALWAYS, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _is_read(variable: str) -> bool:
    """Whether a library may have read the variable in this process already."""
    torch = sys.modules.get("torch")
    return torch is not None and (not variable.startswith("CUBLAS") or torch.cuda.is_initialized())


def _too_late(variable: str, value: str | None) -> Problem:
    when = "before CUDA is used" if variable.startswith("CUBLAS") else "before torch is imported"
    hint = (
        f"export {variable}={value} before Python starts; in a notebook: restart the kernel, "
        f"and begin with import os; os.environ['{variable}'] = '{value}'"
    )
    return Problem(
        f"reproducibility.variables.{variable}",
        f"must be set {when}, which has already happened in this process",
        value,
        hint=hint,
    )


def _from_earlier(variable: str) -> Problem:
    message = "was set by an earlier experiment in this process, and torch has read it"
    return Problem(
        variable,
        message,
        os.environ.get(variable),
        hint="use another process; in a notebook: restart the kernel",
    )
