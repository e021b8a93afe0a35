"""The sum of gradients over replicas in one fixed binary tree, whichever process has them: pairs of
neighbours first, then pairs of pairs.

The tree over n replicas splits off the largest power of two below n to the left. A rank carries one
subtree and adds it up by a binary counter; the ranks' partial sums are then added in the tree's
upper levels, so the result depends on the replicas' numbers alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.torch_private import foreach_copy_, foreach_zero_

ALIGNMENT = 512
"""Bytes. Some CUDA kernels add in another order if a tensor is not aligned, so each gradient is
aligned as in separate memory."""


def subtrees(replicas: int, ranks: int) -> list[range]:
    """The replicas of each rank: subtrees of the tree, made by splitting the largest.

    Equal in size if `replicas / ranks` is a power of two.
    """
    assert 1 <= ranks <= replicas
    parts = [range(replicas)]
    while len(parts) < ranks:
        place = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[place : place + 1] = _halves(parts[place])
    return parts


def additions(parts: Sequence[range]) -> list[tuple[int, int]]:
    """The order in which to add the parts' sums: (left, right) means `left += right`.

    The total ends up in the first.
    """
    order: list[tuple[int, int]] = []
    number = {part: place for place, part in enumerate(parts)}

    def descend(node: range) -> int:
        if node in number:
            return number[node]
        left, right = (descend(half) for half in _halves(node))
        order.append((left, right))
        return left

    descend(range(parts[0].start, parts[-1].stop))
    return order


def _halves(node: range) -> list[range]:
    left = 1 << ((len(node) - 1).bit_length() - 1)
    return [node[:left], node[left:]]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor with this one's layout (such as channels_last).

    Its own if it has no gaps.
    """
    return torch.empty_like(tensor, device="meta").stride()


@dataclass(frozen=True)
class Flat:
    """A flat buffer for a bucket's gradients, and a view for each."""

    tensor: Tensor
    views: list[Tensor]


