"""Keyed loading: each sample's CPU-side randomness depends only on (seed, epoch, position, index).

So neither the number of workers, nor prefetching, nor the process that makes a sample can change it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import multiprocessing
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from samewise.runner.config import schema
from samewise.runner.data import streams
from samewise.runner.data.dataset import differing_entry, sample_name, without_transforms
from samewise.runner.data.generator_tracker import GeneratorTracker, next_draws
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, DataError, Problem, SamewiseError, describe_exit, raised_at, summarise_error
from samewise.runner.interfaces import Batch
from samewise.runner.processes.this_process import end_with_parent, reopen_files

Collate = Callable[[Sequence[Any]], Batch]

_NOTICE_S = 60
"""How long a worker keeps running after SIGTERM."""
_DEATH_S = 5
"""How long the end of a worker whose connection is closed may take."""
_REPEATED, _REPEATING_S = 8, 0.5
"""How many samples are made again at first, and how long they may take to be made once; one always is."""
_STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers of this process."""


@dataclass(frozen=True)
class Key:
    """A request to a worker: the samples at these positions of an epoch's order."""

    epoch: int
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass. `number` counts over all replicas."""

    number: int
    batch: Batch
    sent: Callable[[], Batch] | None = None
    """Returns it on the device, if it is sent there before its turn: the same object to each phase, as `batch` is on the CPU."""

    def copied(self) -> MicroBatch:
        """The same values in objects of their own, for a loss besides the step's: a recipe may change its batch in place, or take entries out of it."""
        return MicroBatch(self.number, deepcopy(self.sent() if self.sent else self.batch))


@dataclass(frozen=True)
class Failure:
    """An error sent from a worker to the main process, which raises it without the worker's traceback."""

    problems: tuple[Problem | str, ...]


