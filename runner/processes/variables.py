"""Environment variables that torch and its libraries read when they are loaded.

They are set before torch is imported. Imports nothing heavy.
"""

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
"""Variables that a config may set: those that choose how numbers are computed.

Any other could run a stranger's program (PATH, LD_PRELOAD, OMP_TOOL_LIBRARIES) or write a file
(MKL_VERBOSE_OUTPUT_FILE).
"""

# The number of threads changes bits, so only the config may choose it: neither OpenMP and MKL by
# the load (OMP_DYNAMIC=true even hangs torch), nor a limit in the user's environment. OpenBLAS,
# which NumPy uses, never starts more threads than there are cores, so it gets one.
ALWAYS = {
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "OMP_THREAD_LIMIT": str(2**31 - 1),
    "OPENBLAS_NUM_THREADS": "1",
}
# Waiting threads leave the core to others, perhaps to those that they wait for. Where there are
# cores for all threads they spin a while first (libgomp counts 100 turns a microsecond). Waiting
# changes no bits, so the user's environment takes precedence.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""For ranks, jobs and other processes that this one starts.

The command starts with it (.package/samewise/__main__.py).
"""
CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Folder where Inductor keeps what it has compiled, and runs it from."""
_REPLACED: Final[dict[str, str | None]] = {}
"""Previous values of the variables that experiments have changed in this process."""


def prepare(settings: Any) -> None:
    """Set the environment variables that torch, MKL, oneDNN and cuBLAS read on start.

    Args:
        settings: The config's `reproducibility`.

    Raises:
        ConfigError: Torch is imported already, and a variable that it may have read would have to
            change, perhaps back from the value of an earlier experiment of this process.
    """
    # Without determinism there is no promise that another experiment's variables could break.
    target = (_REPLACED if settings.deterministic else {}) | {
        name: str(value) for name, value in settings.variables.items()
    }
    changed = [name for name, value in target.items() if os.environ.get(name) != value]
    ConfigError.raise_all(
        _too_late(name, target[name]) if name in settings.variables else _from_earlier(name)
        for name in changed
        if _is_read(name)
    )
    for name in changed:
        # The first value is the user's; later ones are those of experiments
        _REPLACED.setdefault(name, os.environ.pop(name, None))
    os.environ.update(
        HASH_SEED
        | thread_variables(settings.threads)
        | {name: value for name, value in target.items() if value is not None}
    )
    use_own_inductor_cache()


def use_own_inductor_cache() -> None:
    """Set Inductor's cache to a folder that belongs to this user, unless the user sets one."""
    configured = os.environ.get(CACHE, "")
    # Torch's default, set as torch is imported, is /tmp/torchinductor_USER: another user can create
    # it first and fill it with code.
    if configured and not configured.startswith(
        os.path.join(tempfile.gettempdir(), "torchinductor_")
    ):
        return
    try:
        folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "samewise"
            / "inductor"
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if (
            status.st_uid != os.geteuid()
            or status.st_mode & 0o022
            or not os.access(folder, os.W_OK)
        ):
            raise PermissionError(f"others can write to {folder}")
    # There is no home folder, or a read-only one.
    except (OSError, RuntimeError):
        folder = Path(tempfile.mkdtemp(prefix="samewise-inductor-"))
        atexit.register(_remove, folder, os.getpid())
    os.environ[CACHE] = str(folder)


def _remove(place: Path, creator: int) -> None:
    # A forked process runs the same exit functions.
    if os.getpid() == creator:
        shutil.rmtree(place, ignore_errors=True)


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables for this number of threads, with cheap waiting."""
    waiting = (
        {}
        if "OMP_WAIT_POLICY" in os.environ
        else {name: value for name, value in WAITING.items() if name not in os.environ}
    )
    return {**waiting, **ALWAYS, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _is_read(variable: str) -> bool:
    """Return whether a library may have read the variable in this process already."""
    torch = sys.modules.get("torch")
    # cuBLAS reads its variables when it is first used.
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
