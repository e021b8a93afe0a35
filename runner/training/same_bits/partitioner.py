"""Divides a compiled model's graph into a forward and a backward pass.

It differs from torch in tensors that the forward pass changes in place.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from samewise.runner.torch_private import (
    CustomPartitionerFn,
    OpOverload,
    min_cut_rematerialization_partition,
)


class KeepsChanged(CustomPartitionerFn):
    """Torch's partitioner, which saves copies of inputs that the forward pass changes in place.

    Torch's own saves such an input itself, such as a buffer, so that the backward pass reads its
    new values. Other graphs stay as they are.
    """

    def __call__(
        self, gm: GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        changes: dict[Any, Node] = {
            node.args[0]: node
            for node in reversed(forward.graph.nodes)
            if node.target is torch.ops.aten.copy_.default
        }
        output = forward.graph.output_node()
        values = list(cast("tuple[Any, ...]", output.args[0]))
        # After the outputs come the values that are saved for the backward pass
        for place in range(options["num_fwd_outputs"], len(values)):
            if isinstance(values[place], Node) and _storage_of(values[place]) in changes:
                # The last entry is the graph's first change, before which all inputs are unchanged
                values[place] = _copied(values[place], before=list(changes.values())[-1])
        output.args = (tuple(values),)
        forward.recompile()
        return forward, backward

    def uuid(self) -> bytes:
        # A part of the key of Inductor's cache, so that an edit of this file compiles anew
        return sha256(Path(__file__).read_bytes()).digest()


def _storage_of(node: Any) -> Any:
    """Return the node whose memory a view shares, through other views."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node


def _copied(node: Node, *, before: Node) -> Node:
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(torch.ops.aten.clone.default, (node,))
    value = node.meta["val"]
    with value.fake_mode:
        # Inductor reads each node's shape and strides there
        copy.meta["val"] = value.clone()
    return copy