class KeyedDataset(Dataset[Any]):
    """Returns a collated batch for a `Key`. A data set with a method `batch(indices)` is called once per batch.

    With `says_places` a batch has an entry more, `place`, int64[B, 2]: each sample's epoch and its index in the data set.
    With `must_repeat` the first batch is a Failure if one of its first samples differs when it is made again from the same seeds.
    """

    def __init__(
        self, dataset: Any, collate: Collate, *, seed: int, stream: str, name: str = "dataset", require: Callable[[Batch], None] = lambda batch: None
    ) -> None:
        self._name = name
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._stream = stream
        self._whole = _whole_batches(dataset, name)
        self._draws = self._whole is None or not type(dataset).__module__.startswith("samewise.")  # samewise's own draw nothing where they make batches
        self._drawn = GeneratorTracker()
        self._require = require
        self.says_places = False
        self.must_repeat = False

    def __getitem__(self, key: Key) -> Batch | Failure:
        if self.must_repeat:
            self.must_repeat = False
            if unlike := self.find_unlike(replace(key, indices=key.indices[:_REPEATED]), within_s=_REPEATING_S):
                return unlike if isinstance(unlike, Failure) else Failure((_does_not_repeat(self._name, unlike),))
        batch = self._drawn(partial(self._make, key), partial(self._make, replace(key, indices=key.indices[:1]))) if self._draws else self._make(key, ())
        if isinstance(batch, Failure) and self._draws:  # perhaps of the stand-in for torch.random.default_generator, which is no argument of torch's operators
            self._drawn.seed_all()
            batch = self._make(key, tuple(streams.SEEDERS))
        if not self.says_places or isinstance(batch, Failure):
            return batch
        return {**batch, "place": torch.tensor([(key.epoch, index) for index in key.indices])}

    def _make(self, key: Key, seeded: Collection[str]) -> Batch | Failure:
        """Collate the samples; each enters its stream in the generators that are `seeded`, a batch that the data set makes itself that of its first sample."""
        samples = list[Any]()
        try:
            if self._whole is not None:
                if seeded:
                    streams.enter(self._seed, self._stream, key.epoch, key.start, key.indices[0], generators=seeded)
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
            return Failure(error.problems if len(samples) < len(key.indices) else self._locate_fault(error, key.indices, samples))
        except SystemExit as error:
            message, where = describe_exit(type(without_transforms(self.dataset)).__name__, error)
            return Failure((Problem(self._name, message, hint=where),))
        except Exception as error:  # a worker's traceback is not passed on, so say where the error was raised
            if self._whole is not None:
                at, fault = f"in batch(indices), for samples {', '.join(map(str, key.indices))}", error
            elif len(samples) < len(key.indices):
                at, fault = f"at {sample_name(self.dataset, key.indices[len(samples)])}", error
            else:
                odd = self._find_odd_sample(key.indices, samples, Exception)
                at, fault = (f"at {odd[0]}", odd[1]) if odd else (f"over samples {', '.join(map(str, key.indices))}", error)
            who = type(without_transforms(self.dataset)).__name__
            return Failure((Problem(self._name, f"{who} fails {at}: {type(fault).__name__}: {summarise_error(fault)}", hint=raised_at(fault)),))

    def find_unlike(self, key: Key, *, within_s: float = math.inf) -> str | Failure | None:
        """The first of the samples that differs when it is made again from the same seeds, after others, with the entry that differs; None if there is none.

        Of samples that take longer than `within_s` together, only the first are made. Where one can be made only once, the failure.
        """
        made, end = list[tuple[Key, Any, list[Any]]](), time.monotonic() + within_s
        for offset, index in enumerate(key.indices):
            alone = Key(key.epoch, key.start + offset, (index,))
            made.append((alone, self._make(alone, tuple(streams.SEEDERS)), next_draws()))
            if time.monotonic() > end:
                break
        found = None
        for number, (alone, one, draws) in reversed([*enumerate(made)]):
            two = self._make(alone, tuple(streams.SEEDERS))
            failures = [made_once for made_once in (one, two) if isinstance(made_once, Failure)]
            if len(failures) == 1:
                return failures[0]
            named = differing_entry(one, two)
            if named is None and number and next_draws() != draws:  # as it keeps a first, random version; with the first sample a process may prepare something
                named = ", in the random numbers that it draws,"
            found = found if named is None else f"{sample_name(self.dataset, alone.indices[0])}{named}"
        return found

    def _locate_fault(self, error: SamewiseError, indices: Sequence[int], samples: Sequence[Any]) -> tuple[Problem | str, ...]:
        """Explain an error of a batch, with the sample."""
        where, fault = self._find_odd_sample(indices, samples, SamewiseError) or ("", None)
        if not isinstance(fault, SamewiseError):
            return error.problems
        of_data = {"dataset": self._name}
        return tuple(replace(one, path=of_data.get(one.path, one.path), message=f"{where}: {one.message}") for one in fault.problems)

    def _find_odd_sample(self, indices: Sequence[int], samples: Sequence[Any], kind: type[Exception]) -> tuple[str, Exception] | None:
        """The first sample that cannot be collated alone, or else with the batch's first; and that error.

        One of samewise's own explains itself. With any other, some samples must pass: it may be that one is too few.
        """
        names = [sample_name(self.dataset, index) for index in indices]
        alone = [(name, [sample]) for name, sample in zip(names, samples, strict=True)]
        beside = [(f"{name} beside {names[0]}", [samples[0], sample]) for name, sample in zip(names[1:], samples[1:], strict=True)]
        for tried in (alone, beside):
            faults = [(where, self._fault_of(some)) for where, some in tried]
            found = next(((where, fault) for where, fault in faults if isinstance(fault, kind)), None)
            if found and (kind is SamewiseError or any(fault is None for _, fault in faults)):
                return found
        return None

    def _fault_of(self, samples: Sequence[Any]) -> Exception | None:
        """The error of collating some samples; None if there is none."""
        try:
            self._collate(samples)
        except Exception as error:
            return error
        return None


def _whole_batches(dataset: Any, name: str) -> Callable[[Sequence[int]], Batch] | None:
    """The data set's method `batch(indices)`; None if it has none. ConfigError if its `batch` takes something else."""
    whole: Any = getattr(dataset, "batch", None)
    if not callable(whole):
        return None
    try:
        inspect.signature(whole).bind(())
    except TypeError as error:
        who, expected = type(dataset).__name__, "batch(indices), which returns the collated samples at these indices"
        hint = "give it another name if it is meant for something else: samewise calls a data set's `batch` in place of __getitem__"
        raise ConfigError(Problem(name, f"{who}.batch cannot be called with indices alone: {error}", expected=expected, hint=hint)) from error
    return cast(Callable[[Sequence[int]], Batch], whole)


def _does_not_repeat(path: str, what: str) -> Problem:
    """The problem for a sample that differs when it is made again."""
    expected = "the same sample for the same index and random numbers"
    hint = "draw random numbers from random, numpy.random or torch, which samewise seeds, and keep no state; reproducibility=fast trains without the same bits"
    return Problem(path, f"{what} differs when the sample is made again from the same seeds", expected=expected, hint=hint)


