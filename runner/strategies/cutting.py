"""Cuts a model into stages, and finds what in them draws random numbers.

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
"""Functions that draw random numbers, beside torch's operators that are tagged so."""
MAY_DRAW = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators that are tagged, but draw only with dropout."""


class _Tracer(fx.Tracer):
    """Does not trace into modules with hooks, nor, unless it is to open them, into those whose
    activations are recomputed.
    """

    def __init__(self, *, opened: bool) -> None:
        super().__init__()
        self._opened, self._begun = opened, _modes()
        self.lost = ""
        """The first operation in a mode that a graph does not record, such as `torch.no_grad`, with
        the mode; or an empty text."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            _has_hooks(m)
            or (is_recomputed(m) and not self._opened)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_node(self, kind: str, *given: Any, **further: Any) -> fx.Node:
        node = super().create_node(kind, *given, **further)
        modes = _modes()
        if modes != self._begun and kind.startswith("call") and not self.lost:
            name = node.target if kind == "call_module" else node.name
            self.lost = (
                f"{name} "
                f"{'under torch.autocast' if modes[2] != self._begun[2] else 'without gradients'}"
            )
        return node


def _modes() -> tuple[bool, bool, int]:
    """Whether gradients are enabled, whether inference mode is, and how many autocasts have been
    entered, of which some may disable it.
    """
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth


def _has_hooks(module: nn.Module) -> bool:
    """Whether something is called around its forward or backward pass."""
    held = (
        module._forward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        module._forward_hooks,  # pyright: ignore[reportPrivateUsage]
        module._backward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        module._backward_hooks,  # pyright: ignore[reportPrivateUsage]
    )  # pyright: ignore[reportPrivateUsage]
    return any(held)


def cut_model(model: nn.Module, split: Sequence[str], *, opened: bool = False) -> list[nn.Module]:
    """Split the model into stages that share its layers.

    ConfigError if it cannot be traced, or not be cut there.

    Args:
        model: Takes tensors by position; its control flow does not depend on values.
        split: The names of the submodules (`layer3`) at which a new stage begins, in order.
        opened: Look into modules whose activations are computed twice, to see all that is called:
            the stages do not do that, then.
    """
    _require_names(model, split)
    tracer = _Tracer(opened=opened)
    before = Generators.now()
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
    if not opened and before.differ():
        message = (
            "draws random numbers where torch.fx sees no operator, so that they would be the "
            "same in every step"
        )
        raise ConfigError(Problem("model", message, type(model).__name__, hint="strategy=elastic"))
    number, numbers = 0, dict[fx.Node, int]()
    for node in graph.graph.nodes:
        if number < len(split) and any(
            f"{path}.".startswith(f"{split[number]}.") for path in _around(node)
        ):
            number += 1
        numbers[node] = number
    if number < len(split):
        words = "the model does not call this part, or calls it in another order"
        raise ConfigError(
            Problem(
                "strategy.split",
                words,
                split[number],
                "parts in the order in which they are called",
            )
        )
    whole = split_module(graph, model, lambda node: numbers[node])
    _require_a_chain(whole, len(split) + 1)
    stages = [whole.get_submodule(f"submod_{number}") for number in range(len(split) + 1)]
    _require_no_sharing(stages, split)
    _return_what_the_model_returns(whole, len(split))
    return stages


