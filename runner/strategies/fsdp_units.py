"""Watches the units of a model under FSDP: what each process's loss depends on, which may differ, as
with several heads or experts; and backward passes in which torch hangs, or may add wrong gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.sharding import parts
from samewise.runner.torch_private import current_autograd_node, current_graph_task_id

OTHER_STRATEGIES = "strategy=elastic, or strategy=ddp with strategy.find_unused_parameters=true"


class Used:
    """Marks the parameters that get a gradient in this process, and the units that it calls.

    torch would sum a unit's gradients packed: those of different parameters together, without an
    error if they have as many elements. So all take part, those that were not used with zeros; what
    no process used has no gradient after that, as in other strategies, since weight decay and
    momentum would move it.
    """

    def __init__(self, model: nn.Module, *, reshards: bool) -> None:
        self._model, self._reshards = model, reshards
        self._place = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        self._marks, self._calls = 0, list[int]()
        names = {id(module): name for name, module in model.named_modules()}
        for number, part in enumerate(parts(model)):
            assert isinstance(part, nn.Module)
            part.set_reduce_scatter_unused_params(True)
            part.unshard()  # the tensors that get the gradients exist from here on
            for name, parameter in part.named_parameters(prefix=names[id(part)]):
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._mark, self._place[name])
                    )
            part.reshard()
            if number:  # the model's own weights, which are part 0, are gathered for the whole step
                part.register_forward_pre_hook(partial(self._enter, number))

    def _enter(self, number: int, part: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls.append(number)

    def _mark(self, place: int, parameter: Tensor) -> None:
        self._marks |= 1 << place

    def take(self) -> tuple[int, str]:
        """This process's marks since the last call, and a digest of its calls."""
        calls = self._calls if self._reshards else list(dict.fromkeys(self._calls))
        taken = self._marks, hashlib.sha256(str(calls).encode()).hexdigest()
        self._marks, self._calls = 0, []
        return taken

    def settle(self, everyone: Sequence[tuple[int, str]]) -> None:
        """Remove the gradients of what no process used.

        ConfigError if the processes called different units, whose weights torch has then mixed up.
        """
        if len({calls for _, calls in everyone}) > 1:
            message = (
                "the processes call different layers, or in another order, and each layer is "
                "gathered in all of them as it is called"
            )
            raise ConfigError(
                Problem(
                    "strategy.shard",
                    message,
                    expected="modules that every process calls in every step",
                    hint=OTHER_STRATEGIES,
                )
            )
        used = 0
        for marks, _ in everyone:
            used |= marks
        for name, parameter in self._model.named_parameters():
            if not used >> self._place[name] & 1:
                parameter.grad = None


def require_all_called(model: nn.Module, units: Sequence[str]) -> None:
    """Raise a ConfigError if the model drops layers at random: each process draws the layers that
    it leaves out.
    """
    for name, module in model.named_modules():
        rate = getattr(module, "layer_drop", None)  # torchaudio's
        if (
            isinstance(rate, float)
            and rate > 0
            and (own := [unit for unit in units if unit.startswith(f"{name}.")])
        ):
            message = (
                f"each process drops other layers ({name}.layer_drop = {rate:g}), where each "
                "of strategy.shard is called by all or none"
            )
            hint = f"shard {name} as a whole; {OTHER_STRATEGIES}"
            raise ConfigError(
                Problem(
                    "strategy.shard", message, own, f"modules above {name}, or layer_drop = 0", hint
                )
            )
        for key, rate in getattr(
            getattr(module, "config", None), "__dict__", {}
        ).items():  # of transformers, which then drops no layer
            if (
                key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
                and isinstance(rate, float)
                and rate > 0
            ):
                message = (
                    f"transformers drops no layers under FSDP, and the model's {key} is {rate:g}"
                )
                raise ConfigError(
                    Problem("strategy", message, "fsdp", f"{key} = 0", OTHER_STRATEGIES)
                )


class SecondPasses:
    """Raises a ConfigError in the backward pass, before FSDP's own hooks exchange anything.

    Refused are a gradient that is differentiated itself, where it passes through a unit: FSDP frees
    the weights that the second backward pass reads; and a unit that is called several times, once
    or more within a reentrant checkpoint: FSDP reduces gradients after one of these, and may lose
    the others'.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self.forget()
        for number, part in enumerate(parts(model)):
            assert isinstance(part, nn.Module)
            part.register_forward_hook(partial(self._leave, names[id(part)]), prepend=True)
            if number:  # the model's own weights, which are part 0, are gathered for the whole step
                part.register_forward_pre_hook(partial(self._enter, number, names[id(part)]))

    def forget(self) -> None:
        """A step has ended."""
        # By unit, since the last backward pass: of its forward pass; within a reentrant checkpoint
        self._calls, self._repeated = (
            dict[int, int](),
            set[int](),
        )
        self._went_back = False

    def _enter(self, number: int, name: str, part: nn.Module, inputs: Any) -> None:
        goes_back = current_graph_task_id() != -1
        if self._went_back and not goes_back:
            self.forget()
        self._went_back = goes_back
        if not torch.is_grad_enabled():  # as in a reentrant checkpoint's forward pass
            return
        within = (
            goes_back
            and getattr(current_autograd_node(), "_forward_cls", None) is CheckpointFunction
        )
        if (
            within or not goes_back
        ):  # otherwise a checkpoint that is not reentrant computes again what was counted
            self._calls[number] = self._calls.get(number, 0) + 1
        if within:
            self._repeated.add(number)
        if number in self._repeated and self._calls[number] > 1:
            message = (
                "has a unit that is called several times, also within a reentrant checkpoint, "
                "for which torch's FSDP may add wrong gradients"
            )
            raise ConfigError(
                Problem(
                    "model",
                    message,
                    name,
                    hint="checkpoint(..., use_reentrant=False), or activation_checkpointing=[...]",
                )
            )

    def _leave(self, name: str, part: nn.Module, inputs: Any, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(
                    partial(_require_first, name or type(part).__name__.removeprefix("FSDP"))
                )


def _require_first(name: str, gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass only with create_graph=True
        message = (
            "differentiates a gradient (create_graph=True), as for a gradient penalty, and "
            "torch's FSDP cannot"
        )
        raise ConfigError(
            Problem("recipe, model", message, name, hint="strategy=elastic, or strategy=ddp")
        )
