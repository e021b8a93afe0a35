"""Sum of gradients over replicas in one fixed binary tree, whichever process has them.

Pairs of neighbours come first, then pairs of pairs: the tree over n replicas splits off the largest
power of two below n to the left. A rank carries one subtree and adds it up by a binary counter; the
ranks' partial sums are then added in the tree's upper levels. The result thus depends on the
replicas' numbers alone.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.torch_private import foreach_copy_, foreach_zero_

ALIGNMENT = 512
"""Bytes to which each gradient is aligned, as in separate memory.

Some CUDA kernels add in another order if a tensor is not aligned.
"""
Snapshot = tuple[list[Tensor | None], list[Tensor]]
"""A model's buffer tensors, and copies of their values."""


def subtrees(replicas: int, ranks: int) -> list[range]:
    """Return the replicas of each rank: subtrees of the tree, made by splitting the largest.

    They have equal sizes if `replicas / ranks` is a power of two.
    """
    assert 1 <= ranks <= replicas
    parts = [range(replicas)]
    while len(parts) < ranks:
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[largest : largest + 1] = _halves(parts[largest])
    return parts


def additions(parts: Sequence[range]) -> list[tuple[int, int]]:
    """Return the order in which to add the parts' sums; (left, right) means `left += right`.

    The first part ends up with the total.
    """
    order: list[tuple[int, int]] = []
    part_numbers = {part: index for index, part in enumerate(parts)}

    def descend(node: range) -> int:
        if node in part_numbers:
            return part_numbers[node]
        target, source = (descend(half) for half in _halves(node))
        order.append((target, source))
        return target

    descend(range(parts[0].start, parts[-1].stop))
    return order


def _halves(node: range) -> list[range]:
    size = 1 << ((len(node) - 1).bit_length() - 1)
    return [node[:size], node[size:]]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor with this one's layout (such as channels_last).

    They are its own if it has no gaps.
    """
    return torch.empty_like(tensor, device="meta").stride()


@dataclass(frozen=True)
class Flat:
    """Flat buffer for a bucket's gradients, and a view for each."""

    tensor: Tensor
    views: list[Tensor]


