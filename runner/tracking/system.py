"""Measures CPU, memory and GPU use of the trainer, in a separate journal (`system.jsonl`).

The sender does so, to leave the trainer alone.
"""

import contextlib
import logging
import os
import time
from typing import Any

import psutil
import pynvml

from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import journal

_LOG = logging.getLogger("samewise.tracking")
_EVERY_S = 10.0
_MEGABYTE = 1e6


class Sampler:
    """Takes a sample every ten seconds.

    The step is the sample's number, continued over restarts.
    """

    def __init__(self, folder: RunFolder, pid: int) -> None:
        self._step = 1 + max(
            (entry.step for entry, _ in journal.read_entries(folder.system)), default=-1
        )
        self._journal = journal.Journal(folder.system, resume_step=self._step)
        self._trainer = psutil.Process(pid)
        self._gpus = Gpus()
        self._next = time.monotonic()
        # Both count from their last call
        psutil.cpu_percent()
        self._trainer.cpu_percent()

    def sample(self) -> None:
        """Record a sample if it is time."""
        now = time.monotonic()
        # The first sample comes after a second, so that short runs have one
        if now < self._next + 1.0:
            return
        self._next = now + _EVERY_S - 1.0
        try:
            values = self._measure()
        except psutil.Error:
            # The trainer has ended
            return
        self._journal.log({f"system/{name}": value for name, value in values.items()}, self._step)
        self._step += 1

    def _measure(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        with self._trainer.oneshot():
            resident = self._trainer.memory_info().rss
            values = {"process_cpu_percentage": self._trainer.cpu_percent()}
        children = self._trainer.children(recursive=True)
        for child in children:
            # The sender is a child of the trainer, too
            if child.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    resident += child.memory_info().rss
        values |= {
            "process_memory_megabytes": resident / _MEGABYTE,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / _MEGABYTE,
            "system_memory_usage_percentage": memory.percent,
        }
        return values | self._gpus.measure()


class Gpus:
    """The NVIDIA devices, queried without a CUDA context; none without a driver."""

    def __init__(self) -> None:
        self._devices: dict[int, Any] = {}
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for name in visible_gpus():
                with contextlib.suppress(pynvml.NVMLError):
                    handle: Any = (
                        pynvml.nvmlDeviceGetHandleByIndex(int(name))
                        if name.isdigit()
                        else pynvml.nvmlDeviceGetHandleByUUID(name)
                    )
                    self._devices[pynvml.nvmlDeviceGetIndex(handle)] = handle

    def measure(self) -> dict[str, float]:
        """Return use in per cent, memory in MB and power in W of each device that reports them."""
        values: dict[str, float] = {}
        for number, handle in self._devices.items():
            with contextlib.suppress(pynvml.NVMLError):
                values[f"gpu_{number}_utilization_percentage"] = float(
                    pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                )
            with contextlib.suppress(pynvml.NVMLError):
                memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle)
                values[f"gpu_{number}_memory_usage_megabytes"] = memory.used / _MEGABYTE
                values[f"gpu_{number}_memory_usage_percentage"] = 100.0 * memory.used / memory.total
            with contextlib.suppress(pynvml.NVMLError):
                values[f"gpu_{number}_power_usage_watts"] = (
                    pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0
                )
        return values


def visible_gpus() -> list[str]:
    """Return the CUDA devices available to this process, by number or UUID.

    Empty without a driver.
    """
    # Without torch, whose import takes seconds
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        return [name.strip() for name in devices.split(",") if name.strip() not in ("", "-1")]
    try:
        pynvml.nvmlInit()
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
