"""Muon for weights of any number of dimensions, with SGD for the other parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.optim.sgd import sgd

from samewise.runner.errors import ConfigError, first_few
from samewise.runner.torch_private import foreach_add, foreach_add_, foreach_copy_, foreach_mul_

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, chosen for the steepest slope at zero.

Singular values therefore end anywhere between about 0.5 and 1.5.
"""


@final
class Muon(Optimizer):
    """Momentum with orthogonalised updates (K. Jordan et al. 2024); SGD for `use_muon: false`.

    Source: https://kellerjordan.github.io/posts/muon/. A weight of more than two dimensions is
    treated as the matrix [first dimension, all others], as are convolutions in airbench94_muon.py
    (https://github.com/KellerJordan/cifar10-airbench). torch.optim.Muon takes matrices only, and no
    other parameters beside them.

    Args:
        params: Parameters, or groups of them with options of their own.
        lr: Learning rate; Muon does not rescale it by the weight's shape.
        momentum: Factor of the gradients' running sum, at least 0 and below 1.
        nesterov: Whether the update is the gradient plus `momentum` times the running sum.
        weight_decay: Muon multiplies each weight by `1 - lr * weight_decay`; SGD adds it to the
            gradient, as torch.optim.SGD does.
        ns_steps: Newton-Schulz iterations of Muon, in bfloat16.
        ns_coefficients: The iteration's three coefficients.
        eps: Added to a matrix's norm before it divides the matrix.
        normalize_weights: Whether each step of Muon first scales a weight, so that the rows of its
            first dimension have a root mean square norm of 1.
        use_muon: Whether a group's parameters are orthogonalised.

    Raises:
        ConfigError: A group that uses Muon has a parameter of fewer than two dimensions.
        ValueError: An option is out of its range.
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
        """Return the updates as orthogonalised matrices.

        On CUDA a graph computes them from the group's second step on, if the shapes stay the same.
        """
        options: dict[str, Any] = {
            "steps": group["ns_steps"],
            "coefficients": tuple(group["ns_coefficients"]),
            "eps": group["eps"],
        }
        # Graphs are part neither of the state nor of a copy of the optimizer.
        graphs: dict[int, _Graph] = self.__dict__.get("_graphs", {})
        if number in graphs and graphs[number].serves(updates, options):
            return graphs[number].replay(updates)
        matrices = [orthogonalise(update.reshape(len(update), -1), **options) for update in updates]
        if number not in graphs and _Graph.suits(updates):
            # The products above have initialised cuBLAS, which a capture cannot do.
            self._graphs = {**graphs, number: _Graph(updates, options)}
        return matrices

    def _sgd(self, trained: Sequence[Tensor], group: dict[str, Any]) -> None:
        momenta: list[Tensor | None] = [
            self.state[parameter].get("momentum_buffer") for parameter in trained
        ]
        options = {key: group[key] for key in ("weight_decay", "momentum", "lr", "nesterov")}
        sgd(
            list(trained),
            [cast("Tensor", parameter.grad) for parameter in trained],
            momenta,
            **options,
            dampening=0.0,
            maximize=False,
            # As `optim.build` chooses where nothing is fused: foreach on CUDA, else the loop
            foreach=trained[0].is_cuda,
        )
        if group["momentum"]:
            for parameter, momentum in zip(trained, momenta, strict=True):
                self.state[parameter]["momentum_buffer"] = momentum


class _Graph:
    """CUDA graph that orthogonalises several updates, with the same bits.

    The host launches it at once. Up to 15 products for each matrix would take the host 25 to 80
    microseconds each, longer than a device needs for small matrices.

    Args:
        updates: float[M, ...] each, on the current CUDA device; only their shapes are used.
        options: Arguments of `orthogonalise`.
    """

    LARGEST: ClassVar = 1 << 27
    """Most elements of all updates together; more keep a device busy without a graph.

    The graph keeps four bytes for each element, as the momentum does.
    """

    def __init__(self, updates: Sequence[Tensor], options: dict[str, Any]) -> None:
        self._options = options
        self._inputs = [
            torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in updates
        ]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile, as the one that pins batches does.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = [orthogonalise(x.view(len(x), -1), **options) for x in self._inputs]

    @classmethod
    def suits(cls, updates: Sequence[Tensor]) -> bool:
        """Return whether a graph suits the updates; it does not suit fsdp's shards (DTensors)."""
        if not all(x.is_cuda and not hasattr(x, "device_mesh") for x in updates):
            return False
        return sum(x.numel() for x in updates) <= cls.LARGEST and {
            x.device.index for x in updates
        } == {torch.cuda.current_device()}

    def serves(self, updates: Sequence[Tensor], options: dict[str, Any]) -> bool:
        """Return whether the graph has the shapes of these updates, and these options."""
        shapes = [x.shape for x in self._inputs]
        return self._options == options and shapes == [x.shape for x in updates]

    def replay(self, updates: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return bfloat16[M, N] each, which the next replay overwrites."""
        foreach_copy_(self._inputs, list(updates))
        self._graph.replay()
        return self._outputs


def orthogonalise(
    matrix: Tensor, *, steps: int, coefficients: Sequence[float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return bfloat16[M, N] with the singular vectors of `matrix` and singular values near 1.

    A quintic Newton-Schulz iteration, from the source of `Muon`.

    Args:
        matrix: float[M, N].
        steps: Number of iterations.
        coefficients: a, b, c: an iteration takes a singular value s to a s + b s^3 + c s^5.
        eps: Added to the matrix's norm.
    """
    a, b, c = coefficients
    result = matrix.bfloat16()
    # The largest singular value is then at most 1.
    result = result / (result.norm() + eps)
    is_tall = len(result) > result.shape[1]
    result = result.T if is_tall else result
    # Each product is one operator with its addition, as in torch.optim.Muon.
    for _ in range(steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if is_tall else result


def _check(group: dict[str, Any]) -> None:
    for name, least in (
        ("lr", 0.0),
        ("momentum", 0.0),
        ("weight_decay", 0.0),
        ("eps", 0.0),
        ("ns_steps", 1),
    ):
        # Not `<`, so that NaN is refused too
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
        f"{name} {list(parameter.shape)}"
        for name, parameter in zip(names, group["params"], strict=True)
        if parameter.ndim < 2
    ]
    ConfigError.raise_if(
        flat,
        "param_groups",
        f"Muon only trains weights of two dimensions or more, not {first_few(flat, 5)}",
        hint="put them in a group with use_muon: false, as param_groups=sgd_for_vectors does",
    )
