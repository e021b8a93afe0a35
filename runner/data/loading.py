"""Loads the batches of keys, in this process or in workers.

Starts and ends the workers, and notices one that was killed.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader

from samewise.runner.config import schema
from samewise.runner.data.copies import deep_copy, unfit_entry
from samewise.runner.data.keyed import Failure, Key, KeyedDataset
from samewise.runner.errors import DataError
from samewise.runner.interfaces import Batch
from samewise.runner.processes.this_process import end_with_parent, reopen_files
from samewise.runner.torch_private import remove_worker_pids

_NOTICE_S = 60
"""How long a worker keeps running after SIGTERM."""
_DEATH_S = 5
"""How long the end of a worker whose connection is closed may take."""
_STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers of this process."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass. `number` counts over all replicas."""

    number: int
    batch: Batch
    sent: Callable[[], Batch] | None = None
    """Returns it on the device, where it is sent before its turn or several phases get a copy each;
    None: the step moves `batch` itself."""

    def copied(self) -> MicroBatch:
        """The same values in objects of their own, for a loss besides the step's: a recipe may
        change its batch in place, or take entries out of it.
        """
        return MicroBatch(self.number, deep_copy(self.sent() if self.sent else self.batch))


class _Keys:
    """A DataLoader's sampler that yields keys instead of indices, in a single pass however often it
    is iterated.
    """

    def __init__(self, keys: Callable[[], Iterator[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys()


class Loader:
    """Batches in the order of their keys, made here or by a DataLoader's workers, which changes
    only the speed.

    Args:
        keyed: The data.
        keys: Makes an iterator over the keys wanted.
        settings: Those of workers; None: there are none.
        is_cuda: Whether the batches go to a CUDA device: workers' may lie in page-locked memory;
            others are pinned as they are sent (`data/device.py`).
        persistent: Keep the workers from one iteration to the next.
    """

    def __init__(
        self,
        keyed: KeyedDataset,
        keys: Callable[[], Iterator[Key]],
        settings: schema.Loader | None = None,
        *,
        is_cuda: bool = False,
        persistent: bool = False,
    ) -> None:
        self._keyed = keyed
        self._keys = keys
        self._workers: DataLoader[Any] | None = None
        self._begun = weakref.WeakSet[Any]()  # the DataLoader's iterators, each with its workers
        if settings and settings.num_workers:
            # The user decides how many workers are too many; torch warns for each loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            # A separate generator: otherwise each iteration draws from the global one
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
                generator=torch.Generator(),
            )

    def __iter__(self) -> Iterator[Batch]:
        batches = (
            map(self._make_here, self._keys())
            if self._workers is None
            else _track_workers(self._workers, self._begun)
        )
        try:
            for batch in batches:
                if isinstance(batch, Failure):
                    raise DataError(*batch.problems)
                yield batch
        finally:
            # Ends workers now; where an error keeps this frame, it would be the garbage collector,
            # in which torch waits five seconds for each
            del batches

    def close(self) -> None:
        """End the workers now, whoever still holds what iterates: the traceback of an error does."""
        for batches in [*self._begun]:
            batches._shutdown_workers()

    def _make_here(self, key: Key) -> Batch | Failure:
        """Make a batch in this process as a worker would: with one thread, since the number of
        threads changes bits.
        """
        threads = torch.get_num_threads()
        if threads == 1:
            return self._keyed[key]
        torch.set_num_threads(1)
        try:
            return self._keyed[key]
        finally:
            torch.set_num_threads(threads)


def _track_workers(loader: DataLoader[Any], begun: weakref.WeakSet[Any]) -> Iterator[Any]:
    """Iterate, and keep track of the workers that this starts, and in `begun` of what has them.

    A worker that died is torch's RuntimeError, also if it was sending a batch, of which torch
    itself says only that a connection was closed.
    """
    if not _STARTED:
        # By atexit, and at the end of processes forked by multiprocessing, which do not run atexit
        Finalize(None, _end_workers, exitpriority=10)
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
            # Torch's handler of SIGCHLD raises its error here, unless it has done so before
            worker.join()
        if dead:
            raise RuntimeError(
                "DataLoader worker (pid(s) "
                f"{', '.join(str(worker.pid) for worker in dead)}) exited unexpectedly"
            ) from error
        raise
    finally:
        if any(worker.exitcode for worker in workers):
            # torch's own shutdown would wait for ever for a lock that the worker held when it was
            # killed.
            remove_worker_pids(id(batches))
            vars(batches)["_shutdown"] = True
            for worker in workers:
                worker.kill()


def _end_workers() -> None:
    """End the workers, whose batches nobody needs.

    Python would send them SIGTERM, which they take for a notice, and then wait.
    """
    if _STARTED:
        # Torch's handler raises an error when a worker dies
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in _STARTED:
        worker.kill()


def _identity(batch: Any) -> Any:
    return batch


def _send_failure(queue: Any, error: Exception, sent: Any) -> None:
    """Send the problem of a batch that cannot be pickled, for which the main process would wait.

    Called in the thread that sends what is put into a queue.
    """
    if isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], int):  # pyright: ignore[reportUnknownArgumentType]
        queue.put(
            (
                sent[0],
                Failure(
                    (
                        unfit_entry(
                            sent[1], ForkingPickler.dumps, "sent by a loader's worker", error
                        ),
                    )
                ),
            )
        )
    else:
        traceback.print_exception(error)


def _start_worker(worker: int) -> None:
    """Ignore signals that a scheduler sends to all processes of a run: the main process finishes
    its step, saves, and ends the workers.

    Where it is killed, Linux ends them: torch's own watch over it leaves a worker that has a batch
    to hand over waiting for ever.
    """
    # Else another process is its parent
    main, is_forked = (
        multiprocessing.parent_process(),
        multiprocessing.get_start_method() == "fork",
    )
    end_with_parent(signal.SIGKILL, main.pid if main and is_forked else None)
    reopen_files()
    Queue._on_queue_feeder_error = _send_failure  # pyright: ignore
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # It may be the main process's, which waits for a worker that hangs
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_NOTICE_S))
