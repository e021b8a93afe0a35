"""Define the interface of an export's formats, and what several of them share."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from samewise.runner.exports.call import Call

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]


class Format(ABC):
    """One format: a file of an export's folder."""

    name: ClassVar[str]
    file: ClassVar[str]
    runtime: ClassVar[str]
    """The runtime's name for people."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that write the file."""
    runs_with: ClassVar[tuple[str, ...]] = ()
    """Packages that run the file."""
    install: ClassVar[str] = "pip install '.[export]' in samewise's folder"
    """Command that installs them."""
    alternative: ClassVar[str] = ""
    """Format to try if the exporter refuses a model."""

    def lacks(self, to_be: str) -> str:
        """Return what is missing to write or run the file, and how to get it; "" if nothing is.

        Args:
            to_be: `written` or `run`.
        """
        missing = [
            name
            for name in (self.needs if to_be == "written" else self.runs_with)
            if find_spec(name) is None
        ]
        return f"needs {' and '.join(missing)}: {self.install}" if missing else ""

    @abstractmethod
    def write(self, call: Call, path: Path) -> None:
        """Write the model."""

    @abstractmethod
    def load(self, path: Path) -> Run:
        """Load the file in its runtime: a function from inputs to outputs, in the model's order."""

    def kinds(self, path: Path) -> list[str]:
        """Return the kinds of operators that the file needs, by the format's names, sorted.

        None if they are compiled into it.
        """
        return []

    def sizes(self, path: Path, call: Call) -> dict[str, list[int | str]]:
        """Return the sizes of inputs that the file takes, by the call's names, as from `sizes_of`.

        By default those of the program that the file is made from.
        """
        return sizes_of(program_of(call), call)

    def memory(self, path: Path) -> int | None:
        """Return the bytes that the file plans for activations; None if it plans none."""
        return None

    def weights(self, path: Path) -> dict[str, Tensor]:
        """Return the weights in the file by the model's names, as far as the file has them.

        Raises:
            NotImplementedError: The file has no weights by name.
        """
        raise NotImplementedError("they have no names in it")

    def altered_weights(self, path: Path, weights: Mapping[str, Tensor]) -> list[str]:
        """Return the names of weights in the file that differ from the model's weights."""
        return [
            name
            for name, tensor in self.weights(path).items()
            if name in weights
            and (tensor.shape != weights[name].shape or not torch.equal(tensor, weights[name]))
        ]


def program_of(call: Call) -> torch.export.ExportedProgram:
    """Export the model to a torch.export program."""
    # torch.export finds out which sizes (batch, length) may vary
    dynamic_axes = tuple(
        # torch.export takes sizes of 0 and 1 for constants
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1}
        for tensor in call.inputs.values()
    )
    with torch.no_grad():
        return torch.export.export(
            call.function, tuple(call.inputs.values()), dynamic_shapes=(dynamic_axes,), strict=False
        )


def sizes_of(program: torch.export.ExportedProgram, call: Call) -> dict[str, list[int | str]]:
    """Return the sizes of a program's inputs.

    A number is fixed. A name can vary, as far as the model allows, and the same name is the same
    size.
    """
    inputs = {
        node.name: node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    return name_sizes(
        {
            name: [str(size) for size in inputs[place]]
            for name, place in zip(call.inputs, program.graph_signature.user_inputs, strict=True)
        }
    )


def name_sizes(shapes: Mapping[str, Sequence[str]]) -> dict[str, list[int | str]]:
    """Give plain names (n1, n2) to an exporter's symbols for sizes (s77), in their order.

    Args:
        shapes: Sizes as the exporter writes them; one that it fixes is a number.
    """
    names = dict[str, str]()

    def plain(size: str) -> int | str:
        return (
            int(size)
            if size.isdigit()
            else re.sub(
                r"\b[su]\d+\b",
                lambda symbol: names.setdefault(symbol[0], f"n{len(names) + 1}"),
                size,
            )
        )

    return {name: [plain(size) for size in shape] for name, shape in shapes.items()}


def unwrap(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a `Function`, by their names in the model."""
    return {
        name.removeprefix("model."): tensor.detach()
        for name, tensor in state.items()
        if name.startswith("model.")
    }