class _Keys:
    """A DataLoader's sampler that yields keys instead of indices, in a single pass however often it is iterated."""

    def __init__(self, keys: Callable[[], Iterator[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys()


class Loader:
    """Batches in the order of their keys, made here or by a DataLoader's workers, which changes only the speed.

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
        self._begun = weakref.WeakSet[Any]()  # the DataLoader's iterators, each with its workers
        if settings and settings.num_workers:
            # The user decides how many workers are too many; torch warns for each loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._workers = DataLoader(
                keyed,
                sampler=_Keys(keys),  # pyright: ignore[reportArgumentType] (any iterable will do)
                batch_size=None,
                collate_fn=_identity,
                num_workers=settings.num_workers,
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=persistent,
                pin_memory=settings.pin_memory and is_cuda,
                worker_init_fn=_start_worker,
                generator=torch.Generator(),  # a separate generator: otherwise each iteration draws from the global one
            )

    def __iter__(self) -> Iterator[Batch]:
        batches = map(self._make_here, self._keys()) if self._workers is None else _track_workers(self._workers, self._begun)
        try:
            for batch in batches:
                if isinstance(batch, Failure):
                    raise DataError(*batch.problems)
                yield batch
        finally:
            del batches  # ends workers now; where an error keeps this frame, it would be the garbage collector, in which torch waits five seconds for each

    def close(self) -> None:
        """End the workers now, whoever still holds what iterates: the traceback of an error does."""
        for batches in [*self._begun]:
            batches._shutdown_workers()

    def _make_here(self, key: Key) -> Batch | Failure:
        """Make a batch in this process as a worker would: with one thread, since the number of threads changes bits."""
        threads = torch.get_num_threads()
        if threads == 1:
            return self._keyed[key]
        torch.set_num_threads(1)
        try:
            return self._keyed[key]
        finally:
            torch.set_num_threads(threads)


def training_keys(order: Order, plan: Plan, *, first_step: int, steps: int, micro_batches: Sequence[int]) -> Iterator[Key]:
    """The keys of the micro-batches numbered in `micro_batches` that have samples, step by step, from `first_step` (from 0)."""
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
    """The keys of one pass over a split, in its order."""
    for start in range(0, length, batch_size):
        yield Key(0, start, tuple(range(start, min(start + batch_size, length))))


def _track_workers(loader: DataLoader[Any], begun: weakref.WeakSet[Any]) -> Iterator[Any]:
    """Iterate, and keep track of the workers that this starts, and in `begun` of what has them.

    A worker that died is torch's RuntimeError, also if it was sending a batch, of which torch itself says only that a connection was closed.
    """
    if not _STARTED:
        Finalize(None, _end_workers, exitpriority=10)  # by atexit, and at the end of processes forked by multiprocessing, which do not run atexit
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    begun.add(batches)
    children = multiprocessing.active_children()
    _STARTED.update(worker for worker in children if worker not in before)
    workers = [worker for worker in children if worker in _STARTED]
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:
        ended = wait([worker.sentinel for worker in workers], _DEATH_S)
        dead = [worker for worker in workers if worker.sentinel in ended]
        for worker in dead:
            worker.join()  # torch's handler of SIGCHLD raises its error here, unless it has done so before
        if dead:
            raise RuntimeError(f"DataLoader worker (pid(s) {', '.join(str(worker.pid) for worker in dead)}) exited unexpectedly") from error
        raise
    finally:
        if any(worker.exitcode for worker in workers):
            # torch's own shutdown would wait for ever for a lock that the worker held when it was killed.
            signal_handling._remove_worker_pids(id(batches))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            vars(batches)["_shutdown"] = True
            for worker in workers:
                worker.kill()


def _end_workers() -> None:
    """End the workers, whose batches nobody needs. Python would send them SIGTERM, which they take for a notice, and then wait."""
    if _STARTED:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker dies
    for worker in _STARTED:
        worker.kill()


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Ignore signals that a scheduler sends to all processes of a run: the main process finishes its step, saves, and ends the workers.

    Where it is killed, Linux ends them: torch's own watch over it leaves a worker that has a batch to hand over waiting for ever.
    """
    main, is_forked = multiprocessing.parent_process(), multiprocessing.get_start_method() == "fork"  # else another process is its parent
    end_with_parent(signal.SIGKILL, main.pid if main and is_forked else None)
    reopen_files()
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_NOTICE_S))  # it may be the main process's, which waits for a worker that hangs
