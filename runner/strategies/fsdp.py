"""Strategy on torch's fully sharded data parallelism (FSDP2), with one replica per process.

Each process holds a shard of the weights, gradients and optimizer state.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.optim import Optimizer

from samewise.runner.data.loading import MicroBatch
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, nearest
from samewise.runner.records.digest import begin, combine
from samewise.runner.strategies.base import Forward, Tally, add_tallies
from samewise.runner.strategies.fsdp_units import (
    UsedParameters,
    refuse_second_derivatives,
    require_all_called,
)
from samewise.runner.strategies.layout import Layout
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import OneReplicaEach
from samewise.runner.strategies.recompute import large_children, match_modules, recompute
from samewise.runner.strategies.sharding import (
    fill,
    parts,
    require_no_parameter_hooks,
    shard,
    take_whole_states,
    template,
    whole,
)
from samewise.runner.strategies.tree import copy_buffers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@final
class Shards(Layout):
    """Layout with a shard of every parameter, gradient and optimizer state in each process.

    Args:
        peers: The ranks.
        mesh: The processes, for torch: those that share the weights, last.
        template: The model before it was sharded, without values.
        cut: Shards a model in the same way.
    """

    def __init__(
        self,
        peers: Processes,
        *,
        mesh: DeviceMesh,
        template: nn.Module,
        cut: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(peers)
        self.shards = mesh.size(-1)
        self._processes, self._mesh, self._template, self._cut = peers, mesh, template, cut

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return take_whole_states(optimizer)

    def whole(self, state: Any) -> Any:
        self._processes.doing = "gathering a checkpoint's tensors"
        return whole(state, is_main=self.peers.is_main)

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return empty(
            shape,
            dtype=dtype,
            device_mesh=self._mesh,
            placements=[*[Replicate()] * (self._mesh.ndim - 1), Shard(0)],
        )

    def digests(self, tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
        """Combine the digests of a sharded tensor's shards."""
        # Each process reads its digests at once, since all processes need them.
        digests_by_rank = self.peers.gather(
            begin(
                [
                    tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    for tensor in tensors
                ],
                algorithm,
            )()
        )
        result = [
            # The first processes have a shard each, and the others copies
            combine(shards[: self.shards]) if isinstance(tensor, DTensor) else shards[0]
            for tensor, shards in zip(tensors, zip(*digests_by_rank, strict=True), strict=True)
        ]
        return lambda: result

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def copy_model(self, model: nn.Module) -> nn.Module:
        """Copy the model, sharded in the same way."""
        copied = copy.deepcopy(self._template)
        self._cut(copied)
        fill(copied, model)
        return copied


