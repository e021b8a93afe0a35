"""The replicas of one process, run one after another, and the exchange of the ranks' partial
gradient sums in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samewise.runner.errors import Problem, TrainingError
from samewise.runner.strategies.packing import from_rank
from samewise.runner.strategies.peers import Processes, all_gather
from samewise.runner.strategies.tree import Bucket, Flat, ReplicaBuffers, additions, buckets


class Exchange:
    """Turns this process's sums into the sums over all processes.

    With a single process they are the same.
    """

    shards = 1
    """Into how many parts of one length a buffer is cut."""
    overlaps = False
    """Whether it gains by being started before the backward pass is over."""

    def __init__(self) -> None:
        self._sums: list[Flat] = []

    def start(self, flat: Flat) -> None:
        """Start with the next bucket's sum.

        All processes call it for the same buckets in the same order.
        """
        self._sums.append(flat)

    def finish(self) -> list[Flat]:
        """The sums over all processes, in the order of `start`."""
        sums, self._sums = self._sums, []
        return sums

    def follow_first(
        self, tensors: Sequence[Tensor], put: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Replace the values by rank 0's."""


@final
class TreeExchange(Exchange):
    """Adds the ranks' sums in the upper levels of the tree of replicas.

    Each rank receives its shard of every rank's sum (all-to-all), adds them in the tree's order,
    and the shards' sums are gathered: the traffic of a ring all-reduce, in a fixed order. A bucket
    is gathered when the next one is started, so that the network is busy during the backward pass.
    """

    def __init__(self, peers: Processes, parts: Sequence[range], *, overlap: bool) -> None:
        self.shards = peers.size
        self.overlaps = overlap
        self._peers = peers
        self._order = additions(parts)
        self._received: list[Tensor] = []  # one buffer per bucket, kept between steps
        self._started: list[tuple[Flat, Any]] = []
        self._gathered: list[Any] = []

    def start(self, flat: Flat) -> None:
        number = len(self._started)
        if number == len(self._received):
            # A simulated exchange leaves it unchanged
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
            for left, right in self._order:
                rows[left].add_(rows[right])
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


class Carried:
    """How the replicas of this process contribute to the step's gradient.

    With one replica, the backward pass's gradients are used directly.
    """

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Around a forward and backward pass."""
        return nullcontext()

    def close(self) -> list[list[bool]]:
        """After the last micro-batch: exchange what is left.

        Returns, by bucket, which parameters had a gradient here.
        """
        return []

    def give_back(self, touched: Sequence[list[list[bool]]]) -> None:
        """Set the sums as the parameters' gradients.

        `touched` combines the results of `close` of all processes.
        """

    def bucket_bytes(self) -> list[int]:
        """The size of each exchanged bucket in bytes."""
        return []

    def buffer_bytes(self) -> int:
        """What the buffers for the sums take in a step."""
        return 0


@final
class Replicas(Carried):
    """Some of the run's replicas (a subtree) in this process.

    Their gradients are exchanged in buckets of `bucket_mb` MiB.
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
        self._at = -1  # position of the current replica among those of this process
        self._last = False
        self._sent = 0  # buckets whose exchange has started
        self._waiting: list[set[int]] = []
        if exchange.overlaps:
            for number, bucket in enumerate(self._buckets):
                for place, parameter in enumerate(bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(self._hook(number, place))

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        replica = number // self._accumulate
        place = replica - self._carried.start
        if place != self._at:
            for bucket in self._buckets:
                self._add(bucket, self._at)
            self._at = place
            self._buffers.begin(replica)
        self._last = number == self._carried.stop * self._accumulate - 1
        if self._last:
            self._waiting = [set(range(len(bucket.parameters))) for bucket in self._buckets]
        yield
        self._last = False

    def bucket_bytes(self) -> list[int]:
        return [bucket.length * bucket.parameters[0].element_size() for bucket in self._buckets]

    def buffer_bytes(self) -> int:
        received = self._exchange.shards > 1  # what TreeExchange gets
        return (len(self._carried).bit_length() + received) * sum(self.bucket_bytes())

    def close(self) -> list[list[bool]]:
        for bucket in self._buckets[: self._sent]:
            if any(parameter.grad is not None for parameter in bucket.parameters):
                hint = "set strategy.overlap=false"
                raise TrainingError(
                    Problem(
                        "strategy.overlap",
                        "a parameter had a gradient twice in one backward pass",
                        True,
                        hint=hint,
                    )
                )
        for bucket in self._buckets[self._sent :]:
            self._add(bucket, self._at)
            while bucket.added < len(self._carried):
                bucket.add_nothing()
            self._send(bucket)
        self._sent, self._at = 0, -1
        self._buffers.finish()
        return [bucket.touched for bucket in self._buckets]

    def give_back(self, touched: Sequence[list[list[bool]]]) -> None:
        sums = self._exchange.finish()
        self._exchange.follow_first(self._buffers.tensors, self._buffers.set)
        for bucket, flat, marks in zip(
            self._buckets, sums, zip(*touched, strict=True), strict=True
        ):
            bucket.give_back(flat, [any(mark) for mark in zip(*marks, strict=True)])

    def _add(self, bucket: Bucket, place: int) -> None:
        """Add the replica at `place`, whose gradients the parameters hold.

        Replicas before it that were left out had no samples.
        """
        while bucket.added < place:
            bucket.add_nothing()
        if place >= 0:
            bucket.add()

    def _send(self, bucket: Bucket) -> None:
        self._exchange.start(bucket.total())
        self._sent += 1

    def _hook(self, number: int, place: int) -> Callable[[Tensor], None]:
        """Called when a parameter has its gradient: in the last backward pass, sends its bucket
        once it is full and the earlier ones are sent.
        """

        def ready(_: Tensor) -> None:
            if not self._last:
                return
            self._waiting[number].discard(place)
            while self._sent < len(self._buckets) and not self._waiting[self._sent]:
                bucket = self._buckets[self._sent]
                self._add(bucket, self._at)
                self._send(bucket)

        return ready
