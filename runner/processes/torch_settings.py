"""Torch's global settings: their values in a fresh process, and code that must not change them."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Switch:
    """One of torch's global settings."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    default: Any
    name: str
    """Name in messages: torch's own or a description."""


@contextmanager
def unchanged_torch_settings() -> Generator[list[str]]:
    """Import other code within this context; torch's settings are the same afterwards.

    Those of a fresh process, if torch was not imported before. Otherwise they would depend on which
    process imports the code, and whether it does so before samewise sets them.

    Yields:
        Names of the settings that the code changed, complete at the end.
    """
    values = [switch.read() for switch in _all_switches()] if "torch" in sys.modules else []
    changed = list[str]()
    try:
        yield changed
    finally:
        if "torch" in sys.modules:
            all_switches = _all_switches()
            changed += set_switches(all_switches, values or [x.default for x in all_switches])


def _all_switches() -> list[Switch]:
    import torch

    return [
        *switches(),
        Switch(torch.is_grad_enabled, torch.set_grad_enabled, True, "gradients"),
        Switch(flushes_denormals, torch.set_flush_denormal, False, "denormals"),
    ]


def flushes_denormals() -> bool:
    """Return whether this thread computes with 0 in place of the smallest numbers."""
    import torch

    # torch has a setter for this, but no getter
    return (torch.full((), 1e-310, dtype=torch.float64, device="cpu") * 1).item() == 0


def set_switches(settings: list[Switch], values: list[Any]) -> list[str]:
    """Set the switches that have other values, and return their names."""
    changed = list[str]()
    for switch, value in zip(settings, values, strict=True):
        if switch.read() != value:
            switch.write(value)
            changed.append(switch.name)
    return changed


def switches() -> list[Switch]:
    """List the settings, a general one before those of operators, which inherit it when set."""
    import torch

    from samewise.runner.torch_private import get_nnpack_enabled

    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    threads = torch.get_num_threads()
    return [
        Switch(
            torch.get_default_dtype, torch.set_default_dtype, torch.float32, "the default dtype"
        ),
        Switch(
            torch.get_default_device,
            # Any device, even the CPU, makes torch intercept each call; None does not
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
            torch.device("cpu"),
            "the default device",
        ),
        Switch(torch.get_num_threads, torch.set_num_threads, threads, "threads"),
        Switch(
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
            0,
            "deterministic algorithms",
        ),
        _switch_of(deterministic, "fill_uninitialized_memory", True),
        Switch(
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "highest",
            "float32_matmul_precision",
        ),
        *(
            _switch_of(cudnn, name, default)
            for name, default in (
                ("enabled", True),
                ("benchmark", False),
                ("deterministic", False),
                ("allow_tf32", True),
            )
        ),
        *(
            _switch_of(operator, "fp32_precision", "none")
            for operator in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
        ),
        *(_switch_of(operator, "fp32_precision", "tf32") for operator in (cudnn.conv, cudnn.rnn)),
        Switch(lambda: mkldnn.enabled, lambda on: setattr(mkldnn, "enabled", on), True, "oneDNN"),
        Switch(get_nnpack_enabled, backends.nnpack.set_flags, True, "NNPACK"),
        *(
            Switch(
                getattr(cuda, f"{kind}_sdp_enabled"),
                getattr(cuda, f"enable_{kind}_sdp"),
                True,
                f"{kind}_sdp",
            )
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        ),
        *(
            _switch_of(cuda.matmul, f"allow_{kind}_reduced_precision_reduction", True)
            for kind in ("fp16", "bf16")
        ),
    ]


def _switch_of(holder: Any, name: str, default: Any) -> Switch:
    return Switch(
        lambda: getattr(holder, name), lambda value: setattr(holder, name, value), default, name
    )
