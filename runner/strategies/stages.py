"""A model split into stages, each in its own process, for the strategies `pipeline` and `rpc`.

A stage is a graph over the model's own layers (torch.fx), so it computes what the model computes. Every process has the whole model: what is divided is
the work and the memory of activations. After a step's backward pass each process hands the gradients of its stage to the others; so the weights are
whole and alike everywhere, and clipping, averages of weights, evaluation and checkpoints need not know of stages.
"""

from __future__ import annotations

import abc
import operator
import random
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from samewise.runner.errors import ConfigError, Problem, first_line, nearest, raised_at
from samewise.runner.processes.packing import from_rank
from samewise.runner.processes.peers import Processes
from samewise.runner.strategies.base import Tally, add_tallies
from samewise.runner.strategies.ranks import RankStrategy
from samewise.runner.strategies.recompute import is_recomputed
from samewise.runner.strategies.tree import copy_buffers

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
DRAWING = ("stochastic_depth", "gumbel_softmax", *(f"fractional_max_pool{n}d{more}" for n in (2, 3) for more in ("", "_with_indices")))
"""Functions that draw random numbers, beside torch's operators that are tagged so."""
MAY_DRAW = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators that are tagged, but draw only with dropout."""


class _Tracer(fx.Tracer):
    """Does not trace into modules whose activations are recomputed."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_recomputed(m) or super().is_leaf_module(m, module_qualified_name)


def cut_model(model: nn.Module, split: Sequence[str], *, opened: bool = False) -> list[nn.Module]:
    """Split the model into stages that share its layers; ConfigError if it cannot be traced, or not be cut there.

    Args:
        model: Takes tensors by position; its control flow does not depend on values.
        split: The names of the submodules (`layer3`) at which a new stage begins, in order.
        opened: Look into modules whose activations are computed twice, to see all that is called: the stages do not do that, then.
    """
    _require_names(model, split)
    tracer = fx.Tracer() if opened else _Tracer()
    before = Generators.now()
    try:
        nodes = tracer.trace(model)
        graph = fx.GraphModule(tracer.root, nodes, type(model).__name__)
    except Exception as error:
        hint = f"choose a model that torch.fx.symbolic_trace can trace, or strategy=elastic; {raised_at(error, anywhere=False)}".rstrip("; ")
        raise ConfigError(Problem("model", f"cannot be cut into stages: {first_line(error)}", type(model).__name__, hint=hint)) from error
    if not opened and before.differ():
        message = "draws random numbers where torch.fx sees no operator, so that they would be the same in every step"
        raise ConfigError(Problem("model", message, type(model).__name__, hint="strategy=elastic"))
    number, numbers = 0, dict[fx.Node, int]()
    for node in graph.graph.nodes:
        if number < len(split) and any(f"{path}.".startswith(f"{split[number]}.") for path in _around(node)):
            number += 1
        numbers[node] = number
    if number < len(split):
        words = "the model does not call this part, or calls it in another order"
        raise ConfigError(Problem("strategy.split", words, split[number], "parts in the order in which they are called"))
    whole = split_module(graph, model, lambda node: numbers[node])
    _require_a_chain(whole, len(split) + 1)
    stages = [whole.get_submodule(f"submod_{number}") for number in range(len(split) + 1)]
    _require_no_sharing(stages, split)
    return stages


