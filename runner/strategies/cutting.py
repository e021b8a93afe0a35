"""Cuts a model into stages, and finds layers in them that draw random numbers.

A stage is a graph over the model's own layers (torch.fx), so it computes what the model computes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from samewise.runner.errors import ConfigError, Problem, first_line, nearest, raised_at
from samewise.runner.strategies.recompute import is_recomputed
from samewise.runner.strategies.surroundings import Generators

DROPOUTS: tuple[type[nn.Module], ...] = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
)
DRAWING = (
    "stochastic_depth",
    "gumbel_softmax",
    *(f"fractional_max_pool{n}d{more}" for n in (2, 3) for more in ("", "_with_indices")),
)
"""Functions that draw random numbers, besides the operators that torch tags."""
MAY_DRAW = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators with the tag that draw only with dropout."""


class _Tracer(fx.Tracer):
    """Tracer that does not enter modules with hooks or, unless opened, recomputed ones."""

    def __init__(self, *, opened: bool) -> None:
        super().__init__()
        self._opened, self._initial_modes = opened, _modes()
        self.lost = ""
        """First operation in a mode that a graph does not record (`torch.no_grad`), or ""."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            _has_hooks(m)
            or (is_recomputed(m) and not self._opened)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_node(self, kind: str, *arguments: Any, **keywords: Any) -> fx.Node:
        node = super().create_node(kind, *arguments, **keywords)
        modes = _modes()
        if modes != self._initial_modes and kind.startswith("call") and not self.lost:
            name = node.target if kind == "call_module" else node.name
            is_autocast = modes[2] != self._initial_modes[2]
            self.lost = f"{name} {'under torch.autocast' if is_autocast else 'without gradients'}"
        return node


def _modes() -> tuple[bool, bool, int]:
    """Return (gradients are enabled, inference mode is, number of autocasts entered)."""
    # Autocasts are counted, since an inner one may disable it.
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks are called around its forward or backward pass."""
    hooks = (
        module._forward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        module._forward_hooks,  # pyright: ignore[reportPrivateUsage]
        module._backward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        module._backward_hooks,  # pyright: ignore[reportPrivateUsage]
    )
    return any(hooks)


def cut_model(model: nn.Module, split: Sequence[str], *, opened: bool = False) -> list[nn.Module]:
    """Split the model into stages that share its layers.

    Args:
        model: Model that takes tensors by position, and whose control flow does not depend on
            values.
        split: Names of the submodules (`layer3`) at which a new stage begins, in order.
        opened: Whether to look into modules with recomputed activations, to see all calls; the
            stages then do not recompute.

    Returns:
        The stages, in order.

    Raises:
        ConfigError: The model cannot be traced, or cannot be cut there.
    """
    _require_names(model, split)
    graph = _trace(model, opened=opened)
    number, numbers = 0, dict[fx.Node, int]()
    for node in graph.graph.nodes:
        if number < len(split) and any(
            f"{path}.".startswith(f"{split[number]}.") for path in _enclosing_modules(node)
        ):
            number += 1
        numbers[node] = number
    if number < len(split):
        raise ConfigError(
            Problem(
                "strategy.split",
                "the model does not call this part, or calls it in another order",
                split[number],
                "parts in the order in which they are called",
            )
        )
    divided = split_module(graph, model, lambda node: numbers[node])
    _require_chain(divided, len(split) + 1)
    stages = [divided.get_submodule(f"submod_{number}") for number in range(len(split) + 1)]
    _require_no_sharing(stages, split)
    _return_model_output(divided, len(split))
    return stages


def _trace(model: nn.Module, *, opened: bool) -> fx.GraphModule:
    """Trace the model, and raise a ConfigError if its graph would not compute the same."""
    tracer = _Tracer(opened=opened)
    generators = Generators.now()
    try:
        nodes = tracer.trace(model)
        graph = fx.GraphModule(tracer.root, nodes, type(model).__name__)
    except Exception as error:
        hint = (
            "choose a model that torch.fx.symbolic_trace can trace, or strategy=elastic; "
            f"{raised_at(error, anywhere=False)}"
        ).rstrip("; ")
        raise ConfigError(
            Problem(
                "model",
                f"cannot be cut into stages: {first_line(error)}",
                type(model).__name__,
                hint=hint,
            )
        ) from error
    if not opened and tracer.lost:
        hint = (
            "strategy=elastic; or activation_checkpointing=[CLASS] with the class of the "
            "module that does so, which is then called as a whole"
        )
        raise ConfigError(
            Problem(
                "model",
                f"computes {tracer.lost}, which torch.fx does not record",
                type(model).__name__,
                hint=hint,
            )
        )
    if not opened and generators.differ():
        message = (
            "draws random numbers where torch.fx sees no operator, so that they would be the "
            "same in every step"
        )
        raise ConfigError(Problem("model", message, type(model).__name__, hint="strategy=elastic"))
    return graph


