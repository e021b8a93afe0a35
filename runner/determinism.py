"""What makes torch give the same bits: variables before it is imported, switches after.

`prepare` must run before torch is imported (libraries read their variables as they load) and imports nothing heavy itself.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from samewise.runner.errors import ConfigError, Problem

# OMP_DYNAMIC lets OpenMP choose the number of threads, which changes bits; true hangs torch altogether.
ALWAYS = {"OMP_DYNAMIC": "FALSE", "KMP_BLOCKTIME": "0"}


def prepare(settings: Any) -> None:
    """Set the environment variables that torch, MKL, oneDNN and cuBLAS read as they start.

    Args:
        settings: The config's `reproducibility`.

    Raises:
        ConfigError: torch is already imported and a variable it has read would have to change.
    """
    wanted = {**ALWAYS, "OMP_NUM_THREADS": str(settings.threads), "MKL_NUM_THREADS": str(settings.threads), **settings.variables}
    late = [name for name, value in settings.variables.items() if os.environ.get(name) != str(value)] if "torch" in sys.modules else []
    if late:
        raise ConfigError(
            *(
                Problem(f"reproducibility.variables.{name}", "must be set before torch is imported", str(settings.variables[name]), hint=f"export {name}=...")
                for name in late
            )
        )
    os.environ.update({name: str(value) for name, value in wanted.items()})


def apply(settings: Any) -> None:
    """Set torch's own switches, for this process."""
    import torch

    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] (a property of the module)
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.backends.cudnn.benchmark = settings.benchmark
    warm_up()


def warm_up() -> None:
    """Call MKL's vector functions once from one thread: the first concurrent call can be imprecise (pytorch issue 188792)."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.linspace(0.1, 1.0, 64)
    for function in (torch.sqrt, torch.exp, torch.log, torch.sin):
        assert math.isfinite(function(values).sum().item())
    torch.set_num_threads(threads)


NO_DETERMINISTIC = "does not have a deterministic implementation"


def refused_operator(error: BaseException) -> Problem | None:
    """The problem behind torch's refusal of an operator without a deterministic implementation, else None."""
    text = str(error)
    if NO_DETERMINISTIC not in text:
        return None
    operator = text.split(NO_DETERMINISTIC)[0].strip().split()[-1] if text.split(NO_DETERMINISTIC)[0].strip() else "an operator"
    return Problem(
        "reproducibility.level",
        f"the operator {operator} has no deterministic implementation on this device",
        "strict",
        "operators that give the same bits each time",
        "use another operator or device, or give up the promise with reproducibility=fast",
    )
