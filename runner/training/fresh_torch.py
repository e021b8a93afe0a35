"""Trains in a process with other torch settings, such as a notebook: torch's settings are those of
a fresh process during the run, and are restored afterwards.

A notebook may have changed torch's default dtype, its threads, its switches. Each of these is set
to torch's own default first; the generators are restored too, although every draw is keyed. What
cannot be set is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from threadpoolctl import threadpool_limits

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.torch_settings import flushes_denormals, set_switches, switches


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
    from samewise.runner.training.portable_operators import use_portable_operators

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
