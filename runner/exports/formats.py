"""The formats that a model is exported to: how each is written, and how its own runtime gives results from the file."""

from __future__ import annotations

import ast
import logging
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, fx
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor import config as inductor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.exports.call import Call
from samewise.runner.exports.operators import Operator, kept, of_program, own_name

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

    @abstractmethod
    def weights(self, path: Path) -> dict[str, Tensor]:
        """The weights that the file holds, by the model's names; those that kept their names."""


class Pt2(Format):
    """torch.export's program: a graph of ATen operators, for Python and as what AOTInductor and ExecuTorch begin with."""

    name, file, runtime = "pt2", "model.pt2", "torch.export"

    def write(self, call: Call, path: Path) -> fx.GraphModule:
        torch.export.save(program := _program(call), str(path))
        return _graph(program)

    def load(self, path: Path) -> Run:
        program = _loaded(path).module()
        return torch.no_grad()(lambda inputs: list(program(*inputs.values())))

    def operators(self, path: Path, inputs: Mapping[str, Tensor], names: Collection[str]) -> list[Operator]:
        return of_program(_graph(_loaded(path)), list(inputs.values()))

    def kinds(self, path: Path) -> list[str]:
        return sorted({str(node.target) for node in _loaded(path).graph.nodes if isinstance(node.target, OpOverload)})  # others are sums of sizes

    def weights(self, path: Path) -> dict[str, Tensor]:
        return _unwrapped(_loaded(path).state_dict)


class Aoti(Format):
    """AOTInductor's package: the program compiled for this kind of CPU, for C++ and Python, without the model's source."""

    name, file, runtime = "aoti", "model.aoti.pt2", "AOTInductor"

    def lacks(self, to_be: str) -> str:
        compilers = [one for one in inductor.cpp.cxx if one] if to_be == "written" else []
        found = not compilers or any(map(shutil.which, compilers))
        return super().lacks(to_be) if found else "needs a C++ compiler: on Debian and Ubuntu, apt install g++; or name one in CXX"

    def write(self, call: Call, path: Path) -> fx.GraphModule | None:
        with inductor.patch(compile_threads=1):  # else a pool of processes stays
            aoti_compile_and_package(_program(call), package_path=str(path))

    def load(self, path: Path) -> Run:
        import_module("torchvision")
        package = aoti_load_package(str(path))
        return torch.no_grad()(lambda inputs: pytree.tree_leaves(package(*inputs.values())))

    def kinds(self, path: Path) -> list[str]:
        return []  # compiled into it

    def weights(self, path: Path) -> dict[str, Tensor]:
        raise NotImplementedError("they are compiled into it")


class ExecuTorch(Format):
    """ExecuTorch's program with its portable kernels: for phones and small devices, whose build needs the operators in it and no others."""

    name, file, runtime = "executorch", "model.pte", "ExecuTorch"
    needs, runs_with, install = ("executorch",), ("executorch",), "pip install executorch"

    def write(self, call: Call, path: Path) -> None:
        from executorch.exir import to_edge  # pyright: ignore[reportMissingImports]

        path.write_bytes(to_edge(_program(call)).to_executorch().buffer)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def load(self, path: Path) -> Run:
        from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

        program = Runtime.get().load_program(str(path))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        method = program.load_method("forward")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return lambda inputs: [one.clone() for one in method.execute([tensor.contiguous() for tensor in inputs.values()])]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    def kinds(self, path: Path) -> list[str]:
        from executorch.exir._serialize._program import deserialize_pte_binary  # pyright: ignore[reportMissingImports]

        plans = deserialize_pte_binary(path.read_bytes()).program.execution_plan  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return sorted({f"{one.name}.{one.overload}".rstrip(".") for plan in plans for one in plan.operators})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    def weights(self, path: Path) -> dict[str, Tensor]:
        raise NotImplementedError("they have no names in it")