@final
class Bucket:
    """Parameters of one dtype, and the tree sum of their gradients.

    At most log2(replicas) + 1 flat buffers, whose length is a multiple of `shards`.
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
        """Whether each parameter has had a gradient in this step, from this process's replicas."""
        self.added = 0
        """Number of replicas added in this step."""
        # (height of the subtree, its sum), in descending order of height
        self._partial: list[tuple[int, Flat]] = []
        self._free: list[Flat] = []
        # Buffers that hold the last step's gradients
        self._in_use: list[Flat] = []

    def add(self) -> None:
        """Add the parameters' gradients as the next replica's, and clear them."""
        flat = self._buffer()
        gradients = {
            number: parameter.grad
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        copy_all([flat.views[number] for number in gradients], list(gradients.values()))
        # A buffer that is used again holds another replica's sums
        if empty_views := [
            view for number, view in enumerate(flat.views) if number not in gradients
        ]:
            foreach_zero_(empty_views)
        for number in gradients:
            self.touched[number] = True
            self.parameters[number].grad = None
        self._climb(flat)

    def add_nothing(self) -> None:
        """Add zeros for the next replica, which had no samples."""
        flat = self._buffer()
        flat.tensor.zero_()
        self._climb(flat)

    def total(self) -> Flat:
        """Return the sum over all replicas added, adding the remaining buffers from the right."""
        _, flat = self._partial.pop()
        while self._partial:
            flat = self._onto(self._partial.pop()[1], flat)
        self._in_use = [flat]
        return flat

    def give_back(self, flat: Flat, touched: Sequence[bool]) -> None:
        """Set the sum as the parameters' gradients, and start a new step.

        A parameter without a gradient in any replica gets none.
        """
        for parameter, view, has_gradient in zip(self.parameters, flat.views, touched, strict=True):
            parameter.grad = view if has_gradient else None
        self.touched = [False] * len(self.parameters)
        self.added = 0

    def new_buffer(self) -> Flat:
        """Make a buffer of zeros with views in the parameters' layouts."""
        # Fused optimizers read parameters and gradients in memory order.
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
        # In a new step, the last step's gradients are no longer in use.
        if self.added == 0:
            self._free += self._in_use
            self._in_use = []
        return self._free.pop() if self._free else self.new_buffer()

    def _climb(self, flat: Flat) -> None:
        height = 0
        while self._partial and self._partial[-1][0] == height:
            flat = self._onto(self._partial.pop()[1], flat)
            height += 1
        self._partial.append((height, flat))
        self.added += 1

    def _onto(self, target: Flat, source: Flat) -> Flat:
        target.tensor.add_(source.tensor)
        self._free.append(source)
        return target


def buckets(parameters: Sequence[nn.Parameter], *, megabytes: float, shards: int) -> list[Bucket]:
    """Divide the parameters into buckets of `megabytes` MiB, in the order of the backward pass.

    A bucket has one dtype and one device.
    """
    complete, row, size = list[Bucket](), list[nn.Parameter](), 0
    for parameter in reversed(parameters):
        if row and (
            size >= megabytes * 2**20
            or (parameter.dtype, parameter.device) != (row[0].dtype, row[0].device)
        ):
            complete.append(Bucket(row, shards=shards))
            row, size = [], 0
        row.append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [*complete, *([Bucket(row, shards=shards)] if row else [])]


@final
class ReplicaBuffers:
    """Buffers, such as batch norm's statistics: each replica starts from the step's initial values.

    Replica 0's buffers are kept. A forward pass may change a buffer in place or assign another
    tensor to it, so the model's own are looked up each time.
    """

    def __init__(self, model: nn.Module) -> None:
        module_buffers = [module._buffers for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
        self._slots = [
            (buffers, name, tensor)
            for buffers in module_buffers
            for name, tensor in buffers.items()
        ]
        self._start: Snapshot | None = None
        self._kept: Snapshot | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The current buffers.

        For a buffer whose shape or dtype has changed, such as a cache that grows, its first tensor:
        processes differ in it.
        """
        pairs = [
            (module_buffers[name], first)
            for module_buffers, name, first in self._slots
            if first is not None
        ]
        return [
            first
            if current is None
            or (
                current is not first
                and (current.shape, current.dtype) != (first.shape, first.dtype)
            )
            else current
            for current, first in pairs
        ]

    def begin(self, replica: int) -> None:
        """Prepare the buffers for a replica's first forward pass."""
        if not self._slots:
            return
        if not self._start:
            self._start = self._snapshot()
        if replica > 0:
            # Replica 0's buffers, or the step's initial ones if replica 0 is in another process or
            # had no samples.
            if not self._kept:
                self._kept = self._snapshot()
            self.restore()

    def restore(self) -> None:
        """Restore the step's initial buffers."""
        if self._start:
            self._restore(self._start)

    def finish(self) -> None:
        """Set replica 0's buffers, after the last replica of the step."""
        if self._kept:
            self._restore(self._kept)
        self._start, self._kept = None, None

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Overwrite all buffers."""
        copy_buffers(self.tensors, values)

    @torch.no_grad()
    def _snapshot(self) -> Snapshot:
        current = [module_buffers[name] for module_buffers, name, _ in self._slots]
        copies = [torch.empty_like(tensor) for tensor in current if tensor is not None]
        copy_all(copies, [tensor for tensor in current if tensor is not None])
        return current, copies

    @torch.no_grad()
    def _restore(self, snapshot: Snapshot) -> None:
        tensors, values = snapshot
        for (module_buffers, name, _), tensor in zip(self._slots, tensors, strict=True):
            if module_buffers[name] is not tensor:
                module_buffers[name] = tensor
        copy_buffers([tensor for tensor in tensors if tensor is not None], values)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Generator[None]:
    """Restore the model's buffers, and their values, at the end of the context."""
    buffers = ReplicaBuffers(model)
    buffers.begin(0)
    try:
        yield
    finally:
        buffers.restore()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, with one operator per kind of tensor.

    A model has hundreds of small ones.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs = kinds.setdefault((target.device, target.dtype), ([], []))
        pairs[0].append(target)
        pairs[1].append(source)
    for pairs in kinds.values():
        foreach_copy_(*pairs)


def copy_buffers(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy as `copy_all`, also to expanded tensors, which torch does not do.

    Each element of their memory is written once.
    """
    targets_in_memory = [own_elements(target) for target in targets]
    pairs = zip(targets_in_memory, targets, sources, strict=True)
    copy_all(
        targets_in_memory,
        [
            source if elements is target else source[tuple(map(slice, elements.shape))]
            for elements, target, source in pairs
        ],
    )


def own_elements(tensor: Tensor) -> Tensor:
    """Return the part of a tensor whose elements have memory of their own: all, unless expanded."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
