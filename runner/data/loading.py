"""Keyed loading: each sample's CPU-side randomness depends on (seed, epoch, position, index) and on nothing else.

So neither the number of workers, nor prefetching, nor the process that makes a sample can change it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from samewise.runner.config import schema
from samewise.runner.data import streams
from samewise.runner.data.dataset import sample_name, without_transforms
from samewise.runner.data.drawn import Drawn
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import DataError, Problem, SamewiseError, ends_process, in_short, raised_at
from samewise.runner.interfaces import Batch
from samewise.runner.processes.this_process import end_with_parent

Collate = Callable[[Sequence[Any]], Batch]

_NOTICE_S = 60
"""How long a worker keeps running after SIGTERM."""
_STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers of this process."""


@dataclass(frozen=True)
class Key:
    """What a worker is asked for: the samples at these positions of an epoch's order."""

    epoch: int
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass's worth of a step. `number` counts over all replicas."""

    number: int
    batch: Batch
    sent: Callable[[], Batch] | None = None
    """Gives it on the device, where it is on its way there."""


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker to the main process, which raises it without the worker's traceback."""

    problems: tuple[Problem | str, ...]


class KeyedDataset(Dataset[Any]):
    """Answers a `Key` with a collated batch. A data set with a `batch(indices)` method (in memory, nothing random) is asked once.

    With `says_places` a batch has an entry more, `place`, int64[B, 2]: each sample's epoch and its index in the data set.
    """

    def __init__(
        self, dataset: Any, collate: Collate, *, seed: int, stream: str, name: str = "dataset", require: Callable[[Batch], None] = lambda batch: None
    ) -> None:
        self._name = name
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._stream = stream
        self._whole = getattr(dataset, "batch", None)
        self._drawn = Drawn()
        self._require = require
        self.says_places = False

    def __getitem__(self, key: Key) -> Batch | Failure:
        batch = (
            self._made(key, ())
            if self._whole is not None
            else self._drawn(partial(self._made, key), partial(self._made, replace(key, indices=key.indices[:1])))
        )
        if not self.says_places or isinstance(batch, Failure):
            return batch
        return {**batch, "place": torch.tensor([(key.epoch, index) for index in key.indices])}

    def _made(self, key: Key, seeded: Collection[str]) -> Batch | Failure:
        """The samples, collated; each enters its stream in the generators that are `seeded`."""
        samples = list[Any]()
        try:
            if self._whole is not None:
                batch = self._whole(key.indices)
                self._require(batch)
                return batch
            for offset, index in enumerate(key.indices):
                if seeded:
                    streams.enter(self._seed, self._stream, key.epoch, key.start + offset, index, generators=seeded)
                samples.append(self.dataset[index])
            return self._collate(samples)
        except SamewiseError as error:
            if self._whole is not None:
                with contextlib.suppress(Exception):
                    samples = [self.dataset[index] for index in key.indices]
            return Failure(error.problems if len(samples) < len(key.indices) else self._located(error, key.indices, samples))
        except SystemExit as error:
            message, where = ends_process(type(without_transforms(self.dataset)).__name__, error)
            return Failure((Problem(self._name, message, hint=where),))
        except Exception as error:  # a worker's traceback cannot follow it: say where it was raised
            is_alone = len(samples) < len(key.indices)
            at = f"at {sample_name(self.dataset, key.indices[len(samples)])}" if is_alone else f"over samples {', '.join(map(str, key.indices))}"
            who = type(without_transforms(self.dataset)).__name__
            return Failure((Problem(self._name, f"{who} fails {at}: {type(error).__name__}: {in_short(error)}", hint=raised_at(error)),))

    def _located(self, error: SamewiseError, indices: Sequence[int], samples: Sequence[Any]) -> tuple[Problem | str, ...]:
        """What is wrong with a batch, and with which sample: the first that cannot be collated alone, else the first that cannot beside the batch's first."""
        names = [sample_name(self.dataset, index) for index in indices]
        alone = ((name, [sample]) for name, sample in zip(names, samples, strict=True))
        beside = ((f"{name} beside {names[0]}", [samples[0], sample]) for name, sample in zip(names[1:], samples[1:], strict=True))
        for where, some in (*alone, *beside):
            try:
                self._collate(some)
            except SamewiseError as found:
                of_data = {"dataset": self._name}
                return tuple(replace(one, path=of_data.get(one.path, one.path), message=f"{where}: {one.message}") for one in found.problems)
            except Exception:  # fewer than it can collate
                continue
        return error.problems


