"""The other ranks of a run: exchanges of small values, and which ranks are missing."""

import abc
import contextlib
import json
import pickle
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from samewise.runner.errors import PeerFailed, Problem, SamewiseError, TrainingError, raised_at
from samewise.runner.strategies.lost_connections import (
    TIMEOUT,
    is_lost_connection,
    peer_lost,
    ranks_in_words,
)
from samewise.runner.strategies.meeting import announce, first_failure
from samewise.runner.strategies.sealed import seal, unseal

_GATHERED, _FIRST = "gathered", "from rank 0"

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
"""Gathers everyone's tensors in sequence: (output, own). Torch's newer name, if it has it."""


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Hide the other ranks from a block's code, as in a run of one process.

    A collective in it is then an error, and a metric does not synchronise itself.
    """
    world, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = world


class Peers(abc.ABC):
    """All ranks of a run, including this one."""

    rank = 0
    size = 1
    doing = ""
    """Current activity of this rank, for messages."""

    def __init__(self) -> None:
        self.stop_heard: str | None = None
        """Reason for which this process was asked to stop."""
        self.stop_agreed: str | None = None
        """Reason for which all ranks stop, once they have agreed on it."""
        self.save_heard = self.save_agreed = False
        """Whether it is time for a checkpoint by this process's clock, and for all ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this process logs, draws and writes."""
        return self.rank == 0

    def ask_stop(self, reason: str) -> None:
        """Record that a signal asked this process to stop.

        The ranks agree in their next exchange, so that all stop after the same step.
        """
        self.stop_heard = reason
        if self.size == 1:
            self.stop_agreed = reason

    def ask_save(self) -> None:
        """Ask for a checkpoint, on which the ranks agree in their next exchange."""
        self.save_heard = True
        self.save_agreed |= self.size == 1

    def portion(self, batches: int) -> Sequence[int]:
        """Return the numbers of an evaluation's batches that this process computes."""
        return range(self.rank, batches, self.size)

    def collect(self, outcomes: Sequence[Any]) -> list[Any]:
        """Return the evaluation results of all processes in batch order. All ranks must call it."""
        by_rank = self.gather(list(outcomes))
        return [
            by_rank[number % len(by_rank)][number // len(by_rank)]
            for number in range(sum(map(len, by_rank)))
        ]

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. All ranks must call it."""

    @abc.abstractmethod
    def first(self, make: Callable[[], Any]) -> Any:
        """Return the result of rank 0 on every rank. All ranks must call it.

        An exception on rank 0 ends all ranks.
        """

    def explain(self, error: BaseException, *, step: int) -> BaseException:
        """Return the error, or its cause if another rank caused it. `step` counts from 1."""
        return error

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails, and disconnect, so that none waits for it."""

    def leave(self) -> None:
        """Wait for the other ranks, then disconnect."""


@final
class Alone(Peers):
    """Peers of a run in a single process."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def first(self, make: Callable[[], Any]) -> Any:
        return make()


class Processes(Peers):
    """Ranks of a torch.distributed process group, connected through a store."""

    ROOM = 1024
    """Bytes of a rank's message that go out in one collective; longer ones take a second."""

    PATIENCE_S = 4.0
    """Seconds for which ranks whose wait timed out wait for each other's notes."""

    def __init__(self, store: Any, *, rank: int, size: int, timeout_s: float) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._store = store
        self._timeout_s = timeout_s
        self._over = False
        self.doing = "starting"
        """Last exchange that this rank began, for messages."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. All ranks must call it."""
        # Torch's `all_gather_object` needs two collectives; a short message, such as a step's,
        # needs one here.
        self.doing = "exchanging small values"
        message = seal(pickle.dumps(value), _GATHERED)
        messages = self._gather_bytes(message, self.ROOM)
        longest = max(length for length, _ in messages)
        if longest > self.ROOM - 8:
            # A multiple of 8, since each row begins with an int64
            messages = self._gather_bytes(message, -(-longest // 8) * 8 + 8)
        return [pickle.loads(unseal(body, _GATHERED)) for _, body in messages]

    def _gather_bytes(self, message: bytes, room: int) -> list[tuple[int, bytes]]:
        own, gathered = (
            torch.zeros(room, dtype=torch.uint8),
            torch.empty(self.size * room, dtype=torch.uint8),
        )
        # The first eight bytes are the length, by which all see that a message needs a second round
        own[:8].view(torch.int64)[0] = len(message)
        if len(message) <= room - 8:
            own[8 : 8 + len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        all_gather(gathered, own)
        rows = gathered.view(self.size, room)
        lengths = [int(row[:8].view(torch.int64)[0]) for row in rows]
        return [
            (length, row[8 : 8 + length].numpy().tobytes())
            for length, row in zip(lengths, rows, strict=True)
        ]

    def first(self, make: Callable[[], Any]) -> Any:
        outcome: tuple[bool, Any] = (False, None)
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                outcome = (True, make())
            # The other ranks wait in the broadcast below, so they get the error too
            except BaseException as error:
                announce(error)
                outcome, raised = (False, f"{type(error).__name__}: {error}"), error
        self.doing = "waiting for a message from rank 0"
        message = seal(pickle.dumps(outcome), _FIRST) if self.rank == 0 else b""
        received = self._from_first(message)
        if raised:
            raise raised
        succeeded, value = outcome if self.rank == 0 else pickle.loads(unseal(received, _FIRST))
        if not succeeded:
            raise PeerFailed(Problem(f"rank {self.rank}", f"stopped, because rank 0 did: {value}"))
        return value

    def _from_first(self, payload: bytes) -> bytes:
        length = torch.tensor([len(payload)])
        dist.broadcast(length, src=0)
        message = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(message, src=0)
        return message.numpy().tobytes() if self.rank else payload

    def explain(self, error: BaseException, *, step: int) -> BaseException:
        if not is_lost_connection(error):
            return error
        line = raised_at(error, anywhere=False).removeprefix("raised ")
        note = f"{line or f'while {self.doing}'} at step {step}{_collective()}"
        # Also if another rank's timeout has closed the connection, since that rank looks for notes
        with contextlib.suppress(RuntimeError):
            self._store.set(f"waited/{self.rank}", note)
        if TIMEOUT.search(str(error)) and not first_failure(self._store):
            return self._explain_timeout(note)
        if culprit := first_failure(self._store, wait_s=2.0):
            return PeerFailed(Problem(f"rank {self.rank}", f"stopped, because {culprit}"))
        return peer_lost(f"while {self.doing} at step {step}")

    def _explain_timeout(self, own_note: str) -> SamewiseError:
        """Name the ranks that hang: those that leave no note when their wait times out."""
        keys = [f"waited/{number}" for number in range(self.size)]
        end = time.monotonic() + self.PATIENCE_S
        try:
            self._store.set_timeout(timedelta(seconds=self.PATIENCE_S))
            while (
                absent := [key for key in keys if not self._store.check([key])]
            ) and time.monotonic() < end:
                if culprit := first_failure(self._store):
                    return PeerFailed(Problem(f"rank {self.rank}", f"stopped, because {culprit}"))
                time.sleep(0.05)
            notes = {
                number: self._store.get(key).decode()
                for number, key in enumerate(keys)
                if key not in absent
            }
        # The process that keeps the store does not answer either.
        except RuntimeError:
            absent, notes = [keys[0]], {self.rank: own_note}
        missing = [number for number, key in enumerate(keys) if key in absent]
        waits = "; ".join(
            f"{ranks_in_words(numbers)} waited {self._timeout_s:g} s {note}"
            for note, numbers in _group_by_note(notes).items()
        )
        hint = "strategy.timeout_s sets how long to wait"
        if missing:
            return TrainingError(
                Problem(
                    ranks_in_words(missing),
                    f"did not respond: {waits}",
                    hint=f"look at its log: it hangs, or is slower than the others; {hint}",
                )
            )
        return TrainingError(
            Problem(ranks_in_words(list(notes)), f"wait for each other: {waits}", hint=hint)
        )

    def abandon(self, error: BaseException) -> None:
        if self._over:
            return
        self._over = True
        announce(error)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    def leave(self) -> None:
        if self._over:
            return
        with contextlib.suppress(RuntimeError):
            self.gather(None)
            dist.destroy_process_group()
        self._over = True


def _group_by_note(notes: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, note in notes.items():
        ranks.setdefault(note, []).append(rank)
    return ranks


def _collective() -> str:
    """Name the last collective that this process started, in brackets; empty if unknown."""
    # Torch's flight recorder is private and differs between versions; only a message needs it.
    with contextlib.suppress(Exception):
        from samewise.runner.torch_private import dump_fr_trace_json

        last = max(
            json.loads(dump_fr_trace_json())["entries"], key=lambda entry: entry["record_id"]
        )
        return (
            f" ({last['profiling_name']}, collective {last['collective_seq_id']} of this process)"
        )
    return ""
