"""Watches the units of a model under FSDP.

Each process's loss may depend on other units, as with several heads or experts, and in some
backward passes torch hangs or may add wrong gradients.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.sharding import parts

OTHER_STRATEGIES = "strategy=elastic, or strategy=ddp with strategy.find_unused_parameters=true"


class UsedParameters:
    """Marks the parameters that get a gradient in this process, and the units that it calls.

    Torch sums a unit's gradients packed: those of different parameters are added without an error
    if they have as many elements. All parameters therefore take part, unused ones with zeros.
    Parameters that no process used have no gradient afterwards, as in other strategies, since
    weight decay and momentum would move them.
    """

    def __init__(self, model: nn.Module, *, reshards: bool) -> None:
        self._model, self._reshards = model, reshards
        self._index = {name: index for index, (name, _) in enumerate(model.named_parameters())}
        self._marks, self._calls = 0, list[int]()
        names = {id(module): name for name, module in model.named_modules()}
        for number, part in enumerate(parts(model)):
            assert isinstance(part, nn.Module)
            part.set_reduce_scatter_unused_params(True)
            # The tensors that get the gradients exist from here on.
            part.unshard()
            for name, parameter in part.named_parameters(prefix=names[id(part)]):
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._mark, self._index[name])
                    )
            part.reshard()
            # Part 0 has the model's own weights, which are gathered for the whole step.
            if number:
                part.register_forward_pre_hook(partial(self._enter, number))

    def _enter(self, number: int, part: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls.append(number)

    def _mark(self, index: int, parameter: Tensor) -> None:
        self._marks |= 1 << index

    def take(self) -> tuple[int, str]:
        """Return this process's marks since the last call, and a digest of its calls."""
        # Without resharding, only a unit's first call gathers its weights
        calls = self._calls if self._reshards else list(dict.fromkeys(self._calls))
        # Both are short, so that a step's message stays within one collective (`Processes.ROOM`)
        usage = self._marks, hashlib.sha256(str(calls).encode()).hexdigest()
        self._marks, self._calls = 0, []
        return usage

    def settle(self, usage_by_rank: Sequence[tuple[int, str]]) -> None:
        """Remove the gradients of parameters that no process used.

        Raises:
            ConfigError: The processes called different units, whose weights torch has then mixed
                up.
        """
        ConfigError.raise_if(
            len({calls for _, calls in usage_by_rank}) > 1,
            "strategy.shard",
            "the processes call different layers, or in another order, and each layer is "
            "gathered in all of them as it is called",
            expected="modules that every process calls in every step",
            hint=OTHER_STRATEGIES,
        )
        used_anywhere = 0
        for marks, _ in usage_by_rank:
            used_anywhere |= marks
        for name, parameter in self._model.named_parameters():
            if not used_anywhere >> self._index[name] & 1:
                parameter.grad = None


def require_all_called(model: nn.Module, units: Sequence[str]) -> None:
    """Raise a ConfigError if the model drops layers at random, since each process draws its own."""
    for name, module in model.named_modules():
        # torchaudio's name
        rate = getattr(module, "layer_drop", None)
        if (
            isinstance(rate, float)
            and rate > 0
            and (dropped_units := [unit for unit in units if unit.startswith(f"{name}.")])
        ):
            raise ConfigError(
                Problem(
                    "strategy.shard",
                    f"each process drops other layers ({name}.layer_drop = {rate:g}), where each "
                    "of strategy.shard is called by all or none",
                    dropped_units,
                    f"modules above {name}, or layer_drop = 0",
                    f"shard {name} as a whole; {OTHER_STRATEGIES}",
                )
            )
        # The configuration of transformers, which drops no layer under FSDP.
        for key, rate in getattr(getattr(module, "config", None), "__dict__", {}).items():
            if (
                key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
                and isinstance(rate, float)
                and rate > 0
            ):
                raise ConfigError(
                    Problem(
                        "strategy",
                        f"transformers drops no layers under FSDP, and the model's {key} "
                        f"is {rate:g}",
                        "fsdp",
                        f"{key} = 0",
                        OTHER_STRATEGIES,
                    )
                )


def refuse_second_derivatives(model: nn.Module) -> None:
    """Make the model refuse the gradient of a gradient that passes through a unit.

    FSDP frees the weights that the second backward pass reads.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for part in parts(model):
        assert isinstance(part, nn.Module)
        part.register_forward_hook(partial(_watch_outputs, names[id(part)]), prepend=True)


def _watch_outputs(name: str, part: nn.Module, inputs: Any, outputs: Any) -> None:
    refuse = partial(_require_first_derivative, name or type(part).__name__.removeprefix("FSDP"))
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def _require_first_derivative(name: str, gradient: Tensor) -> None:
    # Gradients are enabled in a backward pass only with create_graph=True.
    if torch.is_grad_enabled():
        raise ConfigError(
            Problem(
                "recipe, model",
                "differentiates a gradient (create_graph=True), as for a gradient penalty, and "
                "torch's FSDP cannot",
                name,
                hint="strategy=elastic, or strategy=ddp",
            )
        )
