"""Muon for weights of any number of dimensions, with SGD for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.optim.sgd import sgd

from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.torch_private import foreach_add, foreach_add_, foreach_copy_, foreach_mul_

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration: chosen for the steepest slope at zero, at the price of singular
values that end anywhere between about 0.5 and 1.5."""


@final
class Muon(Optimizer):
    """Momentum with orthogonalised updates (K. Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/); plain SGD for groups with `use_muon: false`.

    A weight of more than two dimensions is taken as the matrix [first dimension, all others], as a
    convolution's is in airbench94_muon.py (https://github.com/KellerJordan/cifar10-airbench).
    torch.optim.Muon takes only matrices, and no other parameters with them.

    Args:
        params: Parameters or groups of them, the latter with options of their own.
        lr: The learning rate. Muon's is not rescaled by the weight's shape.
        momentum: Of the gradients' running sum, at least 0 and below 1.
        nesterov: Look ahead: the gradient plus `momentum` times the running sum is the update.
        weight_decay: With Muon decoupled, each weight times `1 - lr * weight_decay`; with SGD added
            to the gradient, as torch.optim.SGD.
        ns_steps: Newton-Schulz iterations of Muon, in bfloat16.
        ns_coefficients: Their three coefficients.
        eps: Added to a matrix's norm before it divides it.
        normalize_weights: Before each step of Muon, scale a weight so that its first dimension's
            rows have a root mean square norm of 1.
        use_muon: Whether a group's parameters are orthogonalised.

    Raises:
        ConfigError: a parameter of fewer than two dimensions is in a group that uses Muon.
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = 1e-7,
        normalize_weights: bool = False,
        use_muon: bool = True,
    ) -> None:
        options = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "params", "__class__")
        }
        super().__init__(params, options)
        for group in self.param_groups:
            _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride] (as torch's own)
        """Take one step. Parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained and group["use_muon"]:
                self._muon(trained, group, number)
            elif trained:
                self._sgd(trained, group)
        return loss

    def _muon(self, trained: Sequence[Tensor], group: dict[str, Any], number: int) -> None:
        gradients = [cast("Tensor", weight.grad) for weight in trained]
        for weight, gradient in zip(trained, gradients, strict=True):
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(gradient)
        updates = momenta = [self.state[weight]["momentum_buffer"] for weight in trained]
        foreach_mul_(momenta, group["momentum"])
        foreach_add_(momenta, gradients)
        if group["nesterov"]:
            updates = foreach_add(gradients, momenta, alpha=group["momentum"])
        for weight, matrix in zip(
            trained, self._orthogonalised(updates, group, number), strict=True
        ):
            if group["normalize_weights"]:
                weight.mul_(len(weight) ** 0.5 / weight.norm())
            if group["weight_decay"]:
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.add_(matrix.view(weight.shape), alpha=-group["lr"])

    def _orthogonalised(
        self, updates: Sequence[Tensor], group: dict[str, Any], number: int
    ) -> Sequence[Tensor]:
        """The updates as orthogonalised matrices: on CUDA from the group's second step on by a
        graph, if these are the shapes it was made for.
        """
        options: dict[str, Any] = {
            "steps": group["ns_steps"],
            "coefficients": tuple(group["ns_coefficients"]),
            "eps": group["eps"],
        }
        # No part of the state, nor of a copy of the optimizer
        graphs: dict[int, _Graph] = self.__dict__.get("_graphs", {})
        if number in graphs and graphs[number].serves(updates, options):
            return graphs[number].replay(updates)
        made = [orthogonalise(update.reshape(len(update), -1), **options) for update in updates]
        if number not in graphs and _Graph.suits(updates):
            # CuBLAS is ready now, as it has to be
            self._graphs = {
                **graphs,
                number: _Graph(updates, options),
            }
        return made

    def _sgd(self, trained: Sequence[Tensor], group: dict[str, Any]) -> None:
        momenta: list[Tensor | None] = [
            self.state[parameter].get("momentum_buffer") for parameter in trained
        ]
        options = {key: group[key] for key in ("weight_decay", "momentum", "lr", "nesterov")}
        gradients = [cast("Tensor", parameter.grad) for parameter in trained]
        sgd(
            list(trained),
            gradients,
            momenta,
            **options,
            dampening=0.0,
            maximize=False,
            foreach=trained[0].is_cuda,
        )
        if group["momentum"]:
            for parameter, momentum in zip(trained, momenta, strict=True):
                self.state[parameter]["momentum_buffer"] = momentum


