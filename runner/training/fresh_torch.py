"""Trains in a process with other torch settings, such as a notebook: torch's settings are those of a fresh process during the run, and are restored afterwards.

A notebook may have changed torch's default dtype, its threads, its switches. Each of these is set to torch's own default first; the generators are
restored too, although every draw is keyed. What cannot be set is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from threadpoolctl import threadpool_limits

from samewise.runner.errors import ConfigError, Problem


@dataclass(frozen=True)
class _Switch:
    """One of torch's global settings."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    default: Any


@contextmanager
def fresh_torch_state() -> Generator[None]:
    """Within it, torch's settings are those of a fresh process; afterwards they are restored.

    The experiment's variables must be in the environment already, and its switches are set within. ConfigError if a block is open
    that would change bits and cannot be closed from here, such as `with torch.autocast(...)`.
    """
    was_imported = "torch" in sys.modules
    import torch

    from samewise.runner.data.streams import preserve_generators
    from samewise.runner.training.portable_operators import use_portable_operators

    switches = _switches()
    before = [switch.read() if was_imported else switch.default for switch in switches]
    flushes = (torch.full((), 1e-310, dtype=torch.float64, device="cpu") * 1).item() == 0
    if was_imported:
        _set(switches, [switch.default for switch in switches])
        torch.set_flush_denormal(False)
    try:
        if was_imported:
            _require_no_block()
        with preserve_generators(), torch.inference_mode(False), torch.enable_grad(), threadpool_limits(1, user_api="blas"):
            yield  # BLAS here means NumPy's: processes.variables.ALWAYS
    finally:
        use_portable_operators(wanted=False)
        _set(switches, before)
        torch.set_flush_denormal(flushes)


def _set(switches: list[_Switch], values: list[Any]) -> None:
    for switch, value in zip(switches, values, strict=True):
        if switch.read() != value:
            switch.write(value)


def _switches() -> list[_Switch]:
    """General settings before those of operators, which inherit a general one when it is set."""
    import torch

    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    threads = torch.get_num_threads()
    return [
        _Switch(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Switch(torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device), torch.device("cpu")),
        _Switch(torch.get_num_threads, torch.set_num_threads, threads),
        _Switch(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        _switch_of(deterministic, "fill_uninitialized_memory", True),
        _Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        *(_switch_of(cudnn, name, default) for name, default in (("enabled", True), ("benchmark", False), ("deterministic", False), ("allow_tf32", True))),
        *(_switch_of(operator, "fp32_precision", "none") for operator in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),
        *(_switch_of(operator, "fp32_precision", "tf32") for operator in (cudnn.conv, cudnn.rnn)),
        _Switch(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        _Switch(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        *(_Switch(getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp"), True) for kind in ("flash", "mem_efficient", "math", "cudnn")),
        *(_switch_of(cuda.matmul, f"allow_{kind}_reduced_precision_reduction", True) for kind in ("fp16", "bf16")),
    ]


def _switch_of(holder: Any, name: str, default: Any) -> _Switch:
    return _Switch(lambda: getattr(holder, name), lambda value: setattr(holder, name, value), default)


def _require_no_block() -> None:
    """Refuse torch contexts around the call whose effect cannot be undone here."""
    import torch

    found = [f"torch.autocast('{device}')" for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    found += ["torch.device(...)"] if torch.get_default_device().type != "cpu" else []
    if found:
        raise ConfigError(*(Problem(f"with {block}", "changes the bits of what runs within it", hint="call samewise outside of the block") for block in found))
