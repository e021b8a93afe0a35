"""Refuses the backward passes in which torch's FSDP hangs, or may add wrong gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.sharding import parts
from samewise.runner.torch_private import current_autograd_node, current_graph_task_id


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
