"""Write an export in each format, and run the file in its runtime."""

import io
import logging
import re
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import ConfigError, Problem, TrainingError, first_line
from samewise.runner.exports.call import Call
from samewise.runner.exports.format import Format, Run, program_of, sizes_of, unwrap
from samewise.runner.exports.onnx_formats import Onnx
from samewise.runner.records.files import write_atomically
from samewise.runner.torch_private import (
    OpOverload,
    aoti_compile_and_package,
    aoti_load_package,
    inductor_config,
    pytree,
)
from samewise.runner.training.same_bits.compiled import keep_headers_apart


class Pt2(Format):
    """torch.export's program: a graph of ATen operators, for Python.

    AOTInductor and ExecuTorch begin with it.
    """

    name, file, runtime = "pt2", "model.pt2", "torch.export"

    def write(self, call: Call, path: Path) -> None:
        # torch aborts Python if the disk is full while it writes a file itself
        torch.export.save(program_of(call), buffer := io.BytesIO())
        write_atomically(path, buffer.getvalue())

    def load(self, path: Path) -> Run:
        program = _load_program(path).module()
        return torch.no_grad()(lambda inputs: list(program(*inputs.values())))

    def kinds(self, path: Path) -> list[str]:
        # Other targets are sums of sizes
        return sorted(
            {
                str(node.target)
                for node in _load_program(path).graph.nodes
                if isinstance(node.target, OpOverload)
            }
        )

    def sizes(self, path: Path, call: Call) -> dict[str, list[int | str]]:
        return sizes_of(_load_program(path), call)

    def weights(self, path: Path) -> dict[str, Tensor]:
        return unwrap(_load_program(path).state_dict)


class Aoti(Format):
    """AOTInductor's package: the program compiled for this kind of CPU, for C++ and Python.

    The model's source is not in it.
    """

    name, file, runtime = "aoti", "model.aoti.pt2", "AOTInductor"

    def lacks(self, to_be: str) -> str:
        compilers = (
            [compiler for compiler in inductor_config.cpp.cxx if compiler]
            if to_be == "written"
            else []
        )
        has_compiler = not compilers or any(map(shutil.which, compilers))
        return (
            super().lacks(to_be)
            if has_compiler
            else "needs a C++ compiler: on Debian and Ubuntu, apt install g++; or name one in CXX"
        )

    def write(self, call: Call, path: Path) -> None:
        keep_headers_apart()
        # With more threads, a pool of processes would remain
        with inductor_config.patch(compile_threads=1):
            aoti_compile_and_package(program_of(call), package_path=str(path))

    def load(self, path: Path) -> Run:
        import_module("torchvision")
        package = aoti_load_package(str(path))
        return torch.no_grad()(lambda inputs: pytree.tree_leaves(package(*inputs.values())))


class ExecuTorch(Format):
    """ExecuTorch's program with XNNPACK's kernels, for phones and small devices.

    The build on the device must include the program's operators.
    """

    name, file, runtime = "executorch", "model.pte", "ExecuTorch"
    needs, runs_with = ("executorch",), ("executorch",)
    install = "pip install '.[executorch]' in samewise's folder"
    alternative = "executorch_portable"

    def write(self, call: Call, path: Path) -> None:
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

        originals = [
            (weight, weight.data)
            for weight in (*call.function.parameters(), *call.function.buffers())
        ]
        try:
            # Its kernels refuse convolutions of tensors with different dimension orders, as
            # channels_last weights cause
            for (
                weight,
                data,
            ) in originals:
                weight.data = data.clone(memory_format=torch.contiguous_format)
            program = to_edge_transform_and_lower(  # pyright: ignore[reportUnknownVariableType]
                program_of(call), partitioner=self.partitioners()
            )
            path.write_bytes(program.to_executorch().buffer)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        finally:
            for weight, data in originals:
                weight.data = data

    def load(self, path: Path) -> Run:
        from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

        program = Runtime.get().load_program(str(path))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        method = program.load_method("forward")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return lambda inputs: [
            output.clone()
            for output in method.execute([tensor.contiguous() for tensor in inputs.values()])
        ]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    def partitioners(self) -> list[Any]:
        """Return what moves operators to a backend."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]

        return [XnnpackPartitioner()]

    def kinds(self, path: Path) -> list[str]:
        plan = _plan(path)
        operators = {f"{x.name}.{x.overload}".rstrip(".") for x in plan.operators}
        return sorted(operators | {x.id for x in plan.delegates})

    def memory(self, path: Path) -> int:
        return sum(_plan(path).non_const_buffer_sizes)


class PortableExecuTorch(ExecuTorch):
    """ExecuTorch's program with its portable kernels alone, which any C++ compiler builds."""

    name, file, alternative = "executorch_portable", "model.portable.pte", ""

    def partitioners(self) -> list[Any]:
        return []


