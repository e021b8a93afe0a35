"""Sets torch's switches for determinism, after `processes.variables` has set the environment.

A notebook may have changed torch's default dtype, its threads and its switches. During a run in its
process each is set to torch's own default, and restored afterwards; so are the generators, although
every draw is keyed. A state that cannot be changed is an error.
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

    # In this mode MKL gives the same results on every CPU, but torch's other operators do not
    use_portable_operators(enabled=settings.variables.get("MKL_CBWR") == "COMPATIBLE")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] (a property of the module)
    torch.autograd.set_detect_anomaly(settings.detect_anomaly)
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.backends.cudnn.benchmark = settings.benchmark
    warm_up()


def warm_up() -> None:
    """Call MKL's vector functions once from one thread."""
    # The first concurrent call can be imprecise: github.com/pytorch/pytorch/issues/188792
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.linspace(0.1, 1.0, 64)
    for function in (torch.sqrt, torch.exp, torch.log, torch.sin):
        assert math.isfinite(function(values).sum().item())
    torch.set_num_threads(threads)


def require_deterministic(model: nn.Module, device: torch.device, settings: Any) -> None:
    """Raise a ConfigError for cuDNN's recurrent layers where they do not repeat to the bit.

    Torch itself does not report them.
    """
    import torch
    from torch import nn

    # ROCm, which torch also calls "cuda", has no cuDNN
    has_cudnn = torch.version.cuda is not None and torch.backends.cudnn.enabled
    is_affected = settings.deterministic and device.type == "cuda" and has_cudnn
    why = refused_recurrence(os.environ) if is_affected else None
    if why is None:
        return
    problem, expected, hint = why
    ConfigError.raise_all(
        Problem(
            f"model.{name}".rstrip("."),
            f"cuDNN's {type(module).__name__} {problem}",
            expected=expected,
            hint=hint,
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase)
    )


def memory_ran_short(device: torch.device) -> Problem | None:
    """Warn if the device's memory was insufficient for a moment, although the run continued."""
    import torch

    # Without memory for the workspace of one algorithm, cuDNN takes another, which adds in another
    # order, and torch remembers the choice. No other sign shows that the bits may differ.
    counts = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    short = counts.get("num_alloc_retries", 0) + counts.get("num_ooms", 0)
    if not short:
        return None
    return Problem(
        "device",
        f"the device ran short of memory {short} times, and cuDNN may have chosen other "
        "algorithms: another run's bits may differ",
        hint="compare with `samewise verify`; batch_size, precision=bf16, "
        "activation_checkpointing or accumulate need less",
    )


def refused_recurrence(variables: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Explain why cuDNN's RNN, LSTM and GRU do not repeat: reason, expectation, hint; else None."""
    # They call cuBLAS on several streams. By default it takes whichever buffer of two sizes is
    # free, and the kernel depends on the size. With buffers of one size they repeat (release notes
    # of cuDNN 8; docs.pytorch.org, "cuDNN RNN determinism").
    sizes = variables.get("CUBLAS_WORKSPACE_CONFIG", "")
    if re.fullmatch(r":[0-9]+:[0-9]+", sizes):
        return None
    buffers = (
        f"CUBLAS_WORKSPACE_CONFIG={sizes}, buffers of several sizes"
        if re.fullmatch(r"(:[0-9]+:[0-9]+)+", sizes)
        else "buffers of cuBLAS's own choice"
    )
    return (
        f"does not repeat to the bit with {buffers}",
        "buffers of one size: CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8",
        "set reproducibility.variables.CUBLAS_WORKSPACE_CONFIG=':4096:8', as "
        "reproducibility=strict does; or device=cpu, or reproducibility=fast",
    )


@contextmanager
def fresh_torch_state() -> Generator[None]:
    """Give torch the settings of a fresh process, for a block.

    The experiment's variables must be in the environment already.

    Raises:
        ConfigError: A block around the call changes bits, such as `with torch.autocast(...)`, or
            MKL is in another mode, which it keeps.
    """
    was_imported = "torch" in sys.modules
    import torch

    from samewise.runner.data.streams import preserve_generators
    from samewise.runner.training.same_bits.portable_operators import use_portable_operators

    every = switches()
    # A torch that was imported just now has its own defaults
    before = [switch.read() if was_imported else switch.default for switch in every]
    flushes = flushes_denormals()
    if was_imported:
        set_switches(every, [switch.default for switch in every])
        torch.set_flush_denormal(False)
    try:
        if was_imported:
            _require_no_block()
            # MKL keeps the mode of its first product
            ConfigError.raise_if(
                os.environ.get("MKL_CBWR") != "OFF" and "CNR:OFF" in _mkl_report(),
                "MKL_CBWR",
                "is set too late for MKL: torch multiplied matrices before samewise was imported",
                os.environ.get("MKL_CBWR"),
                hint="import samewise first; in a notebook: restart the kernel, and import it in "
                "the first cell",
            )
        with (
            preserve_generators(),
            torch.inference_mode(False),
            torch.enable_grad(),
            threadpool_limits(1, user_api="blas"),
        ):
            # The limit is for NumPy's BLAS; `processes.variables.ALWAYS` sets that of torch's
            yield
    finally:
        use_portable_operators(enabled=False)
        set_switches(every, before)
        torch.set_flush_denormal(flushes)


def _require_no_block() -> None:
    """Raise a ConfigError for blocks around the call that cannot be undone here."""
    import torch

    blocks = {
        "torch.autocast('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.autocast('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.device(...)": torch.get_default_device().type != "cpu",
    }
    ConfigError.raise_all(
        Problem(
            f"with {block}",
            "changes the bits of what runs within it",
            hint="call samewise outside of the block",
        )
        for block, is_around in blocks.items()
        if is_around
    )


@cache
def _mkl_report() -> str:
    """Return MKL's report of a product, which names its mode; empty without MKL."""
    import torch

    mkl = torch.backends.mkl
    if not mkl.is_available():
        return ""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "product"
        # Without it MKL reports to the terminal
        os.environ["MKL_VERBOSE_OUTPUT_FILE"] = str(file)
        with mkl.verbose(mkl.VERBOSE_ON):
            torch.ones(2, 2).mm(torch.ones(2, 2))
        del os.environ["MKL_VERBOSE_OUTPUT_FILE"]
        # MKL opens its file once, so an earlier report has another place
        return file.read_text() if file.exists() else ""
