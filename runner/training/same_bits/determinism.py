"""Sets torch's switches for determinism after it is imported, or those of a fresh process.

`processes.variables` sets what comes before. A notebook may have changed torch's default dtype, its
threads, its switches: during a run in its process each is set to torch's own default, and restored
afterwards; so are the generators, although every draw is keyed. What cannot be set is refused.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.torch_settings import flushes_denormals, set_switches, switches

if TYPE_CHECKING:
    import torch
    from torch import nn


def apply(settings: Any) -> None:
    """Set torch's switches for this process."""
    import torch

    from samewise.runner.training.same_bits.portable_operators import use_portable_operators

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


@contextmanager
def fresh_torch_state() -> Generator[None]:
    """Within it, torch's settings are those of a fresh process; afterwards they are restored.

    The experiment's variables must be in the environment already, and its switches are set within.
    ConfigError if a block is open that would change bits and cannot be closed from here, such as
    `with torch.autocast(...)`, or if MKL is in another mode for good.
    """
    was_imported = "torch" in sys.modules
    import torch

    from samewise.runner.data.streams import preserve_generators
    from samewise.runner.training.same_bits.portable_operators import use_portable_operators

    every = switches()
    before = [switch.read() if was_imported else switch.default for switch in every]
    flushes = flushes_denormals()
    if was_imported:
        set_switches(every, [switch.default for switch in every])
        torch.set_flush_denormal(False)
    try:
        if was_imported:
            _require_no_block()
            _require_reproducible_products()
        with (
            preserve_generators(),
            torch.inference_mode(False),
            torch.enable_grad(),
            threadpool_limits(1, user_api="blas"),
        ):
            yield  # BLAS here means NumPy's: processes.variables.ALWAYS
    finally:
        use_portable_operators(wanted=False)
        set_switches(every, before)
        torch.set_flush_denormal(flushes)


def _require_no_block() -> None:
    """Refuse torch contexts around the call whose effect cannot be undone here."""
    import torch

    found = [
        f"torch.autocast('{device}')"
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    found += ["torch.device(...)"] if torch.get_default_device().type != "cpu" else []
    if found:
        raise ConfigError(
            *(
                Problem(
                    f"with {block}",
                    "changes the bits of what runs within it",
                    hint="call samewise outside of the block",
                )
                for block in found
            )
        )


def _require_reproducible_products() -> None:
    """Refuse MKL in its default mode, which it keeps from its first product on: that was before
    `import samewise`, which sets MKL_CBWR.
    """
    if os.environ.get("MKL_CBWR") != "OFF" and "CNR:OFF" in _mkl_report():
        message = (
            "came too late for MKL: torch had multiplied matrices before samewise was imported"
        )
        hint = (
            "import samewise first; in a notebook: restart the kernel, and import it in the "
            "first cell"
        )
        raise ConfigError(Problem("MKL_CBWR", message, os.environ.get("MKL_CBWR"), hint=hint))


@cache
def _mkl_report() -> str:
    """What MKL says about a product, with its mode; empty without MKL."""
    import torch

    mkl = torch.backends.mkl
    if not mkl.is_available():
        return ""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "product"
        os.environ["MKL_VERBOSE_OUTPUT_FILE"] = str(file)
        with mkl.verbose(mkl.VERBOSE_ON):
            torch.ones(2, 2).mm(torch.ones(2, 2))
        del os.environ["MKL_VERBOSE_OUTPUT_FILE"]
        # Elsewhere if MKL had begun to write before
        return file.read_text() if file.exists() else ""
