"""Loads the batches of keys, in this process or in workers, which it starts and ends."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from samewise.runner.config import schema
from samewise.runner.data.copies import deep_copy, unfit_entry
from samewise.runner.data.keyed import Failure, Key, KeyedDataset, with_later
from samewise.runner.errors import DataError, Problem
from samewise.runner.interfaces import Batch
from samewise.runner.processes.this_process import end_with_parent, reopen_files
from samewise.runner.torch_private import remove_worker_pids

_NOTICE_S = 60
"""Seconds that a worker keeps running after SIGTERM."""
_DEATH_S = 5
"""Seconds that a worker whose connection is closed may take to end."""
FULL_SHARED_MEMORY: Final = Problem(
    "loader.num_workers",
    "/dev/shm is full, through which workers send their batches",
    hint="enlarge it (docker run --shm-size=8g), or set loader.num_workers=0",
)
_STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers of this process."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass. `number` counts over all replicas."""

    number: int
    batch: Batch
    sent: Callable[[], Batch] | None = None
    """Returns the batch on the device, where it was sent ahead or several phases get a copy each.

    None: the step moves `batch` itself.
    """

    def copied(self) -> MicroBatch:
        """Copy the values for a loss besides the step's: a recipe may change its batch in place."""
        return MicroBatch(self.number, deep_copy(self.sent() if self.sent else self.batch))


class _Keys:
    """A DataLoader's sampler that yields keys instead of indices.

    All its iterations share one pass over the keys.
    """

    def __init__(self, keys: Callable[[], Iterator[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys()


class Loader:
    """Batches in the order of their keys, made in this process or by workers, with the same bits.

    Args:
        keyed: The data.
        keys: Makes an iterator over the requested keys.
        settings: The config's `loader`; None for no workers.
        is_cuda: Whether the batches go to a CUDA device. Workers' batches may then lie in
            page-locked memory; others are pinned as they are sent (`data/device.py`).
        persistent: Whether to keep the workers from one iteration to the next.
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
        self._keys = partial(with_later, keys, keyed) if keyed.span else keys
        self._workers: DataLoader[Any] | None = None
        # The DataLoader's iterators, each of which has workers of its own
        self._iterators = weakref.WeakSet[Any]()
        if settings and settings.num_workers:
            # The user decides how many workers are too many; torch warns for each loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            # Without a generator of its own, each iteration would draw from the global one.
            self._workers = DataLoader(
                keyed,
                sampler=_Keys(self._keys),  # pyright: ignore[reportArgumentType] (any iterable will do)
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
            else _track_workers(self._workers, self._iterators)
        )
        try:
            for batch in batches:
                if isinstance(batch, Failure):
                    raise batch.kind(*batch.problems)
                yield batch
        finally:
            # Ends the workers now. An error's traceback may keep this frame; then the garbage
            # collector would end them, and torch waits five seconds there for each.
            del batches

    def close(self) -> None:
        """End the workers now, even where an error's traceback still holds their iterator."""
        for batches in [*self._iterators]:
            batches._shutdown_workers()

    def _make_here(self, key: Key) -> Batch | Failure:
        """Make a batch in this process with one thread, as a worker does."""
        # The number of threads changes bits.
        threads = torch.get_num_threads()
        if threads == 1:
            return self._keyed[key]
        torch.set_num_threads(1)
        try:
            return self._keyed[key]
        finally:
            torch.set_num_threads(threads)


def _track_workers(loader: DataLoader[Any], iterators: weakref.WeakSet[Any]) -> Iterator[Any]:
    """Iterate over the loader, and record its iterator and the workers that it starts.

    Raises:
        RuntimeError: A worker died. Torch raises it, unless the worker was sending a batch.
    """
    if not _STARTED:
        # Runs at exit, also in processes forked by multiprocessing, which do not run atexit.
        Finalize(None, _end_workers, exitpriority=10)
    before = set(multiprocessing.active_children())
    try:
        batches = iter(loader)
    except OSError as error:
        # The locks of its queues are files there
        if error.errno == errno.ENOSPC:
            raise DataError(FULL_SHARED_MEMORY) from error
        raise
    iterators.add(batches)
    children = multiprocessing.active_children()
    _STARTED.update(worker for worker in children if worker not in before)
    workers = [worker for worker in children if worker in _STARTED]
    try:
        yield from batches
    # A worker died while it was sending a batch: torch reports only a closed connection.
    except (ConnectionError, EOFError) as error:
        ended = wait([worker.sentinel for worker in workers], _DEATH_S)
        dead = [worker for worker in workers if worker.sentinel in ended]
        for worker in dead:
            # Torch's handler of SIGCHLD raises its error here, unless it has done so before.
            worker.join()
        if dead:
            raise RuntimeError(
                "DataLoader worker (pid(s) "
                f"{', '.join(str(worker.pid) for worker in dead)}) exited unexpectedly"
            ) from error
        raise
    finally:
        if any(worker.exitcode for worker in workers):
            # Torch's own shutdown would wait for ever for a lock that a killed worker held.
            remove_worker_pids(id(batches))
            vars(batches)["_shutdown"] = True
            for worker in workers:
                worker.kill()


def _end_workers() -> None:
    """End the workers, whose batches nobody needs."""
    if _STARTED:
        # Torch's handler raises an error when a worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Python would send them SIGTERM, which they take for a notice, and then wait for them.
    for worker in _STARTED:
        worker.kill()


def _identity(batch: Any) -> Any:
    return batch


def _send_failure(queue: Any, error: Exception, item: Any) -> None:
    """Send the problem of a batch that cannot be pickled, as the main process waits for a batch.

    Called in the thread that sends a queue's items.
    """
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int):  # pyright: ignore[reportUnknownArgumentType]
        problem = (
            FULL_SHARED_MEMORY
            if "No space left" in str(error)
            else unfit_entry(item[1], ForkingPickler.dumps, "sent by a loader's worker", error)
        )
        queue.put((item[0], Failure((problem,))))
    else:
        traceback.print_exception(error)


def _start_worker(worker: int) -> None:
    """Ignore the signals that a scheduler sends to all processes of a run.

    The main process finishes its step, saves, and ends the workers.
    """
    main = multiprocessing.parent_process()
    # Without fork, the parent is a server process and not the main one.
    is_forked = multiprocessing.get_start_method() == "fork"
    # If the main process is killed, Linux ends the worker. Torch's own watch leaves a worker that
    # has a batch to hand over waiting for ever.
    end_with_parent(signal.SIGKILL, main.pid if main and is_forked else None)
    reopen_files()
    Queue._on_queue_feeder_error = _send_failure  # pyright: ignore
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM may come from the main process, which then waits for a worker that hangs.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_NOTICE_S))
