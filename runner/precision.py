"""Number formats: fp64, fp32, tf32, bf16, and fp16 with loss scaling."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem, nearest

DTYPES = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": None,
}

_LEAST_SCALE = 2.0**-24
"""A loss scale that has been halved until here has not made a gradient overflow."""


class Precision:
    """The number format of the forward pass, and the scaling of the backward pass.

    Weights and optimizer states stay float32, or are float64.

    Args:
        dtype: What autocast computes in: float32 (no autocast), bfloat16 or float16 (with a dynamic
            loss scale). With float64 the weights and batches are in it, without autocast.
        tf32: Let CUDA round float32 matrix products and convolutions to TensorFloat-32.
        initial_scale: float16's first loss scale.
        growth_interval: Steps without overflow after which the scale doubles.
    """

    def __init__(
        self,
        *,
        dtype: str = "float32",
        tf32: bool = False,
        initial_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        ConfigError.raise_if(
            dtype not in DTYPES,
            "precision.dtype",
            "unknown dtype",
            dtype,
            ", ".join(DTYPES),
            nearest(dtype, DTYPES),
        )
        ConfigError.raise_if(
            not 0 < initial_scale < math.inf,
            "precision.initial_scale",
            "is out of range",
            initial_scale,
            "a number greater than 0, usually a power of 2",
        )
        ConfigError.raise_if(
            growth_interval < 1, "precision.growth_interval", "must be at least 1", growth_interval
        )
        self._dtype = DTYPES[dtype]
        self.is_double = dtype == "float64"
        """Whether weights and batches are in float64."""
        self._tf32 = tf32
        self._initial_scale = initial_scale
        self._growth_interval = growth_interval
        self._device = "cpu"
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)

    def begin(self, device: torch.device) -> None:
        """Set torch's switches for `device`.

        Raises:
            ConfigError: a variable of the environment says otherwise, and the libraries go by that.
        """
        self._device = device.type
        if device.type == "cuda" and (
            problem := tf32_conflict(tf32=self._tf32, variables=os.environ)
        ):
            raise ConfigError(problem)
        _switch(tf32=self._tf32)
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=self._initial_scale,
            growth_interval=self._growth_interval,
            enabled=self._dtype is torch.float16,
        )
        # A process that computes no loss (a pipeline's first stage) has a scale from the beginning
        # too
        self._scaler.scale(torch.zeros((), device=device))

    def cautions(self) -> list[Problem]:
        """Warnings if the format has no benefit on the device."""
        if self._device == "cuda":
            return []
        problems = [
            Problem(
                "precision.tf32",
                "has no effect on the CPU, which computes in full single precision",
                True,
                hint="precision=fp32",
            )
        ]
        return [
            *(problems if self._tf32 else ()),
            *(
                [
                    Problem(
                        "precision.dtype",
                        "is meant for GPUs: most CPUs cannot compute in it, so they convert before and "
                        "after every operation",
                        "float16",
                        hint="precision=fp32",
                    )
                ]
                if self._dtype is torch.float16
                else ()
            ),
        ]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of every forward pass, in training and evaluation."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    def first_gradient(self, total: Tensor, nominal: float) -> Tensor:
        """Return the argument of `total.backward` for the scaled gradients of `total / nominal`.

        Dividing the loss itself would be one more operator in each pass.
        """
        if self._scaler.is_enabled():
            return self._scaler.scale(torch.ones_like(total)) / nominal
        return _share(
            nominal, total.dtype, total.device, total.shape
        ).clone()  # a parameter that is added to the loss keeps it as its gradient

    def unscale(self, optimizer: Optimizer) -> None:
        """Remove the loss scale from the gradients, before they are clipped or read."""
        self._scaler.unscale_(optimizer)

    def stepper(self, optimizer: Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
        """An object whose `step` steps the optimizer.

        With float16 it skips a step with overflowed gradients.
        """
        return partial(self._scaler.step, optimizer) if self._scaler.is_enabled() else step

    def may_overflow(self) -> bool:
        """Return whether a non-finite gradient may be due to the loss scale: the step is skipped.

        False once the scale has become too small.
        """
        return self._scaler.is_enabled() and self._scaler.get_scale() >= _LEAST_SCALE

    def update(self) -> None:
        """Adapt the loss scale after all of a step's optimizers have stepped."""
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)


@lru_cache(maxsize=16)
def _share(whole: float, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """One divided by `whole`, as dividing a tensor rounds it.

    Kept here, since it is no state of a run.
    """
    return torch.ones(shape, dtype=dtype, device=device) / whole


def tf32_conflict(*, tf32: bool, variables: Mapping[str, str]) -> Problem | None:
    """Return the problem if the environment overrides the config's TensorFloat-32; None if not."""
    override = variables.get("NVIDIA_TF32_OVERRIDE")
    if override in (None, "", str(int(tf32))):
        return None
    return Problem(
        "precision.tf32",
        f"NVIDIA_TF32_OVERRIDE={override} in the environment, or in reproducibility.variables, "
        "would override it in NVIDIA's libraries",
        tf32,
        "the variable unset",
        "unset NVIDIA_TF32_OVERRIDE, and choose precision=fp32 or precision=tf32",
    )


def _switch(*, tf32: bool) -> None:
    """Set each operator's own switch, in CUDA's libraries and oneDNN.

    An unset one inherits a more general one, which others may have set.
    """
    backends: Any = torch.backends
    # The older switches first, so that code that reads them gets the same answer
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32
    for operator in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operator.fp32_precision = "tf32" if tf32 else "ieee"
    for operator in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
        operator.fp32_precision = "ieee"
