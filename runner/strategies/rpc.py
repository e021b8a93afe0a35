"""Strategy that cuts the model into stages: the first in this process, the others remote modules.

Built on torch.distributed.rpc with distributed autograd.
"""

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
from samewise.runner.errors import ConfigError
from samewise.runner.strategies.base import Forward, Tally
from samewise.runner.strategies.cutting import cut_model
from samewise.runner.strategies.sealed import seal, unseal
from samewise.runner.strategies.stages import StageStrategy, StandIn, reads_weights
from samewise.runner.strategies.surroundings import Generators, Surroundings

_PURPOSE = "a remote call"


@final
@dataclass(kw_only=True, eq=False)
class RPC(StageStrategy):
    """Model in stages, driven by the first process, which calls the others remotely.

    Distributed autograd runs the backward pass through the stages. Micro-batches run one after
    another, each in its own autograd context, so gradients are added as in one process, to the same
    bits. `RankStrategy` has the other settings; `nproc=null` means one for each stage, and
    `timeout_s` applies to remote calls too.

    Args:
        rank_invariant: Whether the fingerprint is that of one process.
        split: Names of the submodules at which a new stage begins, in order. There is one stage,
            and process, more than names.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._serving = False

    def require_fit(self, model: nn.Module) -> None:
        self._cut(model)

    def _cut(self, model: nn.Module) -> list[nn.Module]:
        for name, parameter in model.named_parameters():
            ConfigError.raise_if(
                parameter._post_accumulate_grad_hooks,  # pyright: ignore[reportPrivateUsage]
                "model",
                f"has a hook that distributed autograd does not call ({name}: "
                "register_post_accumulate_grad_hook)",
                type(model).__name__,
                hint="strategy=pipeline, or strategy=elastic",
            )
        return cut_model(model, self.split)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._keep_stages(self._cut(model))
        _local.stage = RemoteStage(self._stages[self.peers.rank], self._device)
        _local.gradients = Gradients([])
        devices = self.peers.gather(str(self._device))
        self._begin_serving(devices)
        if self.peers.rank > 0:
            # The first process calls this process's stage.
            return model
        # The remote process calls it like a class.
        stage_class: Any = _local_stage
        remote = [
            RemoteModule(f"{_name(rank)}/{device}", stage_class)
            for rank, device in enumerate(devices)
            if rank > 0
        ]
        parameters = [rpc.RRef(parameter) for parameter in _local.stage.parameters()] + [
            rref for module in remote for rref in module.remote_parameters()
        ]
        # It logs an error for a class other than torch's optimizers.
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
        self._gradients: Any = DistributedOptimizer(_make_gradients, parameters)
        return Driver(model, _local.stage.stage, remote, self._device)

    def _begin_serving(self, devices: Sequence[str]) -> None:
        self.peers.doing = "starting to serve remote calls"
        options = rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=self.timeout_s, init_method=self.peers.first(_rpc_address)
        )
        if self._device.type == "cuda" and self.peers.rank == 0:
            for rank, device in enumerate(devices):
                if rank > 0:
                    options.set_device_map(_name(rank), {self._device: torch.device(device)})
        seal_calls()
        with warnings.catch_warnings():
            # Torch's own call triggers this warning.
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
        """Run the micro-batches in the first process; the others serve its calls meanwhile."""
        # Other processes may still be stepping until they meet here.
        self.peers.gather(None)
        tallies, own_ids = list[Tally](), set(map(id, _local.stage.parameters()))
        for micro in micro_batches:
            self.peers.doing = "calling the other stages"
            with autograd.context() as context:
                loss, gradient, tally = forward(micro)
                # Distributed autograd begins with 1, and takes no other gradient
                autograd.backward(context, [loss * gradient])  # pyright: ignore[reportPrivateImportUsage]
                gradients = autograd.get_gradients(context)  # pyright: ignore[reportPrivateImportUsage]
                if any(id(x) not in own_ids for x in gradients):
                    raise reads_weights()
                self._gradients.step(context)
            tallies.append(tally())
        self.peers.gather(None)
        return tallies

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        _local.gradients.give_back()
        return super().reduce(tallies)

    def abandon(self, error: BaseException) -> None:
        super().abandon(error)
        if self._serving:
            self._serving = False
            with suppress(RuntimeError):
                # A graceful one waits for all ranks, of which this one has failed
                rpc.shutdown(graceful=False)

    def end(self) -> None:
        if self._serving:
            self._serving = False
            rpc.shutdown()
        super().end()


@final
class RemoteStage(nn.Module):
    """A process's stage, called from another process."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.stage = stage
        self._device = device

    def forward(self, surroundings: Surroundings, *inputs: Tensor) -> tuple[Any, Generators]:
        """Return the stage's output, and the generators' states after it."""
        with surroundings.enter(self._device):
            return self.stage(*inputs), Generators.now(self._device)


@final
class Driver(StandIn):
    """Calls the first stage in this process, and the others remotely, in order.

    Each starts with the generators as the previous one left them.
    """

    def __init__(
        self,
        model: nn.Module,
        first_stage: nn.Module,
        remote_stages: Sequence[RemoteModule],
        device: torch.device,
    ) -> None:
        super().__init__(model, device)
        self._first_stage = first_stage
        # A plain list: a remote module is not a submodule.
        self._remote_stages = list(remote_stages)

    def forward(self, *inputs: Tensor) -> Any:
        value = self._first_stage(*inputs)
        for stage in self._remote_stages:
            value, generators = stage(
                Surroundings.now(self._device), *(value if isinstance(value, tuple) else (value,))
            )
            generators.set(self._device)
        return value


@final
class Gradients:
    """Sum of a step's gradients, which DistributedOptimizer calls in place of an optimizer.

    The config's optimizers step later, once the gradients of all micro-batches have been added,
    divided by their counts, clipped and checked.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        """Add the gradients that the parameters hold."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                total = self._sums.get(parameter)
                self._sums[parameter] = (
                    parameter.grad if total is None else total.add_(parameter.grad)
                )
                parameter.grad = None

    def give_back(self) -> None:
        """Set the sums as the parameters' gradients, and start a new step."""
        for parameter, value in self._sums.items():
            parameter.grad = value
        self._sums = {}


@final
class LocalObjects:
    """Objects of this process that remote calls use."""

    stage: RemoteStage
    gradients: Gradients


_local = LocalObjects()


def _local_stage() -> nn.Module:
    return _local.stage


def _make_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    _local.gradients = Gradients(parameters)
    return _local.gradients


def _name(rank: int) -> str:
    return f"rank{rank}"


def seal_calls() -> None:
    """Authenticate the messages of remote calls, which torch unpickles, with this run's secret."""
    # Otherwise anyone who reaches the port could call anything.
    kind: Any = internal._InternalRPCPickler  # pyright: ignore[reportPrivateUsage]
    if hasattr(kind, "sealed"):
        return
    serialize, deserialize = kind.serialize, kind.deserialize

    def sealed(self: Any, value: Any) -> Any:
        binary, tensors = serialize(self, value)
        return seal(binary, _PURPOSE), tensors

    def unsealed(self: Any, binary: bytes, tensors: Any) -> Any:
        return deserialize(self, unseal(binary, _PURPOSE), tensors)

    kind.serialize, kind.deserialize, kind.sealed = sealed, unsealed, True


def _rpc_address() -> str:
    """Return the address of RPC's rendezvous: the agent's store, or a port without an agent."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    with socket.socket() as probe:
        probe.bind(("", 0))
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        return f"tcp://{host}:{probe.getsockname()[1]}"