def _around(node: fx.Node) -> list[str]:
    """The names of the modules in which a node is called, and its own if it is one."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _require_names(model: nn.Module, split: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules() if name]
    of_values = (name for named in (model.named_parameters, model.named_buffers) for name, _ in named())
    if strange := next((name for name in (*known, *of_values) if not re.fullmatch(r"[\w.-]+", name)), None):
        expected = "letters, digits, _ and -, because torch.fx generates code with these names"
        raise ConfigError(Problem("model", "has a module or parameter whose name torch.fx cannot use to cut the model", strange, expected))
    whole = [name for name, module in model.named_modules() if is_recomputed(module)]
    for name in split:
        if name not in known:
            raise ConfigError(Problem("strategy.split", "the model has no such part", name, "names of its submodules", nearest(name, known)))
        if around := next((one for one in whole if name.startswith(f"{one}.")), None):
            raise ConfigError(Problem("strategy.split", f"lies within {around}, which activation_checkpointing recomputes as a whole", name))


def _require_a_chain(whole: fx.GraphModule, stages: int) -> None:
    """Require that each stage takes only what the previous one returns."""
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    for number, node in enumerate(calls):
        for taken in node.args:
            source = taken.args[0] if taken.op == "call_function" and taken.target is operator.getitem else taken
            if taken.op == "get_attr":
                message = f"stage {number} uses {taken.target}, and torch.fx can put only what layers of torch.nn hold into a stage"
                raise ConfigError(Problem("model", message, hint="choose a model in which only layers have parameters and buffers, or strategy=elastic"))
            if source is not (calls[number - 1] if number else source) or (number == 0 and taken.op != "placeholder"):
                message = f"stage {number} needs a value that stage {number - 1} does not pass on ({taken.name})"
                raise ConfigError(Problem("strategy.split", message, expected="a place that a single value passes through, such as between a ResNet's stages"))
    if len(calls) != stages:
        raise ConfigError(Problem("strategy.split", "a stage would be empty", expected="parts that compute something, other than the model's first"))


def _require_no_sharing(stages: Sequence[nn.Module], split: Sequence[str]) -> None:
    seen = dict[int, int]()
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if seen.setdefault(id(parameter), number) != number:
                raise ConfigError(Problem("strategy.split", f"two stages share the parameter {name}", list(split), "stages with parameters of their own"))


def draws(stage: nn.Module) -> str | None:
    """The name of a layer or function that by its kind draws random numbers in training, or None. Others are noticed when they draw."""
    if isinstance(stage, fx.GraphModule):
        for node in stage.graph.nodes:
            if node.op in ("call_function", "call_method") and _function_draws(node):
                return node.name
    return next((name for name, part in stage.named_modules() if _layer_draws(part)), None)


def _layer_draws(layer: nn.Module) -> bool:
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        return layer.dropout > 0 and getattr(layer, "num_layers", 2) > 1
    return isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d) or (isinstance(layer, DROPOUTS) and getattr(layer, "p", 1.0) > 0)


def _function_draws(node: fx.Node) -> bool:
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in MAY_DRAW:
        return bool(node.kwargs.get("dropout_p", node.args[4] if name == MAY_DRAW[0] and len(node.args) > 4 else 0.0))
    operators = getattr(torch.ops.aten, name, None)
    tagged = operators is not None and any(torch.Tag.nondeterministic_seeded in getattr(operators, one).tags for one in operators.overloads())
    return tagged or "dropout" in name or name in DRAWING


def name_of_draw(stage: nn.Module, inputs: Sequence[Tensor], device: torch.device) -> str:
    """Runs the stage; the name of the first layer or function in it that draws random numbers, or an empty text."""
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


@dataclass(frozen=True)
class Generators:
    """The states of Python's, NumPy's and torch's generators."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None = None) -> Generators:
        """Those of the CPU, and the device's if it is CUDA."""
        cuda = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda)

    def set(self, device: torch.device) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def differ(self, device: torch.device | None = None) -> bool:
        """Whether any was drawn from since."""
        now = Generators.now(device)
        pairs = [(self.torch, now.torch), *([(self.cuda, now.cuda)] if self.cuda is not None and now.cuda is not None else [])]
        tensors = all(torch.equal(before, after) for before, after in pairs)
        numpy = self.numpy[2:] == now.numpy[2:] and np.array_equal(self.numpy[1], now.numpy[1])
        return not (tensors and numpy and self.python == now.python)


@dataclass(frozen=True)
class Surroundings:
    """The state around a forward pass: autocast, and the generators."""

    device: str
    autocast: bool
    dtype: torch.dtype
    generators: Generators

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), Generators.now(device))

    @contextmanager
    def enter(self, device: torch.device) -> Generator[None]:
        self.generators.set(device)
        with torch.autocast(self.device, self.dtype, enabled=self.autocast):
            yield


@final
class StageParts:
    """The stages' parameters and buffers, whose gradients and values every process receives."""

    def __init__(self, stages: Sequence[nn.Module], peers: Processes) -> None:
        self._trained = [[parameter for parameter in stage.parameters() if parameter.requires_grad] for stage in stages]
        self._stages = stages
        self._peers = peers

    def have_gradients(self) -> list[bool]:
        """Which parameters of this process's stage have a gradient; ConfigError if another stage's has one here, which nobody would receive."""
        others = (parameter for owner, trained in enumerate(self._trained) if owner != self._peers.rank for parameter in trained)
        if any(parameter.grad is not None for parameter in others):
            raise reads_weights()
        return [parameter.grad is not None for parameter in self._trained[self._peers.rank]]

    @torch.no_grad()
    def share(self, touched: Sequence[Sequence[bool]]) -> None:
        """Send each process's gradients and buffers to all. `touched` combines the results of `touched` of all processes."""
        for owner, marks in enumerate(touched):
            self._peers.doing = f"sharing the gradients of stage {owner}"
            trained = [parameter for parameter, mark in zip(self._trained[owner], marks, strict=True) if mark]
            mine, buffers = owner == self._peers.rank, list(self._stages[owner].buffers())  # looked up: a layer may assign another tensor to one
            tensors = [*(parameter.grad if mine and parameter.grad is not None else parameter for parameter in trained), *buffers]
            if not tensors:
                continue
            values = from_rank(owner, tensors)
            if not mine:
                for parameter, value in zip(trained, values, strict=False):
                    parameter.grad = value
                copy_buffers(buffers, values[len(trained) :])


