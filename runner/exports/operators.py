"""Compares a runtime with the exported program operator by operator, and finds the first that
differs.

Numbers of every operator of the program, evenly spaced, are kept with the export: torch's own
kernels gave them, on the test vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from samewise.runner.exports.difference import difference

KEPT: Final = 256
"""Numbers of one operator that are kept, at most."""


@dataclass(frozen=True)
class Operator:
    """One operator of a program and a sample of its output.

    Args:
        name: As the exported program calls its result.
        kind: What it does, as the file calls it: `aten.conv2d.default`, `Conv`.
        module: The name of the module that it belongs to; empty for the model itself, or if
            unknown.
        numbers: Of its result: `sample_of`.
    """

    name: str
    kind: str
    module: str
    numbers: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}{f' in {self.module}' if self.module else ''})"


def sample_of(result: Tensor) -> Tensor:
    """Some numbers of a tensor, evenly spaced: [at most `KEPT`].

    Complex numbers are pairs of reals, as in ONNX.
    """
    flat = (torch.view_as_real(result) if result.is_complex() else result).detach().reshape(-1)
    return flat[
        torch.linspace(0, flat.numel() - 1, min(flat.numel(), KEPT), dtype=torch.float64).long()
    ].clone()


class _Listener(fx.Interpreter):
    """Runs a program operator by operator, and records each output before a later operator may
    change it in place.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.heard = list[Operator]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor) and result.numel():
            modules = [str(path) for path, _ in (n.meta.get("nn_module_stack") or {}).values()]
            self.heard.append(
                Operator(
                    n.name,
                    str(n.target),
                    own_name(modules[-1] if modules else ""),
                    sample_of(result),
                )
            )
        return result


def run_operators(program: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Operator]:
    """Each operator of a program, in torch's order, run on the CPU."""
    listener = _Listener(program)
    with torch.no_grad():
        listener.run(*(tensor.clone() for tensor in inputs))
    return listener.heard


def own_name(module: str) -> str:
    """The module's name in the model; exporters see it inside a function of tensors."""
    return module.removeprefix("model").removeprefix(".")


def first_difference(
    expected: Mapping[str, Tensor], found: Iterable[Operator], *, tolerance: float
) -> Operator | None:
    """The first operator whose output differs by more than the tolerance.

    Args:
        expected: Numbers by the name of the operator; others are passed over, and those that a
            format has in another form.
        found: In the order in which they are run.
        tolerance: The largest relative error that is accepted; 0: the same bits.
    """
    for one in found:
        wanted = expected.get(one.name)
        if wanted is None or (wanted.shape, wanted.dtype) != (one.numbers.shape, one.numbers.dtype):
            continue
        apart = difference({one.name: wanted}, {one.name: one.numbers})
        if apart and (apart.relative > tolerance or not tolerance):
            return one
    return None
