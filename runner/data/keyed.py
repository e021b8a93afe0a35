"""Keyed loading: a sample's randomness depends only on (seed, epoch, position, index).

Neither the number of workers, nor prefetching, nor the process that makes a sample can change it.
`loading` hands keys to workers.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from samewise.runner.data import streams
from samewise.runner.data.dataset import (
    differing_entry,
    failure,
    sample_name,
    without_transforms,
)
from samewise.runner.data.device import copied
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import DataError, Problem, SamewiseError
from samewise.runner.interfaces import Batch

Collate = Callable[[Sequence[Any]], Batch]

# The check that samples repeat: most samples, and seconds after which no further one is made
_REPEATED, _REPEATING_S = 8, 0.5
_MOST_WORKERS = 256
"""Workers that report how far they read ahead; others share a place."""


@dataclass(frozen=True)
class Key:
    """Request to a worker: the samples at consecutive positions of an epoch's order."""

    epoch: int
    start: int
    indices: tuple[int, ...]
    later: tuple[tuple[int, ...], ...] = ()
    """Indices of later keys, for the data set's `prefetch`."""


@dataclass(frozen=True)
class Failure:
    """An error in a worker, sent to the main process, which raises it without a traceback."""

    problems: tuple[Problem | str, ...]
    kind: type[SamewiseError] = DataError


class KeyedDataset(Dataset[Any]):
    """Data set that returns a collated batch for a `Key`, sharing no memory with the user's data.

    A user's data set with a method `batch(indices)` is called once per batch. One with an attribute
    `prefetch_samples` is told the indices of so many samples ahead, by its method
    `prefetch(indices)`, which starts to read them and returns how many such calls are waiting.

    Args:
        dataset: The user's data set, with its transforms.
        collate: Makes a batch of samples.
        seed: The experiment's `seed`.
        stream: Name of the samples' stream of random numbers.
        name: The data set's path in the config.
        require: Checks a batch that the data set makes itself.

    Attributes:
        says_places: Whether a batch has an entry `place`, int64[B, 2]: each sample's epoch and its
            index in the data set.
        must_repeat: Whether the first samples are made twice, from the same seeds; if they differ,
            the first batch is a Failure.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        seed: int,
        stream: str,
        name: str = "dataset",
        require: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self._name = name
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._stream = stream
        method: Any = getattr(dataset, "batch", None)
        self._whole: Any = method if callable(method) else None
        # Samewise's own functions make new tensors, which need no copy.
        self._may_share = not str(getattr(self._whole or collate, "__module__", "")).startswith(
            "samewise."
        )
        self._require = require
        self.span = int(getattr(without_transforms(dataset), "prefetch_samples", 0))
        self.distance, self._waiting = 0, torch.zeros(_MOST_WORKERS)
        if self.span:
            self._waiting.share_memory_()
        self.says_places = False
        self.must_repeat = False

    @property
    def read_ahead(self) -> float | None:
        """Number of batches that are read before their turn; None if the data set does not."""
        return self.distance - float(self._waiting.sum()) if self.span else None

    def __getitem__(self, key: Key) -> Batch | Failure:
        for indices in key.later:
            worker: Any = get_worker_info()
            waiting = without_transforms(self.dataset).prefetch(indices)
            self._waiting[worker.id % _MOST_WORKERS if worker else 0] = waiting
        try:
            return self._checked(key)
        # The batch holds something that cannot be compared.
        except SamewiseError as error:
            return Failure(error.problems, type(error))

    def _checked(self, key: Key) -> Batch | Failure:
        if self.must_repeat:
            self.must_repeat = False
            if difference := self.find_unlike(
                replace(key, indices=key.indices[:_REPEATED]), within_s=_REPEATING_S
            ):
                if isinstance(difference, Failure):
                    return difference
                problem = Problem(
                    self._name,
                    f"{difference} differs when the sample is made again from the same seeds",
                    expected="the same sample for the same index and random numbers",
                    hint="draw random numbers from random, numpy.random or torch, which samewise "
                    "seeds, and keep no state; reproducibility=fast trains without the same bits",
                )
                return Failure((problem,))
        batch = self._make(key)
        if not self.says_places or isinstance(batch, Failure):
            return batch
        return {**batch, "place": torch.tensor([(key.epoch, index) for index in key.indices])}

    def _make(self, key: Key) -> Batch | Failure:
        """Collate the samples, each made from seeds of its own.

        A batch that the data set makes itself gets the seeds of its first sample.
        """
        samples = list[Any]()
        try:
            if self._whole is not None:
                streams.enter(self._seed, self._stream, key.epoch, key.start, key.indices[0])
                batch = self._whole(key.indices)
                self._require(batch)
                return copied(batch) if self._may_share else batch
            for offset, index in enumerate(key.indices):
                streams.enter(self._seed, self._stream, key.epoch, key.start + offset, index)
                samples.append(self.dataset[index])
            batch = self._collate(samples)
            return copied(batch) if self._may_share else batch
        except SamewiseError as error:
            if self._whole is not None:
                with contextlib.suppress(Exception):
                    samples = [self.dataset[index] for index in key.indices]
            return Failure(
                error.problems
                if len(samples) < len(key.indices)
                else self._locate_fault(error, key.indices, samples),
                type(error),
            )
        except SystemExit as error:
            return Failure((failure(self.dataset, self._name, "", error),))
        # A worker's traceback is not passed on, so the problem says where the error was raised.
        except Exception as error:
            fault, numbers = error, ", ".join(map(str, key.indices))
            if self._whole is not None:
                place = f"in batch(indices), for samples {numbers}"
            elif len(samples) < len(key.indices):
                place = f"at {sample_name(self.dataset, key.indices[len(samples)])}"
            elif faulty := self._find_faulty_sample(key.indices, samples, Exception):
                place, fault = f"at {faulty[0]}", faulty[1]
            else:
                place = f"over samples {numbers}"
            return Failure((failure(self.dataset, self._name, place, fault),))

    def find_unlike(self, key: Key, *, within_s: float = math.inf) -> str | Failure | None:
        """Name the first sample that differs when it is made again from the same seeds.

        Args:
            key: The samples.
            within_s: Seconds after which no further sample is made.

        Returns:
            The sample with the entry that differs, the failure of a sample that can be made only
            once, or None.
        """
        samples = list[tuple[Key, Any, tuple[float, float, int]]]()
        end = time.monotonic() + within_s
        for offset, index in enumerate(key.indices):
            sample_key = Key(key.epoch, key.start + offset, (index,))
            samples.append((sample_key, self._make(sample_key), streams.next_draws()))
            if time.monotonic() > end:
                break
        difference = None
        # Backwards, so that other samples come between the two versions of a sample.
        for number, (sample_key, sample, draws) in reversed([*enumerate(samples)]):
            repeated = self._make(sample_key)
            failures = [x for x in (sample, repeated) if isinstance(x, Failure)]
            if len(failures) == 1:
                return failures[0]
            entry = differing_entry(sample, repeated)
            # A data set that caches a random version draws nothing the second time. With the first
            # sample, a process may draw to prepare something.
            if entry is None and number and streams.next_draws() != draws:
                entry = ", in the random numbers that it draws,"
            if entry is not None:
                difference = f"{sample_name(self.dataset, sample_key.indices[0])}{entry}"
        return difference

    def _locate_fault(
        self, error: SamewiseError, indices: Sequence[int], samples: Sequence[Any]
    ) -> tuple[Problem | str, ...]:
        """Name the sample in an error of a batch."""
        place, fault = self._find_faulty_sample(indices, samples, SamewiseError) or ("", None)
        if not isinstance(fault, SamewiseError):
            return error.problems
        paths = {"dataset": self._name}
        return tuple(
            replace(
                problem,
                path=paths.get(problem.path, problem.path),
                message=f"{place}: {problem.message}",
            )
            for problem in fault.problems
        )

    def _find_faulty_sample(
        self, indices: Sequence[int], samples: Sequence[Any], kind: type[Exception]
    ) -> tuple[str, Exception] | None:
        """Find the first sample that cannot be collated, alone or beside the batch's first one."""
        names = [sample_name(self.dataset, index) for index in indices]
        alone = [(name, [sample]) for name, sample in zip(names, samples, strict=True)]
        pairs = [
            (f"{name} beside {names[0]}", [samples[0], sample])
            for name, sample in zip(names[1:], samples[1:], strict=True)
        ]
        for groups in (alone, pairs):
            faults = [(place, self._fault_of(group)) for place, group in groups]
            faulty = next(
                ((place, fault) for place, fault in faults if isinstance(fault, kind)), None
            )
            # Errors of samewise explain themselves. With another kind some group must pass, since
            # the collate function may refuse any single sample.
            if faulty and (kind is SamewiseError or any(fault is None for _, fault in faults)):
                return faulty
        return None

    def _fault_of(self, samples: Sequence[Any]) -> Exception | None:
        """Return the error of collating some samples, or None."""
        try:
            self._collate(samples)
        except Exception as error:
            return error
        return None