class _Keys:
    """The sampler of a DataLoader: keys instead of indices. One pass, whoever iterates."""

    def __init__(self, keys: Callable[[], Iterator[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys()


class Loader:
    """Batches in the order of their keys: made here, or by the workers of a DataLoader, which changes nothing but the speed.

    Args:
        keyed: The data.
        keys: Makes an iterator over the keys wanted.
        settings: Those of workers; None: there are none.
        is_cuda: Whether the batches go to a CUDA device: workers' may lie in page-locked memory; others are pinned as they are sent (`data/device.py`).
        persistent: Keep the workers from one iteration to the next.
    """

    def __init__(
        self, keyed: KeyedDataset, keys: Callable[[], Iterator[Key]], settings: schema.Loader | None = None, *, is_cuda: bool = False, persistent: bool = False
    ) -> None:
        self._keyed = keyed
        self._keys = keys
        self._workers: DataLoader[Any] | None = None
        if settings and settings.num_workers:
            # How many workers are too many is the user's to say; torch's warning comes once a loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._workers = DataLoader(
                keyed,
                sampler=_Keys(keys),  # pyright: ignore[reportArgumentType] (any iterable will do)
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=settings.num_workers,
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=persistent,
                pin_memory=settings.pin_memory and is_cuda,
                worker_init_fn=_start_worker,
                generator=torch.Generator(),  # its own: otherwise each iteration draws from the global one
            )

    def __iter__(self) -> Iterator[Batch]:
        batches = map(self._here, self._keys()) if self._workers is None else _remembered(self._workers)
        for batch in batches:
            if isinstance(batch, Failure):
                raise DataError(*batch.problems)
            yield batch

    def _here(self, key: Key) -> Batch | Failure:
        """Make a batch in this process, as a worker would: workers run with one thread, and the number of threads changes bits."""
        threads = torch.get_num_threads()
        if threads == 1:
            return self._keyed[key]
        torch.set_num_threads(1)
        try:
            return self._keyed[key]
        finally:
            torch.set_num_threads(threads)


def training_keys(order: Order, plan: Plan, *, first_step: int, steps: int, micro_batches: Sequence[int]) -> Iterator[Key]:
    """The keys of all micro-batches numbered in `micro_batches` that have samples, step by step, from `first_step` on (counted from 0)."""
    at, indices = -1, torch.empty(0).numpy()
    for step in range(first_step, steps):
        for number in micro_batches:
            epoch, start, stop = plan.bounds(step, number)
            if start == stop:
                continue
            if epoch != at:
                at, indices = epoch, order.indices(epoch).numpy()  # a slice of an array takes a fifth of the time of a tensor's
            yield Key(epoch, start, tuple(indices[start:stop].tolist()))


def evaluation_keys(length: int, batch_size: int) -> Iterator[Key]:
    """The keys of one pass over a split, in its own order."""
    for start in range(0, length, batch_size):
        yield Key(0, start, tuple(range(start, min(start + batch_size, length))))


def _remembered(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate, and note the workers that this starts."""
    if not _STARTED:
        Finalize(None, _end_workers, exitpriority=10)  # by atexit, and at the end of a process that multiprocessing has forked, which knows no atexit
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    _STARTED.update(worker for worker in multiprocessing.active_children() if worker not in before)
    return batches


def _end_workers() -> None:
    """Nobody waits for a batch any more. Without this Python would end the workers by SIGTERM, which they take for a notice, and wait for them."""
    if _STARTED:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a worker dies
    for worker in _STARTED:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Signals that a scheduler sends to all processes of a run are for the main one: it finishes its step, saves, and ends the workers.

    Where it is killed, Linux ends them: torch's own watch over it leaves a worker that has a batch to hand over waiting for ever.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_NOTICE_S))  # the main process may be the sender, and waits for a worker that hangs