@final
class Bucket:
    """Parameters of one dtype, and the tree sum of their gradients: at most log2(replicas) + 1 flat
    buffers, whose length is a multiple of `shards`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, shards: int) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        step = ALIGNMENT // first.element_size()
        self._offsets, end = list[int](), 0
        for parameter in self.parameters:
            self._offsets.append(end)
            end += -(-parameter.numel() // step) * step
        self.length = -(-end // (shards * step)) * shards * step
        self.touched = [False] * len(self.parameters)
        """Which parameters have had a gradient from a replica carried here, in this step."""
        self.added = 0
        """Replicas added in this step."""
        self._partial: list[
            tuple[int, Flat]
        ] = []  # (height of the subtree, its sum), in descending order of height
        self._free: list[Flat] = []
        self._given: list[Flat] = []

    def add(self) -> None:
        """Add the parameters' gradients as the next replica's, and clear them."""
        flat = self._buffer()
        given = {
            number: parameter.grad
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        copy_all([flat.views[number] for number in given], list(given.values()))
        if without := [view for number, view in enumerate(flat.views) if number not in given]:
            foreach_zero_(without)
        for number in given:
            self.touched[number] = True
            self.parameters[number].grad = None
        self._climb(flat)

    def add_nothing(self) -> None:
        """The next replica had no samples."""
        flat = self._buffer()
        flat.tensor.zero_()
        self._climb(flat)

    def total(self) -> Flat:
        """The sum over all replicas added. The remaining buffers are added from the right."""
        _, flat = self._partial.pop()
        while self._partial:
            flat = self._onto(self._partial.pop()[1], flat)
        self._given = [flat]
        return flat

    def give_back(self, flat: Flat, touched: Sequence[bool]) -> None:
        """Set the sum as the parameters' gradients (none where no replica had one), and start a new
        step.
        """
        for parameter, view, wanted in zip(self.parameters, flat.views, touched, strict=True):
            parameter.grad = view if wanted else None
        self.touched = [False] * len(self.parameters)
        self.added = 0

    def new_buffer(self) -> Flat:
        """Zeros with views in the parameters' layouts: fused optimizers read parameters and
        gradients in memory order.
        """
        first = self.parameters[0]
        tensor = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        return Flat(
            tensor,
            [
                tensor.as_strided(p.shape, dense_strides(p), start)
                for start, p in zip(self._offsets, self.parameters, strict=True)
            ],
        )

    def _buffer(self) -> Flat:
        if self.added == 0:  # the gradients of the last step are no longer in use
            self._free += self._given
            self._given = []
        return self._free.pop() if self._free else self.new_buffer()

    def _climb(self, flat: Flat) -> None:
        height = 0
        while self._partial and self._partial[-1][0] == height:
            flat = self._onto(self._partial.pop()[1], flat)
            height += 1
        self._partial.append((height, flat))
        self.added += 1

    def _onto(self, left: Flat, right: Flat) -> Flat:
        left.tensor.add_(right.tensor)
        self._free.append(right)
        return left


def buckets(parameters: Sequence[nn.Parameter], *, megabytes: float, shards: int) -> list[Bucket]:
    """The parameters in buckets of about so many MiB, in the order of the backward pass, one dtype
    and device per bucket.
    """
    made, row, size = list[Bucket](), list[nn.Parameter](), 0
    for parameter in reversed(parameters):
        if row and (
            size >= megabytes * 2**20
            or (parameter.dtype, parameter.device) != (row[0].dtype, row[0].device)
        ):
            made.append(Bucket(row, shards=shards))
            row, size = [], 0
        row.append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [*made, *([Bucket(row, shards=shards)] if row else [])]


@final
class ReplicaBuffers:
    """Buffers, such as batch norm's running statistics: each replica starts from the step's initial
    ones, and replica 0's are kept.

    A forward pass may change a buffer in place or assign another tensor to it, so the model's own
    are looked up each time.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [module._buffers for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
        self._slots = [
            (buffers, name, tensor) for buffers in held for name, tensor in buffers.items()
        ]
        self._start: Snapshot | None = None
        self._kept: Snapshot | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers as they are.

        The first tensor of one whose shape or dtype has changed, such as a cache that grows:
        processes differ in it.
        """
        pairs = [(held[name], first) for held, name, first in self._slots if first is not None]
        return [
            first
            if now is None
            or (now is not first and (now.shape, now.dtype) != (first.shape, first.dtype))
            else now
            for now, first in pairs
        ]

    def begin(self, replica: int) -> None:
        """Before a replica's first forward pass."""
        if not self._slots:
            return
        if not self._start:
            self._start = self._snapshot()
        if replica > 0:
            # Replica 0's buffers, or the step's initial ones if replica 0 is in another process or
            # had no samples
            if not self._kept:
                self._kept = self._snapshot()
            self.restore()

    def restore(self) -> None:
        """Return to the step's initial ones."""
        if self._start:
            self._restore(self._start)

    def finish(self) -> None:
        """After the last replica of the step."""
        if self._kept:
            self._restore(self._kept)
        self._start, self._kept = None, None

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Overwrite all buffers."""
        copy_buffers(self.tensors, values)

    @torch.no_grad()
    def _snapshot(self) -> Snapshot:
        now = [held[name] for held, name, _ in self._slots]
        made = [torch.empty_like(tensor) for tensor in now if tensor is not None]
        copy_all(made, [tensor for tensor in now if tensor is not None])
        return now, made

    @torch.no_grad()
    def _restore(self, snapshot: Snapshot) -> None:
        tensors, values = snapshot
        for (held, name, _), tensor in zip(self._slots, tensors, strict=True):
            if held[name] is not tensor:
                held[name] = tensor
        copy_buffers([tensor for tensor in tensors if tensor is not None], values)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Generator[None]:
    """Afterwards the model's buffers are what they were before, with the same values."""
    buffers = ReplicaBuffers(model)
    buffers.begin(0)
    try:
        yield
    finally:
        buffers.restore()


Snapshot = tuple[list[Tensor | None], list[Tensor]]
"""The tensors that a model's buffers are, and copies of their values."""


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, with one operator per kind of tensor: a model has hundreds of
    small ones.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs = kinds.setdefault((target.device, target.dtype), ([], []))
        pairs[0].append(target)
        pairs[1].append(source)
    for pairs in kinds.values():
        foreach_copy_(*pairs)


def copy_buffers(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy as `copy_all`, also to expanded tensors, to which torch does not copy: each element of
    their memory is written once.
    """
    owned = [own_elements(target) for target in targets]
    pairs = zip(owned, targets, sources, strict=True)
    copy_all(
        owned,
        [
            source if own is target else source[tuple(map(slice, own.shape))]
            for own, target, source in pairs
        ],
    )


def own_elements(tensor: Tensor) -> Tensor:
    """The part of a tensor whose elements each have memory of their own: all of it, unless it was
    expanded.
    """
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