def with_later(keys: Callable[[], Iterator[Key]], keyed: KeyedDataset) -> Iterator[Key]:
    """Yield keys with the indices of those that come `span` positions later.

    The first one has those of all before.
    """
    pending, later = deque[Key](), list[tuple[int, ...]]()
    for key in keys():
        pending.append(key)
        later.append(key.indices)
        epochs = key.epoch - pending[0].epoch
        if epochs * len(keyed.dataset) + key.start - pending[0].start >= keyed.span:
            keyed.distance = len(pending) - 1
            yield replace(pending.popleft(), later=tuple(later))
            later.clear()
    for key in pending:
        yield replace(key, later=tuple(later))
        later.clear()


def training_keys(
    order: Order, plan: Plan, *, first_step: int, steps: int, micro_batches: Sequence[int]
) -> Iterator[Key]:
    """Yield the keys of these micro-batches, step by step, leaving out those without samples.

    Args:
        order: Order of each epoch's samples.
        plan: Division of epochs into micro-batches.
        first_step: Step to start with, counted from 0.
        steps: Step to stop before.
        micro_batches: Numbers of a step's micro-batches.
    """
    for step in range(first_step, steps):
        for number in micro_batches:
            epoch, start, stop = plan.bounds(step, number)
            if start != stop:
                yield Key(epoch, start, tuple(order.at(epoch, np.arange(start, stop)).tolist()))


def evaluation_keys(length: int, batch_size: int) -> Iterator[Key]:
    """Yield the keys of one pass over a split, in its order."""
    for start in range(0, length, batch_size):
        yield Key(0, start, tuple(range(start, min(start + batch_size, length))))
