"""Keyed loading: each sample's CPU-side randomness depends only on (seed, epoch, position, index).

So neither the number of workers, nor prefetching, nor the process that makes a sample can change
it. `loading` hands keys to workers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from samewise.runner.data import streams
from samewise.runner.data.dataset import differing_entry, failure, sample_name
from samewise.runner.data.device import copied
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem, SamewiseError
from samewise.runner.interfaces import Batch

Collate = Callable[[Sequence[Any]], Batch]

_REPEATED, _REPEATING_S = 8, 0.5
"""How many samples are made again at first, and how long they may take to be made once; one always
is."""


@dataclass(frozen=True)
class Key:
    """A request to a worker: the samples at these positions of an epoch's order."""

    epoch: int
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """An error sent from a worker to the main process, which raises it without the worker's
    traceback.
    """

    problems: tuple[Problem | str, ...]


class KeyedDataset(Dataset[Any]):
    """Returns a collated batch for a `Key`, which shares no memory with the data set.

    A data set with a method `batch(indices)` is called once per batch.

    With `says_places` a batch has an entry more, `place`, int64[B, 2]: each sample's epoch and its
    index in the data set. With `must_repeat` the first batch is a Failure if one of its first
    samples differs when it is made again from the same seeds.
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
        self._whole = _whole_batches(dataset, name)
        # Samewise's own make new tensors
        self._may_share = not str(getattr(self._whole or collate, "__module__", "")).startswith(
            "samewise."
        )
        self._require = require
        self.says_places = False
        self.must_repeat = False

    def __getitem__(self, key: Key) -> Batch | Failure:
        try:
            return self._checked(key)
        except SamewiseError as error:  # the batch holds something that cannot be compared
            return Failure(error.problems)

    def _checked(self, key: Key) -> Batch | Failure:
        if is_first := self.must_repeat:
            self.must_repeat = False
            if unlike := self.find_unlike(
                replace(key, indices=key.indices[:_REPEATED]), within_s=_REPEATING_S
            ):
                return (
                    unlike
                    if isinstance(unlike, Failure)
                    else Failure((_does_not_repeat(self._name, unlike),))
                )
        batch = self._make(key)
        if is_first and self._may_share and (problem := _copy_differs(batch)):
            return Failure((problem,))
        if not self.says_places or isinstance(batch, Failure):
            return batch
        return {**batch, "place": torch.tensor([(key.epoch, index) for index in key.indices])}

    def _make(self, key: Key) -> Batch | Failure:
        """Collate the samples.

        Each enters its stream, a batch that the data set makes itself that of its first sample.
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
                else self._locate_fault(error, key.indices, samples)
            )
        except SystemExit as error:
            return Failure((failure(self.dataset, self._name, "", error),))
        except (
            Exception
        ) as error:  # a worker's traceback is not passed on, so say where the error was raised
            if self._whole is not None:
                at, fault = (
                    f"in batch(indices), for samples {', '.join(map(str, key.indices))}",
                    error,
                )
            elif len(samples) < len(key.indices):
                at, fault = f"at {sample_name(self.dataset, key.indices[len(samples)])}", error
            else:
                odd = self._find_odd_sample(key.indices, samples, Exception)
                at, fault = (
                    (f"at {odd[0]}", odd[1])
                    if odd
                    else (f"over samples {', '.join(map(str, key.indices))}", error)
                )
            return Failure((failure(self.dataset, self._name, at, fault),))

    def find_unlike(self, key: Key, *, within_s: float = math.inf) -> str | Failure | None:
        """The first of the samples that differs when it is made again from the same seeds, after
        others, with the entry that differs; None if there is none.

        Of samples that take longer than `within_s` together, only the first are made. Where one can
        be made only once, the failure.
        """
        made, end = list[tuple[Key, Any, tuple[float, float, int]]](), time.monotonic() + within_s
        for offset, index in enumerate(key.indices):
            alone = Key(key.epoch, key.start + offset, (index,))
            made.append((alone, self._make(alone), streams.next_draws()))
            if time.monotonic() > end:
                break
        found = None
        for number, (alone, one, draws) in reversed([*enumerate(made)]):
            two = self._make(alone)
            failures = [made_once for made_once in (one, two) if isinstance(made_once, Failure)]
            if len(failures) == 1:
                return failures[0]
            named = differing_entry(one, two)
            # As it keeps a first, random version; with the first sample a process may prepare
            # something
            if named is None and number and streams.next_draws() != draws:
                named = ", in the random numbers that it draws,"
            found = (
                found if named is None else f"{sample_name(self.dataset, alone.indices[0])}{named}"
            )
        return found

    def _locate_fault(
        self, error: SamewiseError, indices: Sequence[int], samples: Sequence[Any]
    ) -> tuple[Problem | str, ...]:
        """Explain an error of a batch, with the sample."""
        where, fault = self._find_odd_sample(indices, samples, SamewiseError) or ("", None)
        if not isinstance(fault, SamewiseError):
            return error.problems
        of_data = {"dataset": self._name}
        return tuple(
            replace(one, path=of_data.get(one.path, one.path), message=f"{where}: {one.message}")
            for one in fault.problems
        )

    def _find_odd_sample(
        self, indices: Sequence[int], samples: Sequence[Any], kind: type[Exception]
    ) -> tuple[str, Exception] | None:
        """The first sample that cannot be collated alone, or else with the batch's first.

        And that error.

        One of samewise's own explains itself. With any other, some samples must pass: it may be
        that one is too few.
        """
        names = [sample_name(self.dataset, index) for index in indices]
        alone = [(name, [sample]) for name, sample in zip(names, samples, strict=True)]
        beside = [
            (f"{name} beside {names[0]}", [samples[0], sample])
            for name, sample in zip(names[1:], samples[1:], strict=True)
        ]
        for tried in (alone, beside):
            faults = [(where, self._fault_of(some)) for where, some in tried]
            found = next(
                ((where, fault) for where, fault in faults if isinstance(fault, kind)), None
            )
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
    """The data set's method `batch(indices)`.

    None if it has none. ConfigError if its `batch` takes something else.
    """
    whole: Any = getattr(dataset, "batch", None)
    if not callable(whole):
        return None
    try:
        inspect.signature(whole).bind(())
    except TypeError as error:
        who, expected = (
            type(dataset).__name__,
            "batch(indices), which returns the collated samples at these indices",
        )
        hint = (
            "give it another name if it is meant for something else: samewise calls a data "
            "set's `batch` in place of __getitem__"
        )
        raise ConfigError(
            Problem(
                name,
                f"{who}.batch cannot be called with indices alone: {error}",
                expected=expected,
                hint=hint,
            )
        ) from error
    return cast(Callable[[Sequence[int]], Batch], whole)