@final
@dataclass(kw_only=True, eq=False)
class FSDP(OneReplicaEach):
    """Fully sharded data parallelism (`torch.distributed.fsdp.fully_shard`).

    Weights are gathered for each unit's forward and backward pass, and gradients summed and
    scattered. `replicas` is the number of processes, and changes the result. Batch norm uses each
    process's own statistics, and its buffers follow rank 0. `RankStrategy` has the other settings.

    Args:
        rank_invariant: False: all settings belong to the fingerprint, except those of waiting and
            restarting.
        shard: Modules whose weights are gathered together, by class (`BasicBlock`) or name
            (`layer4.*`); null: the model's children with at least `shard_min_parameters`. All other
            weights are gathered for the whole step.
        shard_size: Number of processes that share the weights (HSDP: the first so many, the next,
            and so on each have all of them); null: all processes.
        shard_min_parameters: Fewest parameters of a child that is gathered separately.
        reshard_after_forward: Whether to free a unit's weights between its forward and backward
            pass; false needs more memory and a third less traffic.
        param_dtype: Dtype in which weights are gathered and computed, float16 or bfloat16; null:
            their own. Weights and optimizer stay float32.
        reduce_dtype: Dtype in which gradients are summed, float32, bfloat16 or float16; null:
            `param_dtype`.
        offload: cpu: weights, gradients and optimizer state are on the CPU between their uses, and
            the optimizer steps there; null: on the device.
        activation_checkpointing: Setting of older versions, for their runs; the experiment has one
            of its own now.

    Raises:
        ConfigError: A setting is out of its range.
    """

    shard: Sequence[str] | str | None = None
    shard_size: int | None = None
    shard_min_parameters: int = 100_000
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    offload: str | None = None
    activation_checkpointing: Sequence[str] | str = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            self.shard_min_parameters < 1,
            "shard_min_parameters",
            "is too small",
            self.shard_min_parameters,
            "at least 1",
        )
        choices = {"param_dtype": DTYPES, "reduce_dtype": DTYPES, "offload": ("cpu",)}
        for name, accepted in choices.items():
            value = getattr(self, name)
            ConfigError.raise_if(
                value is not None and value not in accepted,
                name,
                "is not supported",
                value,
                ", ".join(accepted),
                nearest(str(value), accepted),
            )
        self._model: nn.Module = nn.Identity()
        self._units: list[str] = []
        # The next step's micro-batches with samples in all processes
        self._with_samples: Sequence[int] = ()
        self._used: UsedParameters | None = None

    def processes(self, device: str, replicas: int) -> int:
        ConfigError.raise_if(
            self.shard_size is not None and (self.shard_size < 1 or replicas % self.shard_size),
            "strategy.shard_size",
            "does not divide the processes into groups of one size",
            self.shard_size,
            f"a divisor of replicas={replicas}",
        )
        return super().processes(device, replicas)

    def wrap(self, model: nn.Module) -> nn.Module:
        unit_modules = (
            large_children(model, self.shard_min_parameters)
            if self.shard is None
            else match_modules(model, self.shard, "strategy.shard")
        )
        self._model, self._units = model, [name for name, _ in unit_modules]
        recompute(model, self.activation_checkpointing, "strategy.activation_checkpointing")
        if not isinstance(self.peers, Processes):
            for name in ("param_dtype", "reduce_dtype", "offload"):
                ConfigError.raise_if(
                    getattr(self, name) is not None,
                    f"strategy.{name}",
                    "needs more than one process: a single one has nothing to exchange",
                    getattr(self, name),
                    "null",
                    "replicas=2; or precision=bf16 for any number of processes",
                )
            return model
        ConfigError.raise_if(
            not hasattr(FSDPModule, "reset_iter_state"),
            "strategy",
            f"needs a newer torch than {torch.__version__}",
            "fsdp",
            "2.14",
        )
        require_all_called(model, self._units)
        require_no_parameter_hooks(model)
        size, shards = self.peers.size, self.shard_size or self.peers.size
        mesh = (
            DeviceMesh.from_group(dist.group.WORLD, self._device.type)  # pyright: ignore[reportArgumentType]
            if shards == size
            else init_device_mesh(
                self._device.type, (size // shards, shards), mesh_dim_names=("copy", "shard")
            )
        )
        cut = partial(self._shard, mesh=mesh)
        self.layout = Shards(self.peers, mesh=mesh, template=template(model), cut=cut)
        cut(model)
        self._used = UsedParameters(model, reshards=self.reshard_after_forward)
        refuse_second_derivatives(model)
        return model

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        param, reduce = (
            None if name is None else DTYPES[name] for name in (self.param_dtype, self.reduce_dtype)
        )
        shard(
            model,
            self._units,
            mesh=mesh,
            policy=MixedPrecisionPolicy(param, reduce),
            output_dtype=None if param is None else torch.float32,
            reshard=self.reshard_after_forward,
            offload=CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
            if self.offload
            else OffloadPolicy(),
        )

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._gather_weights(model) if isinstance(model, FSDPModule) else nullcontext()

    @contextmanager
    def _gather_weights(self, model: FSDPModule) -> Generator[None]:
        """Gather all weights in every process."""
        assert isinstance(model, nn.Module)
        # Recipes call a model as often as a batch needs, which may differ between processes.
        self.peers.doing = "gathering the weights for an evaluation"
        for part in parts(model):
            part.unshard()
        model.set_reshard_after_forward(False)
        try:
            yield
        finally:
            model.set_reshard_after_forward(self.reshard_after_forward)
            # The model's own weights are gathered for the whole step
            model.set_reshard_after_forward(False, recurse=False)
            # Frees the weights that were gathered above
            model.reset_iter_state()

    def prepare_step(self, plan: Plan, step: int) -> None:
        self._with_samples = plan.with_samples(step)

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        self.peers.doing = "exchanging weights and gradients"
        if len(self._with_samples) == self.peers.size * self._accumulate:
            return super().carry(micro_batches, forward)
        counts = [
            sum(number // self._accumulate == rank for number in self._with_samples)
            for rank in range(self.peers.size)
        ]
        missing = max(counts) - len(micro_batches)
        lent, lender = None, counts.index(max(counts))
        if min(counts) < max(counts):
            lent = self.peers.gather(
                # `sent`, a function, cannot be pickled
                replace(micro_batches[0], sent=None) if self.peers.rank == lender else None
            )[lender]
        tallies = super().carry(micro_batches, forward)
        if lent is not None and missing:
            self._repeat_borrowed(lent, missing, forward)
        return tallies

    def _repeat_borrowed(self, lent: MicroBatch, times: int, forward: Forward) -> None:
        """Run another process's micro-batch and discard the result.

        Processes with more micro-batches, as in an epoch's last step, wait for it.
        """
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        for _ in range(times):
            loss, gradient, _ = forward(lent.copied())
            # Takes part in the exchange, and adds nothing
            loss.backward(gradient * 0.0)
        copy_buffers(list(self._model.buffers()), buffers)

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        all_tallies, usage = self.gather(tallies, None if self._used is None else self._used.take())
        if self._used is not None:
            self._used.settle(usage)
        self._follow_first(self._model, "sharing batch norm's statistics")
        return add_tallies(all_tallies)
