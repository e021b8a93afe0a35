"""CPU, memory and GPU use of the trainer, measured from the sender, in a journal of their own (`system.jsonl`)."""

from __future__ import annotations

import ctypes
import logging
import os
import time

import psutil

from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import journal

_LOG = logging.getLogger("samewise.tracking")
_EVERY_S = 10.0
_MEGABYTE = 1e6


class Sampler:
    """Measures every ten seconds. Steps count the samples, over restarts too.

    Args:
        folder: The run's folder.
        pid: The trainer's process.
    """

    def __init__(self, folder: RunFolder, pid: int) -> None:
        path = folder.path / "system.jsonl"
        self._step = 1 + max((entry.step for entry, _ in journal.read(path)), default=-1)
        self._journal = journal.Journal(path, resume_step=self._step)
        self._trainer = psutil.Process(pid)
        self._gpus = Gpus()
        self._next = time.monotonic()
        psutil.cpu_percent()
        self._trainer.cpu_percent()  # both count from here

    def sample(self) -> None:
        """Write down a sample, if it is time."""
        now = time.monotonic()
        if now < self._next + 1.0:  # the first one after a second, so that a short run has one too
            return
        self._next = now + _EVERY_S - 1.0
        try:
            values = self._measure()
        except psutil.Error:
            return  # the trainer is gone
        self._journal.log({f"system/{name}": value for name, value in values.items()}, self._step)
        self._step += 1

    def _measure(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        with self._trainer.oneshot():
            resident = self._trainer.memory_info().rss
            values = {"process_cpu_percentage": self._trainer.cpu_percent()}
        children = self._trainer.children(recursive=True)
        for child in children:
            if child.pid != os.getpid():
                try:
                    resident += child.memory_info().rss
                except psutil.Error:
                    continue
        values |= {
            "process_memory_megabytes": resident / _MEGABYTE,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / _MEGABYTE,
            "system_memory_usage_percentage": memory.percent,
        }
        return values | self._gpus.measure()


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """NVIDIA's management library, straight from the driver: no package needed, and no CUDA context made.

    Source: NVML API reference, nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo, nvmlDeviceGetPowerUsage (milliwatts).
    """

    def __init__(self) -> None:
        self._devices: list[tuple[int, ctypes.c_void_p]] = []
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            count = ctypes.c_uint()
            if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
        except (OSError, AttributeError):
            return
        for number in _visible(count.value):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)) == 0:
                self._devices.append((number, handle))

    def measure(self) -> dict[str, float]:
        """By device: use in per cent, memory in MB, power in W; what a device does not tell is left out."""
        values: dict[str, float] = {}
        for number, handle in self._devices:
            use, memory, power = _Utilization(), _Memory(), ctypes.c_uint()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
                values[f"gpu_{number}_utilization_percentage"] = float(use.gpu)
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                values[f"gpu_{number}_memory_usage_megabytes"] = memory.used / _MEGABYTE
                values[f"gpu_{number}_memory_usage_percentage"] = 100.0 * memory.used / memory.total
            if self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0:
                values[f"gpu_{number}_power_usage_watts"] = power.value / 1000.0
        return values


def _visible(count: int) -> list[int]:
    """The devices that the trainer may use, where CUDA_VISIBLE_DEVICES names them by number; else all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(count))
    numbers = [part.strip() for part in named.split(",") if part.strip()]
    if all(part.isdigit() for part in numbers):
        return [int(part) for part in numbers if int(part) < count]
    return list(range(count))