def reads_weights() -> ConfigError:
    """The error for a recipe whose loss depends on weights of a stage in another process, such as by a penalty."""
    words = "uses the model's weights in its loss other than by calling the model, which stages do not support"
    return ConfigError(Problem("recipe", words, hint="strategy=elastic"))


@dataclass(frozen=True)
class ModelCall:
    """A recipe's call of the model: its input, and the state around it."""

    inputs: tuple[Tensor, ...]
    surroundings: Surroundings

    @property
    def form(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The inputs' shapes and dtypes."""
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.inputs)


class _CallCaptured(BaseException):
    """Ends a recipe at its model call with the input. Not an Exception, so that nothing catches it."""


class StandIn(nn.Module):
    """Stands in for the model in a recipe's loss. Its `modules` are those of the whole model, so that a recipe finds there what it finds in one process."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple: not a submodule
        self._device = device

    def named_modules(self, *given: Any, **further: Any) -> Generator[tuple[str, nn.Module]]:  # `modules` calls it
        yield from self._model[0].named_modules(*given, **further)


@final
class CallCapture(StandIn):
    """First captures the input of a recipe's call, then returns another process's output."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self._asked: ModelCall | None = None
        self._given: list[Any] = []
        self._begun: Generators | None = None

    def forward(self, *inputs: Any, **further: Any) -> Any:
        if self._given:
            self._begun = Generators.now(self._device)
            return self._given.pop()
        if further or not all(isinstance(value, Tensor) for value in inputs):
            hint = "strategy=elastic"
            raise ConfigError(Problem("recipe", "calls the model with arguments other than positional tensors, which stages cannot pass on", hint=hint))
        if self._asked is not None:
            raise ConfigError(Problem("recipe", "calls the model twice for a loss, which stages do not support", hint="strategy=elastic"))
        self._asked = ModelCall(inputs, Surroundings.now(self._device))
        raise _CallCaptured

    def capture_call(self, run: Callable[[], Any]) -> ModelCall:
        """The input of the model's call in `run`, which ends there."""
        self._asked = None
        with suppress(_CallCaptured):
            run()
        if self._asked is None:
            raise ConfigError(Problem("recipe", "does not call the model for its loss, so its input is unknown", hint="strategy=elastic"))
        asked, self._asked = self._asked, None
        return asked

    def run_with_output(self, output: Any, run: Callable[[], Any]) -> tuple[Any, bool]:
        """The result of `run` if the model returns `output`, and whether it draws random numbers after that."""
        self._given = [output]
        result = run()
        begun, self._begun = self._begun, None
        return result, begun is not None and begun.differ(self._device)


@dataclass(kw_only=True, eq=False)
class StageStrategy(RankStrategy, abc.ABC):
    """Each process runs one stage; `nproc=null` means one process per stage. The other settings are those of `RankStrategy`.

    Args:
        split: The names of the submodules at which a new stage begins, in order; one stage, and process, more than names.
        rank_invariant: Says to the fingerprint that the result is that of one process.
    """

    pretends = False

    split: Sequence[str]
    rank_invariant: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.split:
            raise ConfigError(Problem("split", "does not name a place to cut the model", list(self.split), "names of submodules", "strategy.split=[layer3]"))

    def processes(self, device: str, replicas: int) -> int:
        if replicas > 1:  # each replica would need its own processes
            reason, hint = f"{self._strategy_name} cuts the model, not the batch: it carries one replica", "replicas=1, and accumulate=N for micro-batches"
            raise ConfigError(Problem("replicas", reason, replicas, "1", hint))
        return self._require_one_for_each_stage(self.count_processes(device, otherwise=len(self.split) + 1))

    def begin(self, device: str, replicas: int, accumulate: int) -> None:
        self.processes(device, replicas)
        self._require_one_for_each_stage(self.size)
        self._meet(device, accumulate)

    @property
    def _strategy_name(self) -> str:
        return f"strategy={type(self).__name__.lower()}"

    def _require_one_for_each_stage(self, size: int) -> int:
        stages = len(self.split) + 1
        if size != stages:
            reason = f"{self._strategy_name} with {stages} stages (cut at {', '.join(self.split)}) cannot run in {size} process{'es' * (size > 1)}"
            raise ConfigError(Problem("strategy.nproc", reason, size, f"{stages}, or null", "strategy.split needs one name for each process after the first"))
        return size

    def _keep_stages(self, stages: list[nn.Module]) -> None:
        """Keep the model's stages, whose gradients `reduce` sends to all."""
        assert isinstance(self.peers, Processes)
        self._stages, self._parts = stages, StageParts(stages, self.peers)

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        everyone, touched = self.gather(tallies, self._parts.have_gradients())
        self._parts.share(touched)
        return add_tallies(everyone)
