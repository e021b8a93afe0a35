"""The model as torch.compile makes it, for the training step. Evaluations, averages and checkpoints use the model as it is.

A graph is compiled for each form of the input (shapes, strides, dtypes) and for nothing more general, so it depends on that form alone and not on those that
came before: a resumed run, which meets them in another order, compiles the same code. What does not become one graph, or becomes too many, is an error.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.processes.variables import keep_compiled_code_apart


@final
class Compiled(nn.Module):
    """Calls a model compiled, in at most so many graphs, and is otherwise that model."""

    def __init__(self, model: nn.Module, options: dict[str, Any], *, most: int) -> None:
        super().__init__()
        self._network = model
        self._limits = {"recompile_limit": most, "fail_on_recompile_limit_hit": True}
        compiled: Any = torch.compile
        self._is_told = False
        self._call = (compiled(model, fullgraph=True, dynamic=False, options=options, isolate_recompiles=True),)  # in a tuple: it is no second part of this

    def forward(self, *inputs: Any, **further: Any) -> Any:
        from torch._dynamo import config, exc
        from torch._inductor.exc import InductorError

        if not self._is_told:
            self._is_told = True
            print("compiling the model: the first step waits for it, for seconds or minutes", file=sys.stderr, flush=True)
        try:
            with config.patch(self._limits):
                return self._call[0](*inputs, **further)
        except exc.FailOnRecompileLimitHit as error:
            message = f"the model's input has had more than {self._limits['recompile_limit']} forms (shapes, dtypes), each of which is compiled separately"
            hint = "samples of one size (crops, padding to one length), loader.drop_last=true, a higher compile.max_graphs, or compile=off"
            raise ConfigError(Problem("compile.max_graphs", message, self._limits["recompile_limit"], hint=hint)) from error
        except (exc.TorchDynamoException, InductorError) as error:
            raise ConfigError(Problem("compile.mode", f"torch.compile cannot compile the model as one graph: {_reason(error)}", hint="compile=off")) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_network"), name)


def compiler(settings: Any, device: torch.device, *, deterministic: bool) -> Callable[[nn.Module], nn.Module]:
    """What compiles a model for the training step as the settings say; with mode=off what gives it back."""
    if settings.mode == "off":
        return lambda model: model
    keep_headers_apart()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it tells of a CUDA_HOME where there is no CUDA device
    options: dict[str, Any] = {
        "fallback_random": True,  # dropout draws what it draws without compiling
        "deterministic": deterministic,
        "triton.cudagraphs": settings.cuda_graphs,
        "triton.cudagraph_or_error": settings.cuda_graphs,  # else Inductor leaves them out with a line in its log
        **({"max_autotune": True, "coordinate_descent_tuning": not deterministic} if settings.mode == "max" else {}),
        **({"compile_threads": 1} if device.type == "cpu" else {}),  # else a pool of processes stays
    }
    return lambda model: Compiled(model, options, most=settings.max_graphs)


def keep_headers_apart() -> None:
    """Have Inductor keep what it asks `default_cache_dir` for where the rest is: the headers that it compiles ahead stay in /tmp whatever the variable says."""
    keep_compiled_code_apart()
    from torch._inductor import codecache
    from torch._inductor.runtime import runtime_utils

    runtime: Any = runtime_utils
    runtime.default_cache_dir = runtime.cache_dir
    headers = Path(runtime.cache_dir()) / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")  # pyright: ignore[reportPrivateUsage, reportConstantRedefinition]


def require_possible(cfg: Any, strategy: Any, *, device: torch.device, phases: Sequence[Any]) -> None:
    """Raise a ConfigError with what compiling cannot go with."""
    settings, name = cfg.compile, type(strategy).__name__
    problems = list[Problem]()
    if settings.mode != "off":
        if not strategy.compiles:
            hint = "strategy=single, elastic or ddp; or compile=off"
            problems.append(Problem("compile.mode", f"cannot be used with {name}, which calls the model in parts", str(settings.mode), hint=hint))
        if cfg.activation_checkpointing:
            message = "cannot be used together with compile: Inductor itself decides which activations to keep"
            problems.append(
                Problem("activation_checkpointing", message, list(cfg.activation_checkpointing), hint="compile=off, or no activation_checkpointing")
            )
        if cfg.reproducibility.level == "portable":
            message = "compiled code uses its CPU's widest vectors, so other CPUs give different bits"
            problems.append(Problem("compile.mode", message, str(settings.mode), hint="compile=off, or reproducibility=strict"))
    if settings.cuda_graphs:
        micro_batches = cfg.replicas * cfg.accumulate
        if settings.mode == "off":
            problems.append(Problem("compile.cuda_graphs", "needs compiling, which is off", True, hint="compile=default"))
        if device.type != "cuda":
            problems.append(Problem("compile.cuda_graphs", "needs a CUDA device", True, hint="device=cuda on a machine that has one, or false"))
        if micro_batches > 1 or len(phases) > 1:
            message = f"a replayed graph writes over the last one's gradients, and a step has {max(micro_batches, len(phases))} of them"
            problems.append(Problem("compile.cuda_graphs", message, True, hint="replicas=1, accumulate=1 and a recipe with one phase; or false"))
    if problems:
        raise ConfigError(*problems)


def facts(settings: Any, device: torch.device) -> dict[str, Any]:
    """What decides the bits of compiled code beside torch, by name; empty where nothing is compiled."""
    if settings.mode == "off":
        return {}
    if device.type == "cuda":
        import triton

        return {"compile.triton": triton.__version__}
    from torch._inductor import cpu_vec_isa

    return {"compile.cxx": _cxx(), "compile.vectors": str(cpu_vec_isa.pick_vec_isa())}


def _cxx() -> str | None:
    """The C++ compiler and its version, in its own words."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (exc.InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        return None


def _reason(error: BaseException) -> str:
    """Dynamo's or Inductor's own words, and the line of the model that they are about."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(error).rpartition("from user code:")[2])
    return first_line(error) + (f" ({lines[-1][0]}:{lines[-1][1]})" if lines else "")
