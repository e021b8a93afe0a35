"""Strategy on torch's own DistributedDataParallel, with one replica per process.

It is fast, but its bits depend on the number of processes.
"""

import inspect
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samewise.runner.data.loading import MicroBatch
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.strategies.base import Forward, Tally, add_tallies
from samewise.runner.strategies.layout import Layout
from samewise.runner.strategies.packing import from_rank
from samewise.runner.strategies.peers import Processes
from samewise.runner.strategies.ranks import OneReplicaEach
from samewise.runner.strategies.simulated import SimulatedPeers
from samewise.runner.strategies.sync_batch_norm import (
    batch_norms,
    require_cuda,
    require_samples,
    synchronise,
)
from samewise.runner.strategies.tree import copy_buffers

HOOKS = ("fp16", "bf16", "powersgd")


@final
@dataclass(kw_only=True, eq=False)
class DDP(OneReplicaEach):
    """Data parallelism by all-reduce, which adds gradients in an unspecified order.

    `replicas` is the number of processes, and changes the result. Repeated on as many processes, a
    run has the same bits. Resumed on three or more it may not: DDP rearranges its buckets after the
    first step, and PowerSGD's error feedback is not saved, so a resumed run starts it anew after
    `powersgd_start_step` steps. `RankStrategy` has the other settings.

    Args:
        rank_invariant: False: all settings belong to the fingerprint, except those of waiting and
            restarting.
        bucket_mb: MiB of gradients that are exchanged at a time.
        static_graph: Whether every step uses the same parameters in the same order.
        find_unused_parameters: Whether to search in each step for parameters that the loss does not
            depend on.
        hook: Compression of exchanged gradients: fp16, bf16 or powersgd (Vogels et al. 2019, arXiv
            1905.13727); an object that DDP calls with None and a bucket instead of its all-reduce
            (`register_comm_hook`); null for none.
        powersgd_rank: Rank of PowerSGD's approximation.
        powersgd_start_step: Steps before PowerSGD begins.
        zero: Whether each process keeps only its share of the optimizer's state (Rajbhandari et al.
            2019, arXiv 1910.02054, first stage).
        sync_batch_norm: Whether batch norms use the mean and variance of all processes' samples
            (torch.nn.SyncBatchNorm); on CUDA devices only.

    Raises:
        ConfigError: A setting is out of its range.
    """

    level = "R0"
    compiles = True

    bucket_mb: float = 25.0
    static_graph: bool = False
    find_unused_parameters: bool = False
    hook: str | Callable[..., Any] | None = None
    powersgd_rank: int = 1
    powersgd_start_step: int = 1000
    zero: bool = False
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ConfigError.raise_if(
            isinstance(self.hook, str) and self.hook not in HOOKS,
            "hook",
            "no such hook",
            self.hook,
            f"{', '.join(HOOKS)}, or a _target_ of your own",
            nearest(str(self.hook), HOOKS),
        )
        ConfigError.raise_if(
            not self.bucket_mb > 0, "bucket_mb", "must be greater than 0", self.bucket_mb
        )
        ConfigError.raise_if(
            self.powersgd_rank < 1,
            "powersgd_rank",
            "is too small",
            self.powersgd_rank,
            "at least 1",
        )
        ConfigError.raise_if(
            self.powersgd_start_step < 2,
            "powersgd_start_step",
            "PowerSGD cannot start before DDP has arranged its buckets",
            self.powersgd_start_step,
            "at least 2",
        )
        self._network: DistributedDataParallel | None = None
        # Names of the parameters that DDP waits for, in its order
        self._trained: list[str] = []
        # The next step's micro-batches with samples in all processes, the last of this process, and
        # whether a process has none
        self._with_samples: Sequence[int] = ()
        self._last = 0
        self._is_uneven = False

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.zero and isinstance(self.peers, Processes):
            self.layout = DividedOptimizer(self.peers)
        if not isinstance(self.peers, Processes):
            return self.compiled(model)
        if self.sync_batch_norm:
            batch_norms(model)
            require_cuda(self._device)
            if not isinstance(self.peers, SimulatedPeers):
                synchronise(model)
        ConfigError.raise_if(
            self.static_graph and self._accumulate > 1,
            "strategy.static_graph",
            "torch's DDP fails with it if gradients are accumulated",
            True,
            hint="set accumulate=1 or strategy.static_graph=false",
        )
        self._trained = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._network = DistributedDataParallel(
            self.compiled(model),
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
        )
        # Simulated collectives return nothing that DDP could use.
        if isinstance(self.peers, SimulatedPeers):
            self._network.register_comm_hook(None, noop_hook)
            return self._network
        if isinstance(self.hook, str):
            _register(self._network, self.hook, self.powersgd_rank, self.powersgd_start_step)
        elif self.hook is not None:
            # Torch asks for a function's name
            self._network.register_comm_hook(None, self.hook.__call__)
        return self._network

    def prepare_step(self, plan: Plan, step: int) -> None:
        ConfigError.raise_if(
            self.hook == "powersgd" and self._network is not None and not plan.fills_all,
            "loader.drop_last",
            "PowerSGD cannot exchange gradients if a process has no samples, as in an "
            "epoch's last batch here",
            plan.drop_last,
            hint="loader.drop_last=true, or another strategy.hook",
        )
        if self.sync_batch_norm and self._network is not None:
            require_samples(plan)
        self._is_uneven, self._last = False, self.micro_batches[-1]
        if not plan.fills_all:
            self._with_samples = plan.with_samples(step)
            self._is_uneven = (
                len({number // self._accumulate for number in self._with_samples}) < self.peers.size
            )
            self._last = max(
                (number for number in self._with_samples if number in self.micro_batches),
                default=-1,
            )

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        self.peers.doing = "exchanging gradients"
        try:
            return self._carry(micro_batches, forward)
        except RuntimeError as error:
            unused = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if unused is None:
                raise
            names = ", ".join(self._trained[int(number)] for number in unused[1].split())
            raise ConfigError(
                Problem(
                    "strategy.find_unused_parameters",
                    f"the loss does not depend on {names}, for which DDP waits; this happens in "
                    "each phase of a recipe with several phases, and in layer drop",
                    self.find_unused_parameters,
                    hint="strategy.find_unused_parameters=true, or strategy=elastic",
                )
            ) from error

    def _carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        if not self._is_uneven or self._network is None:
            return super().carry(micro_batches, forward)
        # Without an exchange
        tallies = super().carry(micro_batches[:-1], forward)
        # As processes with a single micro-batch do
        self._network.require_forward_param_sync = True
        own_buffers = [buffer.clone() for buffer in self._network.buffers()]
        with Join([self._network]):
            tallies += super().carry(micro_batches[-1:], forward)
        Join([self._network], enable=False)
        # Join has copied another process's buffers: restore batch norm's statistics of this
        # process's samples.
        if not micro_batches:
            copy_buffers(list(self._network.buffers()), own_buffers)
        return tallies

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        is_last = number == self._last
        network = self._network
        # Some processes have finished their last micro-batch and exchange no buffers.
        if network is not None and self._is_uneven and not is_last:
            network.require_forward_param_sync = False
        with nullcontext() if is_last or network is None else network.no_sync():
            yield
        # Torch would raise the error only in the next step; before that, another process may wait
        # for this one's gradients for ever.
        if is_last and network is not None:
            network._check_reducer_finalized()  # pyright: ignore[reportPrivateUsage]

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        parameters = (
            []
            if self._network is None
            else [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        )
        all_tallies, touched = self.gather(
            tallies,
            [parameter.grad is not None for parameter in parameters] if self._is_uneven else None,
        )
        if self._is_uneven:
            source = min(self._with_samples) // self._accumulate
            self._follow(
                source,
                [
                    parameter
                    for parameter, mark in zip(parameters, touched[source], strict=True)
                    if mark
                ],
                has_samples=bool(tallies),
            )
        total = add_tallies(all_tallies)
        # DDP has divided by the number of processes.
        total.nominal *= self.peers.size
        return total

    def _follow(
        self, source: int, parameters: Sequence[nn.Parameter], *, has_samples: bool
    ) -> None:
        """Copy the averages to processes without samples."""
        # Join lets them take part in the exchange, but does not give them its result.
        tensors = [
            parameter if parameter.grad is None else parameter.grad for parameter in parameters
        ]
        for parameter, value in zip(parameters, from_rank(source, tensors), strict=True):
            if not has_samples:
                parameter.grad = value

    @contextmanager
    def evaluating(self, model: nn.Module) -> Generator[None]:
        self._follow_first(model, "sharing buffers before an evaluation")
        yield


def _register(network: DistributedDataParallel, hook: str, rank: int, start_step: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    if hook == "powersgd":
        network.register_comm_hook(
            power.PowerSGDState(
                None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
            ),
            power.powerSGD_hook,
        )
    else:
        network.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))


@final
class DividedOptimizer(Layout):
    """Layout with all weights in each process, and the optimizer state divided among them.

    Torch's ZeroRedundancyOptimizer, saved as the optimizer that it contains.
    """

    def share_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard an optimizer that has not stepped yet.

        Each process steps its share of the parameters and sends them to the others.

        Raises:
            ConfigError: The parameters have several dtypes, which torch does not support.
        """
        dtypes = sorted(
            {
                str(parameter.dtype).removeprefix("torch.")
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        )
        ConfigError.raise_if(
            len(dtypes) > 1,
            "strategy.zero",
            "needs parameters of one dtype",
            ", ".join(dtypes),
            expected="one",
            hint="strategy.zero=false",
        )
        accepted = inspect.signature(type(optimizer)).parameters
        takes_any = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()
        )
        # Its defaults may have more keys than its constructor takes
        settings = {
            key: value for key, value in optimizer.defaults.items() if takes_any or key in accepted
        }
        return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **settings)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the complete state of the optimizer inside on rank 0, and {} on the other ranks.

        All ranks must call it.
        """
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer.state_dict()
        optimizer.consolidate_state_dict(to=0)
        if not self.peers.is_main:
            return {}
        state = optimizer.state_dict()
        # Torch moves the state to the CPU, except what fused kernels need on the parameter's
        # device.
        for parameter_state in state["state"].values():
            for name, value in parameter_state.items():
                if isinstance(value, Tensor):
                    parameter_state[name] = value.cpu()
        return state