def _around(node: fx.Node) -> list[str]:
    """The names of the modules in which a node is called, and its own if it is one."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _require_names(model: nn.Module, split: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules() if name]
    of_values = (
        name for named in (model.named_parameters, model.named_buffers) for name, _ in named()
    )
    if strange := next(
        (name for name in (*known, *of_values) if not re.fullmatch(r"[\w.-]+", name)), None
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
        words = "has hooks on the model itself, which stages would not call"
        raise ConfigError(
            Problem(
                "model", words, type(model).__name__, "hooks on its submodules", "strategy=elastic"
            )
        )
    whole = {
        name: "activation_checkpointing recomputes as a whole"
        for name, module in model.named_modules()
        if is_recomputed(module)
    }
    whole |= {
        name: "has hooks and so is called as a whole"
        for name, module in model.named_modules()
        if _has_hooks(module)
    }
    for name in split:
        if name not in known:
            raise ConfigError(
                Problem(
                    "strategy.split",
                    "the model has no such part",
                    name,
                    "names of its submodules",
                    nearest(name, known),
                )
            )
        if around := next((one for one in whole if name.startswith(f"{one}.")), None):
            raise ConfigError(
                Problem("strategy.split", f"lies within {around}, which {whole[around]}", name)
            )


def _require_a_chain(whole: fx.GraphModule, stages: int) -> None:
    """Require that each stage takes only what the previous one returns."""
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    for number, node in enumerate(calls):
        for taken in node.args:
            source = (
                taken.args[0]
                if taken.op == "call_function" and taken.target is operator.getitem
                else taken
            )
            if taken.op == "get_attr":
                message = (
                    f"stage {number} uses {taken.target}, and torch.fx can put only what "
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
                number == 0 and taken.op != "placeholder"
            ):
                message = (
                    f"stage {number} needs a value that stage {number - 1} does not pass on "
                    f"({taken.name})"
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


def _return_what_the_model_returns(whole: fx.GraphModule, last: int) -> None:
    """Make the last stage's values the model's own output, such as a dict: `split_module` leaves it
    to what calls the stages.
    """
    stage = whole.get_submodule(f"submod_{last}")
    assert isinstance(stage, fx.GraphModule)
    values: Any = stage.graph.output_node().args[0]

    def of_last(node: fx.Node) -> Any:
        source, place = node.args if node.target is operator.getitem else (node, None)
        if not isinstance(source, fx.Node) or source.target != f"submod_{last}":
            message = (
                f"the model returns a value that the last stage does not compute ({node.name})"
            )
            raise ConfigError(
                Problem(
                    "strategy.split", message, expected="a place before all that the model returns"
                )
            )
        return values if place is None else values[place]

    stage.graph.output_node().args = (fx.map_arg(whole.graph.output_node().args[0], of_last),)
    stage.recompile()


def _require_no_sharing(stages: Sequence[nn.Module], split: Sequence[str]) -> None:
    seen = dict[int, int]()
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if seen.setdefault(id(parameter), number) != number:
                raise ConfigError(
                    Problem(
                        "strategy.split",
                        f"two stages share the parameter {name}",
                        list(split),
                        "stages with parameters of their own",
                    )
                )


def draws(stage: nn.Module) -> str | None:
    """The name of a layer or function that by its kind draws random numbers in training, or None.

    Others are noticed when they draw.
    """
    if isinstance(stage, fx.GraphModule):
        for node in stage.graph.nodes:
            if node.op in ("call_function", "call_method") and _function_draws(node):
                return node.name
    return next((name for name, part in stage.named_modules() if _layer_draws(part)), None)


def _layer_draws(layer: nn.Module) -> bool:
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        return layer.dropout > 0 and getattr(layer, "num_layers", 2) > 1
    return isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d) or (
        isinstance(layer, DROPOUTS) and getattr(layer, "p", 1.0) > 0
    )


def _function_draws(node: fx.Node) -> bool:
    name: str = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    )
    if name in MAY_DRAW:
        return bool(
            node.kwargs.get(
                "dropout_p", node.args[4] if name == MAY_DRAW[0] and len(node.args) > 4 else 0.0
            )
        )
    operators = getattr(torch.ops.aten, name, None)
    tagged = operators is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(operators, one).tags
        for one in operators.overloads()
    )
    return tagged or "dropout" in name or name in DRAWING


def name_of_draw(stage: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> str:
    """Runs the stage.

    The name of the first layer or function in it that draws random numbers, or an empty text.
    """
    found: list[str] = []

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            before = Generators.now(device)
            value = super().run_node(n)
            if before.differ(device):
                found.append(str(n.target) if n.op == "call_module" else n.name)
            return value

    assert isinstance(stage, fx.GraphModule)
    Watched(stage).run(*inputs)
    return found[0] if found else ""