def _enclosing_modules(node: fx.Node) -> list[str]:
    """Return the names of the modules in which a node is called, and its own if it is one."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _require_names(model: nn.Module, split: Sequence[str]) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    parameters = (name for name, _ in model.named_parameters())
    buffers = (name for name, _ in model.named_buffers())
    if strange := next(
        (x for x in (*modules, *parameters, *buffers) if not re.fullmatch(r"[\w.-]+", x)), None
    ):
        expected = "letters, digits, _ and -, because torch.fx generates code with these names"
        raise ConfigError(
            Problem(
                "model",
                "has a module or parameter whose name torch.fx cannot use to cut the model",
                strange,
                expected,
            )
        )
    if _has_hooks(model):
        message = "has hooks on the model itself, which stages would not call"
        raise ConfigError(
            Problem(
                "model",
                message,
                type(model).__name__,
                "hooks on its submodules",
                "strategy=elastic",
            )
        )
    reasons = {
        name: "activation_checkpointing recomputes as a whole"
        for name, module in model.named_modules()
        if is_recomputed(module)
    }
    reasons |= {
        name: "has hooks and so is called as a whole"
        for name, module in model.named_modules()
        if _has_hooks(module)
    }
    for name in split:
        if name not in modules:
            raise ConfigError(
                Problem(
                    "strategy.split",
                    "the model has no such part",
                    name,
                    "names of its submodules",
                    nearest(name, modules),
                )
            )
        if enclosing := next((outer for outer in reasons if name.startswith(f"{outer}.")), None):
            raise ConfigError(
                Problem(
                    "strategy.split", f"lies within {enclosing}, which {reasons[enclosing]}", name
                )
            )


def _require_chain(divided: fx.GraphModule, stages: int) -> None:
    """Require that each stage takes only the previous stage's output."""
    calls = [node for node in divided.graph.nodes if node.op == "call_module"]
    for number, node in enumerate(calls):
        for argument in node.args:
            source = (
                argument.args[0]
                if argument.op == "call_function" and argument.target is operator.getitem
                else argument
            )
            if argument.op == "get_attr":
                message = (
                    f"stage {number} uses {argument.target}, and torch.fx can put only what "
                    "layers of torch.nn hold into a stage"
                )
                raise ConfigError(
                    Problem(
                        "model",
                        message,
                        hint="choose a model in which only layers have parameters and buffers, "
                        "or strategy=elastic",
                    )
                )
            if source is not (calls[number - 1] if number else source) or (
                number == 0 and argument.op != "placeholder"
            ):
                message = (
                    f"stage {number} needs a value that stage {number - 1} does not pass on "
                    f"({argument.name})"
                )
                raise ConfigError(
                    Problem(
                        "strategy.split",
                        message,
                        expected="a place that a single value passes through, such as between a "
                        "ResNet's stages",
                    )
                )
    if len(calls) != stages:
        raise ConfigError(
            Problem(
                "strategy.split",
                "a stage would be empty",
                expected="parts that compute something, other than the model's first",
            )
        )


def _return_model_output(divided: fx.GraphModule, last: int) -> None:
    """Make the last stage return the model's output, such as a dict."""
    # `split_module` leaves it to the caller of the stages.
    stage = divided.get_submodule(f"submod_{last}")
    assert isinstance(stage, fx.GraphModule)
    values: Any = stage.graph.output_node().args[0]

    def final_value(node: fx.Node) -> Any:
        source, index = node.args if node.target is operator.getitem else (node, None)
        if not isinstance(source, fx.Node) or source.target != f"submod_{last}":
            message = (
                f"the model returns a value that the last stage does not compute ({node.name})"
            )
            raise ConfigError(
                Problem(
                    "strategy.split", message, expected="a place before all that the model returns"
                )
            )
        return values if index is None else values[index]

    stage.graph.output_node().args = (fx.map_arg(divided.graph.output_node().args[0], final_value),)
    stage.recompile()


def _require_no_sharing(stages: Sequence[nn.Module], split: Sequence[str]) -> None:
    stage_of_parameter = dict[int, int]()
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if stage_of_parameter.setdefault(id(parameter), number) != number:
                raise ConfigError(
                    Problem(
                        "strategy.split",
                        f"two stages share the parameter {name}",
                        list(split),
                        "stages with parameters of their own",
                    )
                )


def draws(stage: nn.Module) -> str | None:
    """Return the name of a layer or function that draws random numbers by its kind, or None.

    Others are noticed when they draw.
    """
    if isinstance(stage, fx.GraphModule):
        for node in stage.graph.nodes:
            if node.op in ("call_function", "call_method") and _function_draws(node):
                return node.name
    return next((name for name, part in stage.named_modules() if _layer_draws(part)), None)


def _layer_draws(layer: nn.Module) -> bool:
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        # A recurrent layer drops values between layers only; MultiheadAttention has no `num_layers`
        return layer.dropout > 0 and getattr(layer, "num_layers", 2) > 1
    return isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d) or (
        isinstance(layer, DROPOUTS) and getattr(layer, "p", 1.0) > 0
    )


def _function_draws(node: fx.Node) -> bool:
    name: str = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    )
    if name in MAY_DRAW:
        # `dropout_p` is the fifth argument of scaled_dot_product_attention
        return bool(
            node.kwargs.get(
                "dropout_p", node.args[4] if name == MAY_DRAW[0] and len(node.args) > 4 else 0.0
            )
        )
    operators = getattr(torch.ops.aten, name, None)
    is_tagged = operators is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(operators, x).tags
        for x in operators.overloads()
    )
    return is_tagged or "dropout" in name or name in DRAWING


def name_of_draw(stage: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> str:
    """Run the stage, and return the first layer or function that draws random numbers, or ""."""
    names: list[str] = []

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            before = Generators.now(device)
            value = super().run_node(n)
            if before.differ(device):
                names.append(str(n.target) if n.op == "call_module" else n.name)
            return value

    assert isinstance(stage, fx.GraphModule)
    Watched(stage).run(*inputs)
    return names[0] if names else ""
