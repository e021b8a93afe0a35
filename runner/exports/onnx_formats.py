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
        _fold_transposes(model.graph)
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
        held, quantised = self._read_weights(path)
        return held | {name: weight for name, (weight, _) in quantised.items()}

    def altered_weights(self, path: Path, weights: Mapping[str, Tensor]) -> list[str]:
        held, quantised = self._read_weights(path)
        known = {name: one for name, one in ({name: (weight, torch.zeros(())) for name, weight in held.items()} | quantised).items() if name in weights}
        return [name for name, (weight, step) in known.items() if weight.shape != weights[name].shape or bool(((weight - weights[name]).abs() > step).any())]

    def int8_share(self, path: Path, weights: Mapping[str, Tensor]) -> float:
        numbers = {name: weight.numel() for name, weight in weights.items() if weight.is_floating_point()}
        return sum(numbers.get(name, 0) for name in self._read_weights(path)[1]) / (sum(numbers.values()) or 1)

    def _read_weights(self, path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """By the model's names, the weights that are not quantised; and those that are, each with the step that it is rounded to."""
        import onnx  # pyright: ignore[reportMissingImports]
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        graph: Any = onnx.load(str(path)).graph  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        held = {str(one.name): torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        readers = {str(node.input[0]): node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in held}
        found, of_quantiser = dict[str, tuple[Tensor, Tensor]](), set[str]()
        for name, node in readers.items():
            of_quantiser.update(node.input)
            if not name.startswith("model.") or not name.endswith("_quantized") or held[name].dtype is not torch.int8:
                continue
            weight, scale, zero = (held[one].float() for one in node.input)
            along = [1] * weight.dim()
            if scale.numel() > 1:  # a scale for each channel, or one for all
                along[next((one.i for one in node.attribute if one.name == "axis"), 1)] = -1
            scale, zero = scale.view(along), zero.view(along)
            plain = name.removeprefix("model.").removesuffix("_quantized")
            pair = ((weight - zero) * scale, scale)
            found[plain.removesuffix(_TRANSPOSED)] = (pair[0].T, pair[1].T) if plain.endswith(_TRANSPOSED) else pair
        return unwrap({name: tensor for name, tensor in held.items() if name not in of_quantiser}), found


def _fold_transposes(graph: Any) -> None:
    """Store weights as products take them, and mark their names: torch's exporter writes a linear layer of sequences as a product with a transposed weight.

    The quantiser takes nothing but stored weights. A weight that something else reads too, such as a tied embedding, stays as it is.
    """
    from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

    own: dict[str, Any] = {one.name: one for one in graph.initializer if one.name.startswith("model.") and len(one.dims) == 2}
    readers = {name: [node for node in graph.node if name in node.input] for name in own}
    turned = {name: nodes for name, nodes in readers.items() if nodes and all(node.op_type == "Transpose" for node in nodes)}
    places = dict[str, str]()
    for name, nodes in turned.items():
        if all(list(one.ints) == [1, 0] for node in nodes for one in node.attribute if one.name == "perm"):
            array = np.ascontiguousarray(numpy_helper.to_array(own[name]).T)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            own[name].CopyFrom(numpy_helper.from_array(array, name + _TRANSPOSED))  # pyright: ignore[reportUnknownMemberType]
            for node in nodes:
                places[node.output[0]] = name + _TRANSPOSED
                graph.node.remove(node)
    for node in graph.node:
        node.input[:] = [places.get(one, one) for one in node.input]


_TRANSPOSED = ".transposed"
"""Ends the name of a weight that an int8 file has transposed; no weight of a model is called so, as what is called `weight` has no parts."""
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
