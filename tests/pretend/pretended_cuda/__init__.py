"""A CUDA device that is not there: its tensors say `cuda:0` and keep their values on the CPU.

    with pretended() as device:
        with device.counting() as counts:
            train_step(run, batch)
    counts.waits, counts.lines("waits")

Inside, torch finds one CUDA device. What would fail on a real one for where a tensor lies fails here, and says at which line; what would start work, copy or
wait is counted. Values are the CPU's, so nothing is said of how a CUDA kernel rounds, nor of speed. It is Python alone: no compiler, no driver, no process
of its own, and torch is as it was afterwards.
"""

from pretended_cuda.counts import KINDS, Counts
from pretended_cuda.device import PretendedDevice, pretended
from pretended_cuda.tensor import DeviceError, PretendedTensor

__all__ = ["KINDS", "Counts", "DeviceError", "PretendedDevice", "PretendedTensor", "pretended"]
