"""Tables of what torch's profiler saw: operators by name, layer and function; kernels; messages."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import rpc
from torch.profiler import record_function

from samewise.runner.records.console import align
from samewise.runner.training.layers import watched_calls

Table = dict[str, dict[str, float]]
"""Figures of a step by name: some of `_FORMATS`."""
_FORMATS = {"calls": "{:.4g}", "ms": "{:.3f}", "device_ms": "{:.3f}", "memory_mb": "{:.2f}"}

_MOST = 12
"""The number of rows that are printed."""
_LAYER = "layer "
# Process groups on the CPU; NCCL's messages are kernels
_MESSAGES = ("gloo:", "mpi:", "ucc:")
# As in torch_tb_profiler/profiler/tensor_core.py, and the names of Hopper's and later kernels
_TENSOR_CORE = re.compile(r"[hs]884|[hsc]1688|16816|i8816|hmma|gmma|tensorop|xmma_|nvjet|conv1x1")


@contextmanager
def mark_layers(model: nn.Module) -> Generator[None]:
    """Have torch's profiler see the layers of a model, by name."""
    ranges = list[record_function]()

    def enter(name: str, *_: Any) -> None:
        ranges.append(record_function(_LAYER + (name or "model")))
        ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    with watched_calls(model, enter, leave):
        yield


@contextmanager
def timed_rpc() -> Generator[list[tuple[str, float]]]:
    """Yield the remote calls: function and callee, and milliseconds until the result was there."""
    calls = list[tuple[str, float]]()

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(to: Any, function: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            name = f"{getattr(function, '__qualname__', function)} on {getattr(to, 'name', to)}"

            def end(_: Any = None) -> None:
                calls.append((name, 1000 * (time.perf_counter() - start)))

            result = call(to, function, *args, **options)
            result.add_done_callback(end) if isinstance(result, torch.futures.Future) else end()
            return result

        return called

    # torch's profiler of Kineto does not see them
    with ExitStack() as stack:
        for name in ("rpc_sync", "rpc_async", "remote"):
            stack.enter_context(patch.object(rpc, name, timed(getattr(rpc, name))))
        yield calls


def _is_python(event: Any) -> bool:
    # Older torch has Python's functions in its trace only
    return getattr(event, "is_python_function", False)


def tables(
    events: Sequence[Any], calls: Iterable[tuple[str, float]], steps: int
) -> dict[str, Table]:
    """Return the figures of a profile, those that take most first.

    An operator's are without those of the operators that it calls. Those of a backward pass belong
    to the layer and the function of its forward pass.

    Args:
        events: The profile's `events()`.
        calls: Remote calls, and their milliseconds.
        steps: Number of steps, by which all figures are divided.
    """
    # Of the operators that share a number, autograd's node is the last one's
    forwards = {(e.thread, e.sequence_nr): e for e in events if not e.fwd_thread}
    result = {
        name: defaultdict[str, Any](Counter)
        for name in ("operators", "layers", "functions", "kernels", "communication", "calls")
    }

    def where(event: Any) -> tuple[str, str]:
        if event is None:
            return "-", "-"
        # Only what autograd runs in a backward pass has the forward pass's thread
        if event.fwd_thread:
            return where(forwards.get((event.fwd_thread, event.sequence_nr), event.cpu_parent))
        layer, function = where(event.cpu_parent)
        if event.name.startswith(_LAYER):
            return event.name.removeprefix(_LAYER), function
        is_own = _is_python(event) and not re.match("torch/|<|nn.Module", event.name)
        return layer, event.name if is_own else function

    for event in events:
        for kernel in event.kernels:
            table = "communication" if kernel.name.startswith("nccl") else "kernels"
            result[table][kernel.name].update(calls=1, device_ms=kernel.duration / 1000)
        if event.name.startswith(_MESSAGES):
            ms = event.time_range.elapsed_us() / 1000
            result["communication"][event.name].update(calls=1, ms=ms)
        if (
            _is_python(event)
            or event.is_user_annotation
            or event.device_type.name != "CPU"
            or event.name.startswith(("c10d::", "record_param_comms"))
        ):
            continue
        figures = {
            "calls": 1,
            "ms": event.self_cpu_time_total / 1000,
            "device_ms": sum(kernel.duration for kernel in event.kernels) / 1000,
            # Less what is freed in the meantime
            "memory_mb": (event.self_cpu_memory_usage + event.self_device_memory_usage) / 1e6,
        }
        layer, function = where(event)
        for table, name in (("operators", event.name), ("layers", layer), ("functions", function)):
            result[table][name].update(figures)
    for name, ms in calls:
        result["calls"][name].update(calls=1, ms=ms)
    return {
        table: {
            name: {key: value / steps for key, value in figures.items()}
            for name, figures in sorted(
                rows.items(), key=lambda x: (-x[1]["device_ms"], -x[1]["ms"])
            )
        }
        for table, rows in result.items()
    }


def _unit(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figure by which to compare rows: the time on the device, if there is any."""
    return "device_ms" if any(row.get("device_ms") for row in rows.values()) else "ms"


def sum_apart(measurement: Mapping[str, Table]) -> list[float]:
    """Return the milliseconds of computation and of communication in a process's step."""
    return [
        sum(row.get(_unit(measurement[table]), 0.0) for row in measurement[table].values())
        for table in ("operators", "communication")
    ]


def table_lines(measurement: Mapping[str, Table], by: str) -> Iterator[str]:
    """Yield the tables of a process's steps as text: operators, kernels, messages, calls."""
    for table in (by, "kernels", "communication", "calls"):
        rows = measurement[table]
        if not rows:
            continue
        yield f"{table} of a step, {min(len(rows), _MOST)} of {len(rows)}"
        unit = _unit(rows)
        total = sum(row.get(unit, 0.0) for row in rows.values()) or 1.0
        keys = [key for key in _FORMATS if any(row.get(key) for row in rows.values())]
        cells = [[*keys, "share", table]]
        cells += [
            [
                *(_FORMATS[key].format(row.get(key, 0.0)) for key in keys),
                f"{row.get(unit, 0.0) / total:.1%}",
                name + ", on Tensor Cores" * bool(table == "kernels" and _TENSOR_CORE.search(name)),
            ]
            for name, row in list(rows.items())[:_MOST]
        ]
        yield from align(cells, ">" * len(keys) + "><")
