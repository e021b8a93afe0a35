"""The model as stages, the first in this process and the others as remote modules:
torch.distributed.rpc with distributed autograd.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import internal

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.strategies.base import Forward, Tally
from samewise.runner.strategies.cutting import cut_model
from samewise.runner.strategies.sealed import seal, unseal
from samewise.runner.strategies.stages import StageStrategy, StandIn, reads_weights
from samewise.runner.strategies.surroundings import Generators, Surroundings

_PURPOSE = "a remote call"


@final
@dataclass(kw_only=True, eq=False)
class RPC(StageStrategy):
    """The first process drives: its forward pass calls the other stages remotely, and distributed
    autograd runs the backward pass through them.

    One micro-batch after another, each in its own autograd context, so that gradients are added as
    in one process: the same bits.

    Its further settings are those of `RankStrategy`; `nproc=null` means one for each stage, and
    `timeout_s` holds for remote calls too.

    Args:
        rank_invariant: Says to the fingerprint that the result is that of one process.
        split: The names of the submodules at which a new stage begins, in order; one stage, and
            process, more than names.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._serving = False

    def require_fit(self, model: nn.Module) -> None:
        self._cut(model)

    def _cut(self, model: nn.Module) -> list[nn.Module]:
        for name, parameter in model.named_parameters():
            if parameter._post_accumulate_grad_hooks:  # pyright: ignore[reportPrivateUsage]
                words = (
                    f"has a hook that distributed autograd does not call ({name}: "
                    "register_post_accumulate_grad_hook)"
                )
                raise ConfigError(
                    Problem(
                        "model",
                        words,
                        type(model).__name__,
                        hint="strategy=pipeline, or strategy=elastic",
                    )
                )
        return cut_model(model, self.split)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._keep_stages(self._cut(model))
        _here.stage, _here.gradients = (
            Served(self._stages[self.peers.rank], self._device),
            Gradients([]),
        )
        devices = self.peers.gather(str(self._device))
        self._begin_serving(devices)
        if self.peers.rank > 0:
            return model  # others call this process's stage
        made: Any = _stage_here  # called there like a class
        remote = [
            RemoteModule(f"{_name(rank)}/{device}", made)
            for rank, device in enumerate(devices)
            if rank > 0
        ]
        parameters = [rpc.RRef(parameter) for parameter in _here.stage.parameters()] + [
            rref for module in remote for rref in module.remote_parameters()
        ]
        # It expects one of torch's optimizers
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
        self._gradients: Any = DistributedOptimizer(_gradients_here, parameters)
        return Driver(model, _here.stage.stage, remote, self._device)

    def _begin_serving(self, devices: Sequence[str]) -> None:
        self.peers.doing = "starting to serve remote calls"
        options = rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=self.timeout_s, init_method=self.peers.first(_meeting_place)
        )
        if self._device.type == "cuda" and self.peers.rank == 0:
            for rank, device in enumerate(devices):
                if rank > 0:
                    options.set_device_map(_name(rank), {self._device: torch.device(device)})
        seal_calls()
        with warnings.catch_warnings():
            # Torch's own call triggers this warning
            warnings.filterwarnings("ignore", message="You are using a Backend")
            rpc.init_rpc(
                _name(self.peers.rank),
                rank=self.peers.rank,
                world_size=self.peers.size,
                rpc_backend_options=options,
            )
        self._serving = True

    @property
    def micro_batches(self) -> Sequence[int]:
        return range(self._accumulate if self.peers.rank == 0 else 0)

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        """As the base class, in the first process.

        The others serve its calls between two meetings, until which they may still be stepping.
        """
        self.peers.gather(None)
        tallies, mine = list[Tally](), set(map(id, _here.stage.parameters()))
        for micro in micro_batches:
            self.peers.doing = "calling the other stages"
            with autograd.context() as context:
                loss, first, tally = forward(micro)
                autograd.backward(context, [loss * first])  # pyright: ignore[reportPrivateImportUsage]
                if any(id(one) not in mine for one in autograd.get_gradients(context)):  # pyright: ignore[reportPrivateImportUsage]
                    raise reads_weights()
                self._gradients.step(context)
            tallies.append(tally())
        self.peers.gather(None)
        return tallies

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        _here.gradients.give_back()
        return super().reduce(tallies)

    def abandon(self, error: BaseException) -> None:
        super().abandon(error)
        if self._serving:
            self._serving = False
            with suppress(RuntimeError):
                rpc.shutdown(graceful=False)

    def end(self) -> None:
        if self._serving:
            self._serving = False
            rpc.shutdown()
        super().end()


@final
class Served(nn.Module):
    """A process's stage, called from another process."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.stage = stage
        self._device = device

    def forward(self, surroundings: Surroundings, *inputs: Tensor) -> tuple[Any, Generators]:
        """What the stage gives, and the generators' states after it."""
        with surroundings.enter(self._device):
            return self.stage(*inputs), Generators.now(self._device)


@final
class Driver(StandIn):
    """Calls the first stage here, and the others remotely in order, each with the generators as the
    one before left them.
    """

    def __init__(
        self,
        model: nn.Module,
        first: nn.Module,
        others: Sequence[RemoteModule],
        device: torch.device,
    ) -> None:
        super().__init__(model, device)
        self._first = first
        self._others = list(others)  # a plain list: a remote module is not a submodule

    def forward(self, *inputs: Tensor) -> Any:
        value = self._first(*inputs)
        for stage in self._others:
            value, after = stage(
                Surroundings.now(self._device), *(value if isinstance(value, tuple) else (value,))
            )
            after.set(self._device)
        return value


@final
class Gradients:
    """Called by DistributedOptimizer in each process in place of an optimizer: adds one
    micro-batch's gradients to the step's sum.

    The optimizers of the config step later, when the gradients of all micro-batches are there,
    divided by what they count, clipped and checked.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        """Add the gradients that the parameters hold."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                before = self._sums.get(parameter)
                self._sums[parameter] = (
                    parameter.grad if before is None else before.add_(parameter.grad)
                )
                parameter.grad = None

    def give_back(self) -> None:
        """Set the sums as the parameters' gradients, and start a new step."""
        for parameter, value in self._sums.items():
            parameter.grad = value
        self._sums = {}


@final
class Here:
    """The objects that remote calls use in this process."""

    stage: Served
    gradients: Gradients


_here = Here()


def _stage_here() -> nn.Module:
    return _here.stage


def _gradients_here(parameters: Sequence[nn.Parameter]) -> Gradients:
    _here.gradients = Gradients(parameters)
    return _here.gradients


def _name(rank: int) -> str:
    return f"rank{rank}"


def seal_calls() -> None:
    """Authenticate the messages that torch unpickles for remote calls with this run's secret:
    otherwise whoever reaches the port could call anything.
    """
    kind: Any = internal._InternalRPCPickler  # pyright: ignore[reportPrivateUsage]
    if hasattr(kind, "sealed"):
        return
    serialize, deserialize = kind.serialize, kind.deserialize

    def sealed(self: Any, said: Any) -> Any:
        binary, tensors = serialize(self, said)
        return seal(binary, _PURPOSE), tensors

    def unsealed(self: Any, binary: bytes, tensors: Any) -> Any:
        return deserialize(self, unseal(binary, _PURPOSE), tensors)

    kind.serialize, kind.deserialize, kind.sealed = sealed, unsealed, True


def _meeting_place() -> str:
    """Where the processes exchange their RPC addresses: the agent's store if there is an agent,
    otherwise a separate port.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{probe.getsockname()[1]}"