def _does_not_repeat(path: str, what: str) -> Problem:
    """The problem for a sample that differs when it is made again."""
    expected = "the same sample for the same index and random numbers"
    hint = (
        "draw random numbers from random, numpy.random or torch, which samewise seeds, and "
        "keep no state; reproducibility=fast trains without the same bits"
    )
    return Problem(
        path,
        f"{what} differs when the sample is made again from the same seeds",
        expected=expected,
        hint=hint,
    )


def _copy_differs(batch: Any) -> Problem | None:
    """The problem for a batch that becomes another as it is copied, or sent by a worker.

    None if it does not, or cannot be copied or compared.
    """
    with contextlib.suppress(Exception):
        if (named := differing_entry(batch, deepcopy(batch))) is not None:
            expected, hint = (
                "a batch that a worker can send as it is",
                "a copy calls the `__new__` of a namedtuple again, which must not change "
                "its arguments",
            )
            return Problem(
                "dataset, recipe",
                f"a copy of a batch{named} differs from it",
                expected=expected,
                hint=hint,
            )
    return None


def training_keys(
    order: Order, plan: Plan, *, first_step: int, steps: int, micro_batches: Sequence[int]
) -> Iterator[Key]:
    """The keys of the micro-batches numbered in `micro_batches` that have samples, step by step,
    from `first_step` (from 0).
    """
    at, indices = -1, torch.empty(0).numpy()
    for step in range(first_step, steps):
        for number in micro_batches:
            epoch, start, stop = plan.bounds(step, number)
            if start == stop:
                continue
            if epoch != at:
                # A slice of an array takes a fifth of the time of a tensor's
                at, indices = (
                    epoch,
                    order.indices(epoch).numpy(),
                )
            yield Key(epoch, start, tuple(indices[start:stop].tolist()))


def evaluation_keys(length: int, batch_size: int) -> Iterator[Key]:
    """The keys of one pass over a split, in its order."""
    for start in range(0, length, batch_size):
        yield Key(0, start, tuple(range(start, min(start + batch_size, length))))
