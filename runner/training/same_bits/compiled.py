"""Compiles the model by torch.compile for the training step.

Evaluations, averages and checkpoints use the original model.

Each form of the input (shapes, strides, dtypes) gets a graph of its own, and none is more general.
So a graph does not depend on earlier inputs, and a resumed run, which gets them in another order,
compiles the same code. A model that is not one graph, or becomes too many, is an error.
"""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.processes.variables import use_own_inductor_cache


@final
class Compiled(nn.Module):
    """Calls a compiled model, with a limited number of graphs; otherwise behaves as the model."""

    def __init__(self, model: nn.Module, options: dict[str, Any], *, most: int) -> None:
        super().__init__()
        self._network = model
        self._limits = {"recompile_limit": most, "fail_on_recompile_limit_hit": True}
        compiled: Any = torch.compile
        isolated = (
            {"isolate_recompiles": True}
            if "isolate_recompiles" in signature(compiled).parameters
            else {}
        )
        # Torch 2.11 would count graphs of another model of this class as this one's
        if not isolated:
            torch.compiler.reset()
        self._is_told = False
        # In a tuple, so that it is no submodule
        self._call = (compiled(model, fullgraph=True, dynamic=False, options=options, **isolated),)

    def forward(self, *inputs: Any, **further: Any) -> Any:
        from samewise.runner.torch_private import (
            FailOnRecompileLimitHit,
            InductorError,
            TorchDynamoException,
            dynamo_config,
        )

        if not self._is_told:
            self._is_told = True
            print(
                "compiling the model: the first step takes seconds or minutes longer",
                file=sys.stderr,
                flush=True,
            )
        try:
            with dynamo_config.patch(self._limits):
                return self._call[0](*inputs, **further)
        except FailOnRecompileLimitHit as error:
            raise ConfigError(
                Problem(
                    "compile.max_graphs",
                    f"the model's input has had more than {self._limits['recompile_limit']} forms "
                    "(shapes, dtypes), each of which is compiled separately",
                    self._limits["recompile_limit"],
                    hint="samples of one size (crops, padding to one length), "
                    "loader.drop_last=true, a higher compile.max_graphs, or compile=off",
                )
            ) from error
        except (TorchDynamoException, InductorError) as error:
            raise ConfigError(
                Problem(
                    "compile.mode",
                    f"torch.compile cannot compile the model as one graph: {_reason(error)}",
                    hint="compile=off",
                )
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A recipe may use attributes and methods of the model
            return getattr(super().__getattr__("_network"), name)


def compiler(
    settings: Any, device: torch.device, *, deterministic: bool
) -> Callable[[nn.Module], nn.Module]:
    """Return a function that compiles a model as configured; with mode=off it does nothing."""
    if settings.mode == "off":
        return lambda model: model
    # Here, since it imports the compiler, which takes seconds
    from samewise.runner.training.same_bits.partitioner import KeepsChanged

    keep_headers_apart()
    _draw_in_order()
    # Inductor warns about CUDA_HOME without a CUDA device
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # `cudagraph_or_error`: otherwise Inductor gives up CUDA graphs with only a log message
    options: dict[str, Any] = {
        "fallback_random": True,  # dropout draws the same numbers as without compiling
        "deterministic": deterministic,
        "custom_partitioner_fn": KeepsChanged(),
        "triton.cudagraphs": settings.cuda_graphs,
        "triton.cudagraph_or_error": settings.cuda_graphs,
        # Tuning measures times, by which each run may choose other code
        **(
            {"max_autotune": True, "coordinate_descent_tuning": not deterministic}
            if settings.mode == "max"
            else {}
        ),
        # More threads leave a pool of processes behind
        **({"compile_threads": 1} if device.type == "cpu" else {}),
    }
    return lambda model: Compiled(model, options, most=settings.max_graphs)


def keep_headers_apart() -> None:
    """Move Inductor's precompiled headers into its cache folder."""
    # Inductor ignores TORCHINDUCTOR_CACHE_DIR for them, and writes to /tmp
    use_own_inductor_cache()
    from samewise.runner.torch_private import inductor_codecache, inductor_runtime_utils

    inductor_runtime_utils.default_cache_dir = inductor_runtime_utils.cache_dir
    headers = Path(inductor_runtime_utils.cache_dir()) / "precompiled_headers"
    inductor_codecache._HEADER_DIR, inductor_codecache._HEADER_LOCK_DIR = (
        str(headers),
        str(headers / "locks"),
    )


def _draw_in_order() -> None:
    """Make dropout draw in the order of its input's values, whatever layout Inductor chose."""
    # Later versions of torch than 2.11 do so themselves
    from samewise.runner.torch_private import inductor_lowering

    if not hasattr(inductor_lowering, "constrain_to_fx_strides_if_fallback_random"):
        inductor_lowering.add_layout_constraint(
            torch.ops.aten.native_dropout.default, inductor_lowering.constrain_to_fx_strides
        )


def require_possible(
    cfg: Any, strategy: Any, *, device: torch.device, phases: Sequence[Any]
) -> None:
    """Raise a ConfigError for what cannot be combined with compiling."""
    mode, blocks = str(cfg.compile.mode), list(cfg.activation_checkpointing)
    compiles, has_graphs = mode != "off", cfg.compile.cuda_graphs
    graphs = max(cfg.replicas * cfg.accumulate, len(phases))
    rules: list[tuple[bool, str, object, str, str]] = [
        (
            compiles and not strategy.compiles,
            "compile.mode",
            mode,
            f"cannot be used with {type(strategy).__name__}, which calls the model in parts",
            "strategy=single, elastic or ddp; or compile=off",
        ),
        (
            compiles and bool(blocks),
            "activation_checkpointing",
            blocks,
            "cannot be used together with compile: Inductor itself decides which activations to "
            "keep",
            "compile=off, or no activation_checkpointing",
        ),
        (
            compiles and cfg.reproducibility.level == "portable",
            "compile.mode",
            mode,
            "compiled code uses its CPU's widest vectors, so other CPUs give different bits",
            "compile=off, or reproducibility=strict",
        ),
        (
            has_graphs and not compiles,
            "compile.cuda_graphs",
            True,
            "needs compiling, which is off",
            "compile=default",
        ),
        (
            has_graphs and device.type != "cuda",
            "compile.cuda_graphs",
            True,
            "needs a CUDA device",
            "device=cuda on a machine that has one, or false",
        ),
        (
            has_graphs and graphs > 1,
            "compile.cuda_graphs",
            True,
            "a replayed graph overwrites the previous one's gradients, and a step has "
            f"{graphs} of them",
            "replicas=1, accumulate=1 and a recipe with one phase; or false",
        ),
    ]
    ConfigError.raise_all(
        Problem(path, message, value, hint=hint)
        for is_broken, path, value, message, hint in rules
        if is_broken
    )


def facts(settings: Any, device: torch.device) -> dict[str, Any]:
    """Return what decides the bits of compiled code besides torch, by name."""
    if settings.mode == "off":
        return {}
    if device.type == "cuda":
        import triton

        return {"compile.triton": triton.__version__}
    from samewise.runner.torch_private import pick_vec_isa

    return {"compile.cxx": _cxx(), "compile.vectors": str(pick_vec_isa())}


def _cxx() -> str | None:
    """Return the C++ compiler and its version, as it reports them."""
    from samewise.runner.torch_private import InvalidCxxCompiler, get_cpp_compiler

    try:
        return subprocess.run(
            [get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True
        ).stdout.partition("\n")[0]
    except (InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        return None


def _reason(error: BaseException) -> str:
    """Return the message of Dynamo or Inductor, and the model's line that it concerns."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(error).rpartition("from user code:")[2])
    return first_line(error) + (f" ({lines[-1][0]}:{lines[-1][1]})" if lines else "")
