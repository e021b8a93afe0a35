"""What a format of an export can do, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, fx

from samewise.runner.exports.call import Call
from samewise.runner.exports.operators import Operator

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]


class Format(ABC):
    """One format: a file of an export's folder."""

    name: ClassVar[str]
    file: ClassVar[str]
    runtime: ClassVar[str]
    """What gives results from it, in words."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages to write it."""
    runs_with: ClassVar[tuple[str, ...]] = ()
    """Packages to run it."""
    is_exact: ClassVar[bool] = True
    """Whether it should give what the model does; else what it loses is measured, and `verify` compares it with what it gave when it was written."""
    install: ClassVar[str] = "pip install 'samewise[export]'"
    """What brings them."""

    def lacks(self, to_be: str) -> str:
        """What is missing for the file to be `written` or `run`, and how to get it, in words; empty where nothing is."""
        missing = [name for name in (self.needs if to_be == "written" else self.runs_with) if find_spec(name) is None]
        return f"needs {' and '.join(missing)}: {self.install}" if missing else ""

    @abstractmethod
    def write(self, call: Call, path: Path) -> fx.GraphModule | None:
        """Write the model; the program whose operators the file has, where `operators` finds them by their names."""

    @abstractmethod
    def load(self, path: Path) -> Run:
        """The file in its runtime: takes the inputs, and gives what the runtime makes of them, in the model's order."""

    def operators(self, path: Path, inputs: Mapping[str, Tensor], names: Collection[str]) -> list[Operator]:
        """What the runtime makes of single operators, those of these names, in their order. Default: it does not tell."""
        return []

    @abstractmethod
    def kinds(self, path: Path) -> list[str]:
        """The kinds of operators that a runtime needs for it, as the format calls them, in alphabetical order."""

    def recorded(self, path: Path, inputs: Mapping[str, Tensor]) -> list[Operator]:
        """Of a format that computes otherwise than the model's program, what its own operators give: they are kept in its place. Default: nothing."""
        return []

    @abstractmethod
    def weights(self, path: Path) -> dict[str, Tensor]:
        """The weights that the file holds, by the model's names; those that kept their names."""

    def altered(self, path: Path, weights: Mapping[str, Tensor]) -> list[str]:
        """The names of weights in the file that are others than the model's, which are given."""
        held = self.weights(path)
        return [name for name, tensor in held.items() if name in weights and (tensor.shape != weights[name].shape or not torch.equal(tensor, weights[name]))]


def program_of(call: Call) -> torch.export.ExportedProgram:
    """Sizes that need not be those of the example (the batch, a length) stay free; torch.export finds out which."""
    free = tuple({axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1} for tensor in call.inputs.values())
    with torch.no_grad():
        return torch.export.export(call.function, tuple(call.inputs.values()), dynamic_shapes=(free,), strict=False)


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The program as a graph that can be run."""
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    return graph


def unwrap(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a `Function`, by the names of the model within it."""
    return {name.removeprefix("model."): tensor.detach() for name, tensor in state.items() if name.startswith("model.")}
