"""Log the speed of training."""

import time
from collections.abc import Mapping
from typing import final

import torch

from samewise.runner.interfaces import Callback, Outcome, RunView


@final
class Throughput(Callback):
    """Logs the speed of training: means over the steps since the last entry.

    The metrics are `speed/samples_per_s`, `speed/step_ms` (milliseconds) and, on CUDA,
    `speed/gpu_memory_mib`, the peak in MiB. For shards in an object store,
    `speed/batches_read_ahead` counts the batches of a replica that are read before their turn.

    Args:
        every_steps: Steps between two entries.
    """

    def __init__(self, *, every_steps: int = 20) -> None:
        self._every = max(every_steps, 1)
        self._start = 0.0
        self._steps = self._samples = 0

    def on_start(self, run: RunView) -> None:
        self._start, self._steps, self._samples = time.perf_counter(), 0, 0

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        self._steps += 1
        self._samples += outcome.samples
        if outcome.step % self._every:
            return
        now = time.perf_counter()
        seconds = now - self._start
        speeds = {
            "speed/samples_per_s": self._samples / seconds,
            "speed/step_ms": 1000 * seconds / self._steps,
        }
        self._start, self._steps, self._samples = now, 0, 0
        if run.read_ahead is not None:
            speeds["speed/batches_read_ahead"] = run.read_ahead
        if run.device == "cuda":
            speeds["speed/gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        run.log(speeds)

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        # The time of an evaluation does not count as training
        self._start, self._steps, self._samples = time.perf_counter(), 0, 0
