"""ONNX, and ONNX in int8: written by torch's exporter and onnxruntime's quantiser, run by onnxruntime."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from samewise.runner.exports.call import Call
from samewise.runner.exports.difference import Difference, difference
from samewise.runner.exports.format import Format, Run, graph_of, name_sizes, program_of, unwrap
from samewise.runner.exports.operators import Operator, own_name, sample_of

_ALIKE = 0.01
"""The share of the largest number by which a file's results may differ for other sizes of inputs: rounding alone."""


class Onnx(Format):
    """ONNX, by torch's exporter on top of torch.export: for onnxruntime in Python, C++, Java, C#, Node and browsers."""

    name, file, runtime = "onnx", "model.onnx", "onnxruntime"
    needs, runs_with = ("onnx", "onnxscript"), ("onnxruntime",)

    def write(self, call: Call, path: Path) -> fx.GraphModule | None:
        # Not optimised here, which would fold batch norm into changed weights: runtimes do that when they load the file.
        names = [name.replace(".", "_") for name in call.inputs], [name.replace(".", "_") for name in call.outputs]
        made = torch.onnx.export(program_of(call), dynamo=True, optimize=False, input_names=names[0], output_names=names[1], verbose=False)
        assert made is not None
        for node in made.model.graph:  # the exporter gives a conv3d without bias zeros of the weight's shape, which no runtime takes
            if node.op_type == "Conv" and len(node.inputs) == 3 and getattr(node.inputs[2] and node.inputs[2].producer(), "op_type", "") == "Expand":
                node.replace_input_with(2, None)
        shapes = {one.name: one.shape for one in made.model.graph.inputs if one.shape is not None}
        places = dict[str, list[tuple[str, int]]]()
        for name in call.inputs:
            for axis, size in enumerate(shapes.get(name.replace(".", "_"), ())):
                if not isinstance(size, int):
                    places.setdefault(str(size.value), []).append((name, axis))
        for size, held in places.items():
            made.save(str(path), external_data=False)
            # A size that the program fixes has a digit as its name, and others may be wrong in the file alone: runtimes then compute without a word.
            if size.isdigit() or not self._takes_another_size(path, call, held):
                for name, axis in held:
                    shapes[name.replace(".", "_")][axis] = call.inputs[name].shape[axis]
        made.save(str(path), external_data=False)
        return graph_of(made.exported_program) if made.exported_program else None

    def load(self, path: Path) -> Run:
        call = self._session(str(path))
        return lambda inputs: list(call(inputs).values())

    def _takes_another_size(self, path: Path, call: Call, places: Sequence[tuple[str, int]]) -> bool:
        """Whether the file and the model give the same if these axes are twice as long; true if the model takes no such inputs, or nothing runs the file."""
        inputs = dict(call.inputs)
        for name, axis in places:
            inputs[name] = torch.cat([inputs[name], inputs[name]], axis)
        with torch.no_grad(), suppress(Exception):
            expected = dict(zip(call.outputs, call.function(*inputs.values()), strict=True))
            try:
                apart = self.lacks("run") or difference(expected, dict(zip(expected, self.load(path)(inputs), strict=True)))
                return not isinstance(apart, Difference) or apart.relative < _ALIKE
            except Exception:
                return False
        return True

    def operators(self, path: Path, inputs: Mapping[str, Tensor], names: Collection[str]) -> list[Operator]:
        import onnx  # pyright: ignore[reportMissingImports]

        model = onnx.load(str(path))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        own = {one.name for one in model.graph.output}
        asked = dict[str, Operator]()
        for node in model.graph.node:
            said = {one.key.rpartition(".")[2]: one.value for one in node.metadata_props}
            scopes = ["", *ast.literal_eval(said.get("name_scopes", "[]"))]
            for output in node.output:  # an operator whose output is the model's has that output's name
                name = said.get("fx_node", "").partition(" ")[0].removeprefix("%") if output in own else output
                if name in names:
                    asked[output] = Operator(name, node.op_type, own_name(str(scopes[max(len(scopes) - 2, 0)])), torch.empty(0))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in asked if name not in own)
        found = self._session(model.SerializeToString())(inputs)
        return [replace(one, numbers=sample_of(found[name])) for name, one in asked.items()]

    def kinds(self, path: Path) -> list[str]:
        import onnx  # pyright: ignore[reportMissingImports]

        return sorted({str(node.op_type) for node in onnx.load(str(path), load_external_data=False).graph.node})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]

    def sizes(self, path: Path, call: Call) -> dict[str, list[int | str]]:
        import onnx  # pyright: ignore[reportMissingImports]

        graph = onnx.load(str(path), load_external_data=False).graph  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        held = {one.name: [str(size.dim_param or size.dim_value or "?") for size in one.type.tensor_type.shape.dim] for one in graph.input}
        return name_sizes({name: held[name.replace(".", "_")] for name in call.inputs if name.replace(".", "_") in held})

    def _session(self, model: str | bytes) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """A session for a file, or a model in memory: a function from inputs to all outputs by name."""
        import onnxruntime  # pyright: ignore[reportMissingImports]

        options = onnxruntime.SessionOptions()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # failures raise exceptions, and are reported in words
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
        return unwrap({one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in held})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]