def _plan(path: Path) -> Any:
    """Return how ExecuTorch runs the only function of a program."""
    from executorch.exir._serialize._program import deserialize_pte_binary  # pyright: ignore[reportMissingImports]

    (plan,) = deserialize_pte_binary(path.read_bytes()).program.execution_plan  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return plan  # pyright: ignore[reportUnknownVariableType]


FORMATS: dict[str, Format] = {
    x.name: x for x in (Pt2(), Aoti(), Onnx(), ExecuTorch(), PortableExecuTorch())
}
"""Formats beside `safetensors`, which holds weights and no model."""


def require(form: Format) -> None:
    """Require what is needed to write a format.

    Raises:
        ConfigError: A package or a compiler is missing.
    """
    if lacks := form.lacks("written"):
        message, _, hint = lacks.partition(": ")
        raise ConfigError(Problem("--to", f"{message} to be written", form.name, hint=hint))


def write(form: Format, call: Call, path: Path) -> None:
    """Write the model in a format.

    Raises:
        ConfigError: A package is missing, or the exporter refuses the model.
    """
    require(form)
    try:
        with _quiet():
            form.write(call, path)
    except (OSError, TrainingError):
        # The disk, not the model
        raise
    except ImportError as error:
        raise ConfigError(
            Problem(
                "--to",
                f"{form.runtime}'s exporter is not completely installed: {first_line(error)}",
                form.name,
                hint=form.install,
            )
        ) from error
    except Exception as error:
        hints = (
            f"try --to {form.alternative}" * bool(form.alternative),
            "try --bare: it leaves out the batch transforms before the model, which may be "
            "what cannot be exported" * call.whole,
        )
        raise ConfigError(
            Problem(
                "--to",
                f"{form.runtime}'s exporter cannot take this model: {_reason(error)}",
                form.name,
                hint="; or ".join(filter(None, hints)),
            )
        ) from error


def _reason(error: Exception) -> str:
    """Return an exporter's error and its cause, in one line without colours."""
    # The first line of torch.onnx only says which of its steps failed
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = re.sub(r"\x1b\[[0-9;]*m", "", first_line(error))
    return (
        message
        if cause is error
        else f"{message.removesuffix(' Next steps:')} {type(cause).__name__}: {first_line(cause)}"
    )


def run(form: Format, path: Path, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Run a file in its runtime.

    Raises:
        ValueError: The runtime failed.
    """
    try:
        with _quiet():
            return form.load(path)(inputs)
    except Exception as error:
        raise ValueError(f"{form.runtime} cannot run it: {first_line(error)}") from None


def sizes(form: Format, path: Path, call: Call) -> dict[str, list[int | str]]:
    """Return the sizes of inputs that a file takes, as from `format.sizes_of`."""
    with _quiet():
        return form.sizes(path, call)


def _load_program(path: Path) -> torch.export.ExportedProgram:
    """Load a torch.export program."""
    # Detectors use operators that torchvision registers
    import_module("torchvision")
    return torch.export.load(str(path))


@contextmanager
def _quiet() -> Generator[None]:
    """Silence exporters, which warn about their internals."""
    level = logging.root.manager.disable
    # torch.export logs the whole graph of a model that it cannot export
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
