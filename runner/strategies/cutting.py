"""Cuts a model into stages.

A stage is a graph over the model's own layers (torch.fx), so it computes what the model computes.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from samewise.runner.errors import ConfigError, Problem, first_line, nearest, raised_at
from samewise.runner.strategies.recompute import is_recomputed
from samewise.runner.strategies.surroundings import Generators


class _Tracer(fx.Tracer):
    """Tracer that does not enter modules with hooks, or recomputed ones."""

    def __init__(self) -> None:
        super().__init__()
        self._initial_modes = _modes()
        self.lost = ""
        """First operation in a mode that a graph does not record (`torch.no_grad`), or ""."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _has_hooks(m) or is_recomputed(m) or super().is_leaf_module(m, module_qualified_name)

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
    return bool(
        module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or module._forward_hooks  # pyright: ignore[reportPrivateUsage]
        or module._backward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or module._backward_hooks  # pyright: ignore[reportPrivateUsage]
    )


def cut_model(model: nn.Module, split: Sequence[str]) -> list[nn.Module]:
    """Split the model into stages that share its layers.

    Args:
        model: Model that takes tensors by position, and whose control flow does not depend on
            values.
        split: Names of the submodules (`layer3`) at which a new stage begins, in order.

    Returns:
        The stages, in order.

    Raises:
        ConfigError: The model cannot be traced, or cannot be cut there.
    """
    _require_names(model, split)
    graph = _trace(model)
    number, numbers = 0, dict[fx.Node, int]()
    for node in graph.graph.nodes:
        if number < len(split) and any(
            f"{path}.".startswith(f"{split[number]}.")
            # The modules in which the node is called, and its own if it is one
            for path, _ in node.meta.get("nn_module_stack", {}).values()
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


def _trace(model: nn.Module) -> fx.GraphModule:
    """Trace the model, and raise a ConfigError if its graph would not compute the same."""
    tracer = _Tracer()
    generators = Generators.now()
    try:
        nodes = tracer.trace(model)
        graph = fx.GraphModule(tracer.root, nodes, type(model).__name__)
    except Exception as error:
        raise ConfigError(
            Problem(
                "model",
                f"cannot be cut into stages: {first_line(error)}",
                type(model).__name__,
                hint=(
                    "choose a model that torch.fx.symbolic_trace can trace, or strategy=elastic; "
                    f"{raised_at(error, anywhere=False)}"
                ).rstrip("; "),
            )
        ) from error
    ConfigError.raise_if(
        tracer.lost,
        "model",
        f"computes {tracer.lost}, which torch.fx does not record",
        type(model).__name__,
        hint="strategy=elastic; or activation_checkpointing=[CLASS] with the class of the "
        "module that does so, which is then called as a whole",
    )
    ConfigError.raise_if(
        generators.differ(),
        "model",
        "draws random numbers where torch.fx sees no operator, so that they would be the "
        "same in every step",
        type(model).__name__,
        hint="strategy=elastic",
    )
    return graph


def _require_names(model: nn.Module, split: Sequence[str]) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    ConfigError.raise_if(
        _has_hooks(model),
        "model",
        "has hooks on the model itself, which stages would not call",
        type(model).__name__,
        "hooks on its submodules",
        "strategy=elastic",
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
        ConfigError.raise_if(
            name not in modules,
            "strategy.split",
            "the model has no such part",
            name,
            "names of its submodules",
            nearest(name, modules),
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
            ConfigError.raise_if(
                argument.op == "get_attr",
                "model",
                f"stage {number} uses {argument.target}, and torch.fx can put only what "
                "layers of torch.nn hold into a stage",
                hint="choose a model in which only layers have parameters and buffers, "
                "or strategy=elastic",
            )
            ConfigError.raise_if(
                source is not (calls[number - 1] if number else source)
                or (number == 0 and argument.op != "placeholder"),
                "strategy.split",
                f"stage {number} needs a value that stage {number - 1} does not pass on "
                f"({argument.name})",
                expected="a place that a single value passes through, such as between a "
                "ResNet's stages",
            )
    ConfigError.raise_if(
        len(calls) != stages,
        "strategy.split",
        "a stage would be empty",
        expected="parts that compute something, other than the model's first",
    )


def _return_model_output(divided: fx.GraphModule, last: int) -> None:
    """Make the last stage return the model's output, such as a dict."""
    # `split_module` leaves it to the caller of the stages.
    stage = divided.get_submodule(f"submod_{last}")
    assert isinstance(stage, fx.GraphModule)
    values: Any = stage.graph.output_node().args[0]

    def final_value(node: fx.Node) -> Any:
        source, index = node.args if node.target is operator.getitem else (node, None)
        ConfigError.raise_if(
            not isinstance(source, fx.Node) or source.target != f"submod_{last}",
            "strategy.split",
            f"the model returns a value that the last stage does not compute ({node.name})",
            expected="a place before all that the model returns",
        )
        return values if index is None else values[index]

    stage.graph.output_node().args = (fx.map_arg(divided.graph.output_node().args[0], final_value),)
    stage.recompile()


def _require_no_sharing(stages: Sequence[nn.Module], split: Sequence[str]) -> None:
    stage_of_parameter = dict[int, int]()
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            ConfigError.raise_if(
                stage_of_parameter.setdefault(id(parameter), number) != number,
                "strategy.split",
                f"two stages share the parameter {name}",
                list(split),
                "stages with parameters of their own",
            )
