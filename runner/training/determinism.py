"""Sets torch's switches for determinism after it is imported.

`processes.variables` sets what comes before.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samewise.runner.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch
    from torch import nn


def apply(settings: Any) -> None:
    """Set torch's switches for this process."""
    import torch

    from samewise.runner.training.portable_operators import use_portable_operators

    # Request the same results on every CPU from MKL
    use_portable_operators(wanted=settings.variables.get("MKL_CBWR") == "COMPATIBLE")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] (a property of the module)
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.backends.cudnn.benchmark = settings.benchmark
    warm_up()


def warm_up() -> None:
    """Call MKL's vector functions once from one thread: the first concurrent call can be imprecise
    (pytorch issue 188792).
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.linspace(0.1, 1.0, 64)
    for function in (torch.sqrt, torch.exp, torch.log, torch.sin):
        assert math.isfinite(function(values).sum().item())
    torch.set_num_threads(threads)


def require_deterministic(model: nn.Module, device: torch.device, settings: Any) -> None:
    """Raise a ConfigError for layers that are not deterministic although torch does not report it:
    cuDNN's recurrent ones.
    """
    import torch
    from torch import nn

    # ROCm, which torch calls "cuda" too, has none
    has_cudnn = torch.version.cuda is not None and torch.backends.cudnn.enabled
    if not settings.deterministic or device.type != "cuda" or not has_cudnn:
        return
    why = refused_recurrence(os.environ)
    if why is None:
        return
    problem, expected, hint = why
    layers = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase)
    ]
    if layers:
        raise ConfigError(
            *(
                Problem(
                    f"model.{name}".rstrip("."),
                    f"cuDNN's {kind} {problem}",
                    expected=expected,
                    hint=hint,
                )
                for name, kind in layers
            )
        )


def memory_ran_short(device: torch.device) -> Problem | None:
    """A warning if the device's memory was briefly insufficient although the run continued.

    Otherwise None.

    Without memory for the workspace of one algorithm, cuDNN takes another, which adds in another
    order, and torch remembers the choice: the bits may not be those of a run with more memory, and
    nothing else says so.
    """
    import torch

    counts = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    short = counts.get("num_alloc_retries", 0) + counts.get("num_ooms", 0)
    if not short:
        return None
    message = (
        f"the device ran short of memory {short} times, and cuDNN may have chosen other "
        "algorithms: another run's bits may differ"
    )
    return Problem(
        "device",
        message,
        hint="compare with `samewise verify`; batch_size, precision=bf16, "
        "activation_checkpointing or accumulate need less",
    )


def refused_recurrence(variables: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Why cuDNN's RNN, LSTM and GRU are not deterministic here: reason, expectation, hint.

    None if they are.

    They call cuBLAS on several streams, which by default takes buffers of two sizes, whichever is
    free, and with the size the kernel changes. With one size they repeat (release notes of cuDNN 8;
    docs.pytorch.org, "cuDNN RNN determinism").
    """
    sizes = variables.get("CUBLAS_WORKSPACE_CONFIG", "")
    if re.fullmatch(r":[0-9]+:[0-9]+", sizes):
        return None
    found = (
        f"CUBLAS_WORKSPACE_CONFIG={sizes}, buffers of several sizes"
        if re.fullmatch(r"(:[0-9]+:[0-9]+)+", sizes)
        else "buffers of cuBLAS's own choice"
    )
    hint = (
        "set reproducibility.variables.CUBLAS_WORKSPACE_CONFIG=':4096:8', as "
        "reproducibility=strict does; or device=cpu, or reproducibility=fast"
    )
    return (
        f"does not repeat to the bit with {found}",
        "buffers of one size: CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8",
        hint,
    )