class OnnxInt8(Onnx):
    """ONNX whose convolutions and products use int8 weights, with a scale per channel, and uint8 activations: onnxruntime's static quantisation, as QDQ.

    Weights use seven of the eight bits: with eight, additions saturate on CPUs without VNNI, with different results.
    """

    name, file, is_exact = "onnx-int8", "model.int8.onnx", False
    needs = ("onnx", "onnxscript", "onnxruntime")

    def write(self, call: Call, path: Path) -> None:
        import onnx  # pyright: ignore[reportMissingImports]
        from onnxruntime import quantization  # pyright: ignore[reportMissingImports]

        super().write(call, path)
        model = onnx.load(str(path))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        own = {one.name for one in model.graph.initializer if one.name.startswith("model.")}
        nodes = [node.name for node in model.graph.node if node.op_type in _QUANTISED and own & set(node.input)]  # those of a spectrogram do not change
        if not nodes:
            raise ValueError(f"it has none of the operators that int8 quantises ({', '.join(_QUANTISED)})")
        run = self.load(path)
        for one in call.examples:
            try:
                run(one)
            except Exception:
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in one.items())
                raise ValueError(f"quantisation is calibrated on training samples, and its ONNX file does not run on one of {shapes}") from None
        quantization.quantize_static(  # pyright: ignore[reportUnknownMemberType]
            model,
            str(path),
            _reader(call, {one.name for one in model.graph.input}),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(_QUANTISED),
            nodes_to_quantize=nodes,
            per_channel=True,
            reduce_range=True,
        )

    def run_own_operators(self, path: Path, inputs: Mapping[str, Tensor]) -> list[Operator]:
        import onnx  # pyright: ignore[reportMissingImports]

        names = {name for node in onnx.load(str(path)).graph.node for name in node.output}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return self.operators(path, inputs, names)

    def weights(self, path: Path) -> dict[str, Tensor]:
        """The weights as used in products: int8 times the scale."""
        return {name: weight for name, (weight, _) in self._quantised_weights(path).items()}

    def altered_weights(self, path: Path, weights: Mapping[str, Tensor]) -> list[str]:
        held = self._quantised_weights(path)
        known = {name: one for name, one in held.items() if name in weights}
        return [name for name, (weight, step) in known.items() if weight.shape != weights[name].shape or bool(((weight - weights[name]).abs() > step).any())]

    def _quantised_weights(self, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """By the model's names, weights and the step that each is rounded to."""
        import onnx  # pyright: ignore[reportMissingImports]
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        held = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in onnx.load(str(path)).graph.initializer}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
        found = dict[str, tuple[Tensor, Tensor]]()
        for name, weight in unwrap(held).items():
            scale, zero = held.get(f"model.{name.removesuffix('_quantized')}_scale"), held.get(f"model.{name.removesuffix('_quantized')}_zero_point")
            if name.endswith("_quantized") and scale is not None and zero is not None:
                first = (-1, *[1] * (weight.dim() - 1))  # a scale for each channel of the first dimension, or one for all
                found[name.removesuffix("_quantized")] = ((weight.float() - zero.float().view(first)) * scale.view(first), scale.view(first))
            elif not name.endswith(("_scale", "_zero_point", "_quantized_scale")):
                found[name] = (weight, torch.zeros(()))
        return found


_QUANTISED = ("Conv", "Gemm", "MatMul")


def _reader(call: Call, taken: Collection[str]) -> Any:
    """Example inputs, from which the quantiser takes the ranges of each operator's inputs."""
    from onnxruntime.quantization import CalibrationDataReader  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    class Reader(CalibrationDataReader):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            self._given: Iterator[dict[str, Any]] = (
                {name.replace(".", "_"): tensor.numpy() for name, tensor in one.items() if name.replace(".", "_") in taken}
                for one in (call.examples or (call.inputs,))
            )

        def get_next(self) -> dict[str, Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride] (as its base does)
            return next(self._given, None)

    return Reader()
