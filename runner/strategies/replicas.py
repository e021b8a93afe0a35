"""The replicas of one process, and the exchange of the ranks' partial gradient sums."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samewise.runner.data.loading import MicroBatch
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem, TrainingError
from samewise.runner.strategies.base import Forward, Strategy, Tally, add_tallies
from samewise.runner.strategies.lockstep import run_side_by_side
from samewise.runner.strategies.packing import from_rank
from samewise.runner.strategies.peers import Processes, all_gather
from samewise.runner.strategies.sync_batch_norm import (
    PATH,
    Meet,
    meet_in_batch_norms,
    require_samples,
)
from samewise.runner.strategies.tree import Bucket, Flat, ReplicaBuffers, additions, buckets


class Exchange:
    """Turns this process's sums into the sums over all processes; here there is only one."""

    shards = 1
    """Number of parts of one length into which a buffer is cut."""
    overlaps = False
    """Whether exchanging pays before the backward pass is over."""

    def __init__(self) -> None:
        self._sums: list[Flat] = []

    def start(self, flat: Flat) -> None:
        """Start to exchange the next bucket's sum.

        All processes call it for the same buckets in the same order.
        """
        self._sums.append(flat)

    def finish(self) -> list[Flat]:
        """Return the sums over all processes, in the order of `start`."""
        sums, self._sums = self._sums, []
        return sums

    def follow_first(
        self, tensors: Sequence[Tensor], put: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Replace the values by rank 0's."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all micro-batches, in order; `values` are this process's."""
        return values


@final
class TreeExchange(Exchange):
    """Adds the ranks' sums in the upper levels of the tree of replicas.

    Each rank receives its shard of every rank's sum (all-to-all), adds the shards in the tree's
    order, and the sums of the shards are gathered: the traffic of a ring all-reduce, in a fixed
    order. A bucket is gathered when the next one is started, which keeps the network busy during
    the backward pass.
    """

    def __init__(self, peers: Processes, parts: Sequence[range], *, overlap: bool) -> None:
        self.shards = peers.size
        self.overlaps = overlap
        self._peers = peers
        self._parts, self._order = parts, additions(parts)
        # One buffer per bucket, kept between steps
        self._received: list[Tensor] = []
        self._started: list[tuple[Flat, Any]] = []
        self._gathered: list[Any] = []

    def start(self, flat: Flat) -> None:
        number = len(self._started)
        if number == len(self._received):
            # Zeros, since a simulated exchange leaves the buffer unchanged.
            self._received.append(torch.zeros_like(flat.tensor))
        self._peers.doing = f"exchanging bucket {number} of the gradients"
        work = dist.all_to_all_single(self._received[number], flat.tensor, async_op=True)
        self._started.append((flat, work))
        self._gather(before=number)

    def _gather(self, *, before: int) -> None:
        for number in range(len(self._gathered), before):
            flat, work = self._started[number]
            self._peers.doing = f"exchanging bucket {number} of the gradients"
            work.wait()
            rows = self._received[number].view(self.shards, -1)
            for target, source in self._order:
                rows[target].add_(rows[source])
            self._gathered.append(all_gather(flat.tensor, rows[0], async_op=True))

    def finish(self) -> list[Flat]:
        self._gather(before=len(self._started))
        for number, work in enumerate(self._gathered):
            self._peers.doing = f"gathering the sum of bucket {number} of the gradients"
            work.wait()
        sums = [flat for flat, _ in self._started]
        self._started, self._gathered = [], []
        return sums

    def follow_first(
        self, tensors: Sequence[Tensor], put: Callable[[Sequence[Tensor]], None]
    ) -> None:
        if tensors:
            self._peers.doing = "sharing batch norm's statistics"
            put(from_rank(0, tensors))

    def gather(self, values: Tensor) -> Tensor:
        self._peers.doing = "sharing batch norm's statistics"
        each = len(values) // len(self._parts[self._peers.rank])
        most = max(map(len, self._parts)) * each
        own = values.new_zeros(most, *values.shape[1:])
        own[: len(values)] = values
        gathered = own.new_zeros(self.shards * most, *own.shape[1:])
        all_gather(gathered, own)
        return torch.cat(
            [
                gathered[rank * most : rank * most + len(part) * each]
                for rank, part in enumerate(self._parts)
            ]
        )


@final
class Replicas:
    """Some of the run's replicas (a subtree) in this process.

    Args:
        model: The model.
        carried: Numbers of the replicas.
        accumulate: Micro-batches of a replica.
        exchange: Exchange with the other processes.
        bucket_mb: MiB of gradients that are exchanged at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        carried: range,
        *,
        accumulate: int,
        exchange: Exchange,
        bucket_mb: float,
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = buckets(trained, megabytes=bucket_mb, shards=exchange.shards)
        self._buffers = ReplicaBuffers(model)
        self._carried = carried
        self._accumulate = accumulate
        self._exchange = exchange
        # Position of the current replica among those of this process
        self._position = -1
        self._is_last = False
        # Number of buckets whose exchange has started
        self._sent = 0
        # For each bucket, the parameters without a gradient in the last backward pass
        self._waiting: list[set[int]] = []
        if exchange.overlaps:
            for number, bucket in enumerate(self._buckets):
                for index, parameter in enumerate(bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(self._hook(number, index))

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        """Enter a context for a forward and backward pass."""
        replica = number // self._accumulate
        position = replica - self._carried.start
        if position != self._position:
            for bucket in self._buckets:
                self._add(bucket, self._position)
            self._position = position
            self._buffers.begin(replica)
        self._is_last = number == self._carried.stop * self._accumulate - 1
        if self._is_last:
            self._waiting = [set(range(len(bucket.parameters))) for bucket in self._buckets]
        yield
        self._is_last = False

    def bucket_bytes(self) -> list[int]:
        """Return the size of each exchanged bucket in bytes."""
        return [bucket.length * bucket.parameters[0].element_size() for bucket in self._buckets]

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers for the sums of a step."""
        # TreeExchange has one more buffer, for what it receives.
        buffers = len(self._carried).bit_length() + (self._exchange.shards > 1)
        return buffers * sum(self.bucket_bytes())

    def close(self) -> list[list[bool]]:
        """Exchange the remaining buckets, after the last micro-batch.

        Returns:
            By bucket, which parameters had a gradient in this process.
        """
        for bucket in self._buckets[: self._sent]:
            # A gradient that comes after its bucket was sent would be lost
            if any(parameter.grad is not None for parameter in bucket.parameters):
                raise TrainingError(
                    Problem(
                        "strategy.overlap",
                        "a parameter had a gradient twice in one backward pass",
                        True,
                        hint="set strategy.overlap=false",
                    )
                )
        for bucket in self._buckets[self._sent :]:
            self._add(bucket, self._position)
            while bucket.added < len(self._carried):
                bucket.add_nothing()
            self._send(bucket)
        self._sent, self._position = 0, -1
        self._buffers.finish()
        return [bucket.touched for bucket in self._buckets]

    def give_back(self, touched: Sequence[list[list[bool]]]) -> None:
        """Set the sums as the parameters' gradients.

        `touched` has the results of `close` of all processes.
        """
        sums = self._exchange.finish()
        self._exchange.follow_first(self._buffers.tensors, self._buffers.set)
        for bucket, flat, marks in zip(
            self._buckets, sums, zip(*touched, strict=True), strict=True
        ):
            bucket.give_back(flat, [any(mark) for mark in zip(*marks, strict=True)])

    def _add(self, bucket: Bucket, position: int) -> None:
        """Add the replica at `position`, whose gradients the parameters hold.

        Earlier replicas that were left out had no samples.
        """
        while bucket.added < position:
            bucket.add_nothing()
        if position >= 0:
            bucket.add()

    def _send(self, bucket: Bucket) -> None:
        self._exchange.start(bucket.total())
        self._sent += 1

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        """Make a hook that sends full buckets, in order, during the last backward pass."""

        def ready(_: Tensor) -> None:
            if not self._is_last:
                return
            self._waiting[number].discard(index)
            # In the same order in all processes, whichever bucket is full first
            while self._sent < len(self._buckets) and not self._waiting[self._sent]:
                bucket = self._buckets[self._sent]
                self._add(bucket, self._position)
                self._send(bucket)

        return ready


@dataclass(kw_only=True, eq=False)
class ReplicaStrategy(Strategy):
    """Strategy whose processes carry any number of the run's replicas, to the same bits.

    Args:
        sync_batch_norm: Whether batch norms use the mean and variance of the whole batch, instead
            of each replica's own. The micro-batches of a process then run side by side.
    """

    level = "R2"
    unfreezes = True
    compiles = True

    sync_batch_norm: bool = False
    # None for a single replica: the backward pass's gradients are used directly
    _carried: Replicas | None = field(default=None, init=False)
    _share: Meet | None = field(default=None, init=False)

    def _carry(
        self,
        model: nn.Module,
        carried: range,
        exchange: Exchange,
        *,
        accumulate: int,
        bucket_mb: float,
    ) -> None:
        """Prepare for some of several replicas."""
        self._carried = Replicas(
            model, carried, accumulate=accumulate, exchange=exchange, bucket_mb=bucket_mb
        )
        if self.sync_batch_norm:
            ConfigError.raise_if(
                self.compiled(model) is not model,
                PATH,
                "cannot be synchronised in a compiled model",
                True,
                "false, or compile=off",
            )
            self.at_once = len(carried) * accumulate
            meet_in_batch_norms(model)
            self._model, self._share = model, exchange.gather

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        return self._carried.micro_batch(number) if self._carried else nullcontext()

    def buffer_bytes(self) -> int:
        return self._carried.buffer_bytes() if self._carried else 0

    def prepare_step(self, plan: Plan, step: int) -> None:
        if self._share:
            require_samples(plan)

    def carry(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Tally]:
        if self._share is None:
            return super().carry(micro_batches, forward)
        tallies: list[Tally] = []
        for micro, (state, tally) in zip(
            micro_batches,
            run_side_by_side(self._model, micro_batches, forward, self._share),
            strict=True,
        ):
            with self.micro_batch(micro.number):
                state.give()
            tallies.append(tally())
        return tallies

    def reduce(self, tallies: Sequence[Tally]) -> Tally:
        everyone, touched = self.gather(tallies, self._carried.close() if self._carried else None)
        if self._carried:
            self._carried.give_back(touched)
        return add_tallies(everyone)