class Onnx(Format):
    """ONNX, by torch's exporter on top of torch.export: for onnxruntime in Python, C++, Java, C#, Node and browsers."""

    name, file, runtime = "onnx", "model.onnx", "onnxruntime"
    needs, runs_with = ("onnx", "onnxscript"), ("onnxruntime",)

    def write(self, call: Call, path: Path) -> fx.GraphModule | None:
        # Not optimised here, which would fold batch norm into weights of other numbers: runtimes do that when they load the file.
        names = [name.replace(".", "_") for name in call.inputs], [name.replace(".", "_") for name in call.outputs]
        made = torch.onnx.export(_program(call), dynamo=True, optimize=False, input_names=names[0], output_names=names[1], verbose=False)
        assert made is not None
        made.save(str(path), external_data=False)
        return _graph(made.exported_program) if made.exported_program else None

    def load(self, path: Path) -> Run:
        call = self._session(str(path))
        return lambda inputs: list(call(inputs).values())

    def operators(self, path: Path, inputs: Mapping[str, Tensor], names: Collection[str]) -> list[Operator]:
        import onnx  # pyright: ignore[reportMissingImports]

        model = onnx.load(str(path))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        own = {one.name for one in model.graph.output}
        asked = dict[str, Operator]()
        for node in model.graph.node:
            said = {one.key.rpartition(".")[2]: one.value for one in node.metadata_props}
            scopes = ["", *ast.literal_eval(said.get("name_scopes", "[]"))]
            for output in node.output:  # one that the whole model gives has that one's name
                name = said.get("fx_node", "").partition(" ")[0].removeprefix("%") if output in own else output
                if name in names:
                    asked[output] = Operator(name, node.op_type, own_name(str(scopes[max(len(scopes) - 2, 0)])), torch.empty(0))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in asked if name not in own)
        found = self._session(model.SerializeToString())(inputs)
        return [replace(one, numbers=kept(found[name])) for name, one in asked.items()]

    def kinds(self, path: Path) -> list[str]:
        import onnx  # pyright: ignore[reportMissingImports]

        return sorted({str(node.op_type) for node in onnx.load(str(path), load_external_data=False).graph.node})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]

    def _session(self, model: str | bytes) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """A file, or a model in memory: takes inputs, and gives all outputs by their names in it."""
        import onnxruntime  # pyright: ignore[reportMissingImports]

        options = onnxruntime.SessionOptions()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        taken = {one.name for one in session.get_inputs()}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        named = [one.name for one in session.get_outputs()]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

        def call(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            given = {name.replace(".", "_"): tensor.numpy() for name, tensor in inputs.items() if name.replace(".", "_") in taken}
            return {name: torch.from_numpy(np.asarray(one)) for name, one in zip(named, session.run(None, given), strict=True)}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]

        return call

    def weights(self, path: Path) -> dict[str, Tensor]:
        import onnx  # pyright: ignore[reportMissingImports]
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        held = onnx.load(str(path)).graph.initializer  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return _unwrapped({one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in held})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]


FORMATS: dict[str, Format] = {one.name: one for one in (Pt2(), Aoti(), Onnx(), ExecuTorch())}
"""Beside `safetensors`, which holds weights and no model."""


def require(form: Format) -> None:
    """Raise a ConfigError where something is missing to write a format."""
    if lacks := form.lacks("written"):
        message, _, hint = lacks.partition(": ")
        raise ConfigError(Problem("--to", f"{message} to be written", form.name, hint=hint))


def write(form: Format, call: Call, path: Path) -> list[Operator]:
    """Write the model in a format; what each operator of its program gives.

    Raises:
        ConfigError: a package is missing, or the exporter refuses the model, in the exporter's words.
    """
    require(form)
    try:
        with _quiet():
            program = form.write(call, path)
            return of_program(program, list(call.inputs.values())) if program else []
    except Exception as error:
        hint = "--bare leaves out what comes before the model, which may be what it cannot take" if call.whole else ""
        raise ConfigError(Problem("--to", f"{form.runtime}'s exporter cannot take this model: {first_line(error)}", form.name, hint=hint)) from None


def run(form: Format, path: Path, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a file's runtime makes of inputs.

    Raises:
        ValueError: it fails, in the runtime's words.
    """
    with _in_words(form):
        return form.load(path)(inputs)


def operators(form: Format, path: Path, inputs: Mapping[str, Tensor], names: Collection[str]) -> list[Operator]:
    """What a file's runtime makes of single operators.

    Raises:
        ValueError: it fails, in the runtime's words.
    """
    with _in_words(form):
        return form.operators(path, inputs, names)


@contextmanager
def _in_words(form: Format) -> Generator[None]:
    try:
        with _quiet():
            yield
    except Exception as error:
        raise ValueError(f"{form.runtime} cannot run it: {first_line(error)}") from None


def _program(call: Call) -> torch.export.ExportedProgram:
    """Sizes that need not be those of the example (the batch, a length) stay free; torch.export finds out which."""
    free = tuple({axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1} for tensor in call.inputs.values())
    with torch.no_grad():
        return torch.export.export(call.function, tuple(call.inputs.values()), dynamic_shapes=(free,), strict=False)


def _loaded(path: Path) -> torch.export.ExportedProgram:
    """A program from its file; those of detectors have operators that torchvision registers."""
    import_module("torchvision")
    return torch.export.load(str(path))


def _graph(program: torch.export.ExportedProgram) -> fx.GraphModule:
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    return graph


def _unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor.detach() for name, tensor in state.items() if name.startswith("model.")}


@contextmanager
def _quiet() -> Generator[None]:
    """Exporters warn of their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch.export logs the whole graph of a model that it cannot take
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