class _Graph:
    """`orthogonalise` of several updates as a CUDA graph, which has the same bits.

    The host launches it at once. Each of up to 15 products for a matrix would take it 25 to 80
    microseconds, longer than a device needs for small matrices.

    Args:
        updates: float[M, ...] each, on the current CUDA device: their shapes.
        options: Of `orthogonalise`.
    """

    LARGEST: ClassVar = 1 << 27
    """Elements of all updates together: the graph keeps four bytes for each, as much as their
    momentum. More of them keep a device busy without a graph."""

    def __init__(self, updates: Sequence[Tensor], options: dict[str, Any]) -> None:
        self._options = options
        self._given = [
            torch.empty(one.shape, dtype=torch.bfloat16, device=one.device) for one in updates
        ]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph, capture_error_mode="thread_local"
        ):  # other threads may use CUDA, as the one that pins batches
            self._made = [orthogonalise(one.view(len(one), -1), **options) for one in self._given]

    @classmethod
    def suits(cls, updates: Sequence[Tensor]) -> bool:
        """Whether a graph can be made of such updates; of fsdp's shards (DTensors) it cannot."""
        if not all(one.is_cuda and not hasattr(one, "device_mesh") for one in updates):
            return False
        return sum(one.numel() for one in updates) <= cls.LARGEST and {
            one.device.index for one in updates
        } == {torch.cuda.current_device()}

    def serves(self, updates: Sequence[Tensor], options: dict[str, Any]) -> bool:
        """Whether the graph was made of the shapes of these updates, and with these options."""
        return self._options == options and [one.shape for one in self._given] == [
            one.shape for one in updates
        ]

    def replay(self, updates: Sequence[Tensor]) -> Sequence[Tensor]:
        """bfloat16[M, N] each, which the next replay overwrites."""
        foreach_copy_(self._given, list(updates))
        self._graph.replay()
        return self._made


def orthogonalise(
    matrix: Tensor, *, steps: int, coefficients: Sequence[float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """bfloat16[M, N]: a matrix with the singular vectors of `matrix`, and singular values near 1,
    by a quintic Newton-Schulz iteration (the source above).

    Each of an iteration's three products is one operator with what is added to it, as in
    torch.optim.Muon.

    Args:
        matrix: float[M, N].
        steps: Iterations.
        coefficients: a, b, c: each iteration takes a singular value s to a s + b s^3 + c s^5.
        eps: Added to the matrix's norm.
    """
    a, b, c = coefficients
    made = matrix.bfloat16()
    made = made / (made.norm() + eps)  # the largest singular value is then at most 1
    tall = len(made) > made.shape[1]
    made = made.T if tall else made
    for _ in range(steps):
        gram = made @ made.T
        made = torch.addmm(made, torch.addmm(gram, gram, gram, beta=b, alpha=c), made, beta=a)
    return made.T if tall else made


def _check(group: dict[str, Any]) -> None:
    for name, least in (
        ("lr", 0.0),
        ("momentum", 0.0),
        ("weight_decay", 0.0),
        ("eps", 0.0),
        ("ns_steps", 1),
    ):
        if not group[name] >= least:
            raise ValueError(f"{name}: must be at least {least:g}")
    if group["momentum"] >= 1.0 or (group["nesterov"] and not group["momentum"]):
        raise ValueError("momentum: must be below 1, and greater than 0 with nesterov")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError("ns_coefficients: must be three numbers")
    if not group["use_muon"]:
        return
    names = group.get("param_names") or [
        f"parameter {number}" for number in range(len(group["params"]))
    ]
    flat = [
        f"{name} {list(one.shape)}"
        for name, one in zip(names, group["params"], strict=True)
        if one.ndim < 2
    ]
    if flat:
        hint = "put them in a group with use_muon: false, as param_groups=sgd_for_vectors does"
        raise ConfigError(
            Problem(
                "param_groups",
                f"Muon only trains weights of two dimensions or more, not {first_few(flat, 5)}",
                hint=hint,
            )
        )
