"""Write ONNX by torch's exporter, and run it by onnxruntime."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samewise.runner.exports.call import Call
from samewise.runner.exports.difference import Difference, difference
from samewise.runner.exports.format import Format, Run, name_sizes, program_of, unwrap

_ROUNDING = 0.01
"""Relative difference of results for other sizes of inputs that rounding explains."""


class Onnx(Format):
    """ONNX, by torch's exporter on top of torch.export.

    onnxruntime runs it in Python, C++, Java, C#, Node and browsers.
    """

    name, file, runtime = "onnx", "model.onnx", "onnxruntime"
    needs, runs_with = ("onnx", "onnxscript"), ("onnxruntime",)

    def write(self, call: Call, path: Path) -> None:
        # Not optimised here, which would fold batch norm into changed weights: runtimes do that
        # when they load the file.
        names = (
            [name.replace(".", "_") for name in call.inputs],
            [name.replace(".", "_") for name in call.outputs],
        )
        program = torch.onnx.export(
            program_of(call),
            dynamo=True,
            optimize=False,
            input_names=names[0],
            output_names=names[1],
            verbose=False,
        )
        assert program is not None
        # The exporter gives a conv3d without bias zeros of the weight's shape, which no runtime
        # takes
        for node in program.model.graph:
            if (
                node.op_type == "Conv"
                and len(node.inputs) == 3
                and getattr(node.inputs[2] and node.inputs[2].producer(), "op_type", "") == "Expand"
            ):
                node.replace_input_with(2, None)
        shapes = {x.name: x.shape for x in program.model.graph.inputs if x.shape is not None}
        axes_by_size = dict[str, list[tuple[str, int]]]()
        for name in call.inputs:
            for axis, size in enumerate(shapes.get(name.replace(".", "_"), ())):
                if not isinstance(size, int):
                    axes_by_size.setdefault(str(size.value), []).append((name, axis))
        for size, axes in axes_by_size.items():
            program.save(str(path), external_data=False)
            # A size that the program fixes has a digit as its name, and others may be wrong in the
            # file alone: runtimes then compute without a word.
            if size.isdigit() or not self._takes_another_size(path, call, axes):
                for name, axis in axes:
                    shapes[name.replace(".", "_")][axis] = call.inputs[name].shape[axis]
        program.save(str(path), external_data=False)

    def load(self, path: Path) -> Run:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        options = onnxruntime.SessionOptions()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # Failures raise exceptions, which are reported
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        input_names = {x.name for x in session.get_inputs()}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

        def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
            feed = {
                name.replace(".", "_"): tensor.numpy()
                for name, tensor in inputs.items()
                if name.replace(".", "_") in input_names
            }
            return [torch.from_numpy(np.asarray(x)) for x in session.run(None, feed)]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]

        return run

    def _takes_another_size(self, path: Path, call: Call, axes: Sequence[tuple[str, int]]) -> bool:
        """Whether the file and the model give the same if these axes are twice as long.

        True if the model takes no such inputs, or nothing runs the file.
        """
        inputs = dict(call.inputs)
        for name, axis in axes:
            inputs[name] = torch.cat([inputs[name], inputs[name]], axis)
        with torch.no_grad(), suppress(Exception):
            expected = dict(zip(call.outputs, call.function(*inputs.values()), strict=True))
            try:
                gap = self.lacks("run") or difference(
                    expected, dict(zip(expected, self.load(path)(inputs), strict=True))
                )
                return not isinstance(gap, Difference) or gap.relative < _ROUNDING
            except Exception:
                return False
        return True

    def kinds(self, path: Path) -> list[str]:
        import onnx  # pyright: ignore[reportMissingImports]

        return sorted(
            {
                str(node.op_type)
                for node in onnx.load(str(path), load_external_data=False).graph.node
            }
        )  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]

    def sizes(self, path: Path, call: Call) -> dict[str, list[int | str]]:
        import onnx  # pyright: ignore[reportMissingImports]

        graph = onnx.load(str(path), load_external_data=False).graph  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        shapes = {
            x.name: [
                str(size.dim_param or size.dim_value or "?")
                for size in x.type.tensor_type.shape.dim
            ]
            for x in graph.input
        }
        return name_sizes(
            {
                name: shapes[name.replace(".", "_")]
                for name in call.inputs
                if name.replace(".", "_") in shapes
            }
        )

    def weights(self, path: Path) -> dict[str, Tensor]:
        import onnx  # pyright: ignore[reportMissingImports]
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        initializers = onnx.load(str(path)).graph.initializer  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return unwrap(
            {x.name: torch.from_numpy(numpy_helper.to_array(x).copy()) for x in initializers}
        )  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
