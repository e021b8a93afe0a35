"""The other ranks of a run, and what is said among them besides gradients: small values, who is missing, who has failed."""

from __future__ import annotations

import abc
import contextlib
import os
import pickle
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from samewise.runner.errors import ConfigError, PeerFailed, Problem, SamewiseError, TrainingError
from samewise.runner.launch import is_rank

FAILED = "failed"

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
"""(out, mine): everyone's tensor, one after the other. The newer name, where torch has it."""


class Peers(abc.ABC):
    """All ranks of a run, this one among them."""

    rank = 0
    size = 1
    local_rank = 0

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks. All ranks must call it."""

    @abc.abstractmethod
    def first(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank; what it raises there ends all of them. All ranks must call it."""

    def explained(self, error: BaseException) -> BaseException:
        """The error, or what it comes from where it tells of another rank."""
        return error

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and hang up, so that none waits for it."""

    def leave(self) -> None:
        """Wait for the others, then hang up."""


@final
class Alone(Peers):
    """There are no others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def first(self, make: Callable[[], Any]) -> Any:
        return make()


@final
class Processes(Peers):
    """The ranks of a torch.distributed process group.

    Args:
        store: Where they met.
        rank: This one's number.
        size: How many there are.
        local_rank: This one's number on its machine.
        timeout_s: Seconds that a collective may take.
    """

    ROOM = 1024
    """Bytes of a rank's message that go out in one collective; longer ones take a second."""

    def __init__(self, store: Any, *, rank: int, size: int, local_rank: int, timeout_s: float) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._store = store
        self._timeout_s = timeout_s
        self._over = False
        self.doing = "starting"
        """What this rank last began to exchange, for messages."""

    def gather(self, value: Any) -> list[Any]:
        self.doing = "exchanging small values"
        said = pickle.dumps(value)
        messages = self._gathered(said, self.ROOM)
        longest = max(length for length, _ in messages)
        if longest > self.ROOM - 8:
            messages = self._gathered(said, -(-longest // 8) * 8 + 8)
        return [pickle.loads(body) for _, body in messages]

    def _gathered(self, said: bytes, room: int) -> list[tuple[int, bytes]]:
        mine, everyone = torch.zeros(room, dtype=torch.uint8), torch.empty(self.size * room, dtype=torch.uint8)
        mine[:8].view(torch.int64)[0] = len(said)
        if len(said) <= room - 8:
            mine[8 : 8 + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        all_gather(everyone, mine)
        rows = everyone.view(self.size, room)
        lengths = [int(row[:8].view(torch.int64)[0]) for row in rows]
        return [(length, row[8 : 8 + length].numpy().tobytes()) for length, row in zip(lengths, rows, strict=True)]

    def first(self, make: Callable[[], Any]) -> Any:
        outcome: tuple[bool, Any] = (False, None)
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                outcome = (True, make())
            except BaseException as error:
                announce(error)
                outcome, raised = (False, f"{type(error).__name__}: {error}"), error
        self.doing = "hearing from rank 0"
        done, value = self._from_rank_0(outcome)
        if raised:
            raise raised
        if not done:
            raise PeerFailed(Problem(f"rank {self.rank}", f"stopped, because rank 0 did: {value}"))
        return value

    def _from_rank_0(self, value: Any) -> Any:
        said = pickle.dumps(value) if self.rank == 0 else b""
        length = torch.tensor([len(said)])
        dist.broadcast(length, 0)
        body = torch.frombuffer(bytearray(said), dtype=torch.uint8) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(body, 0)
        return value if self.rank == 0 else pickle.loads(body.numpy().tobytes())

    def explained(self, error: BaseException) -> BaseException:
        if isinstance(error, SamewiseError) or not isinstance(error, RuntimeError) or not _CONNECTION.search(str(error)):
            return error
        culprit = _failed(self._store, wait_s=2.0)
        if culprit:
            return PeerFailed(Problem(f"rank {self.rank}", f"stopped, because {culprit}"))
        if _TIMEOUT.search(str(error)):
            return TrainingError(
                Problem(
                    f"rank {self.rank}",
                    f"waited {self._timeout_s:g} s for the others while {self.doing}",
                    hint="a rank hangs, or is slower than the rest: look at its log; strategy.timeout_s sets how long to wait",
                )
            )
        hint = "the same command goes on from the last checkpoint"
        return PeerFailed(Problem(f"rank {self.rank}", f"lost another rank while {self.doing}", hint=hint), is_told=False)

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


_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|Timed out waiting|[Ss]ocket|TCPStore|DistStore")
_TIMEOUT = re.compile(r"Timed out waiting|timed out|Watchdog caught collective")


def announce(error: BaseException) -> bool:
    """Tell the other ranks why this one ends. Whether it is the first to do so, and its message the one to show."""
    store = _met.get("store")
    if isinstance(error, PeerFailed) or store is None:
        return True
    me = f"rank {os.environ['RANK']} failed"
    with contextlib.suppress(RuntimeError):
        return store.compare_set(FAILED, "", f"{me}: {str(error) or type(error).__name__}").decode().startswith(me)
    return True


def linger(seconds: float = 3.0) -> None:
    """In an ending rank: where this process keeps the store, stay until the others have had the time to read in it why."""
    store = _met.get("store")
    with contextlib.suppress(RuntimeError):
        if store is None or store.add("gone", 1) == 0 or os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        end = time.monotonic() + seconds
        while store.add("gone", 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
            time.sleep(0.05)


def _failed(store: Any, *, wait_s: float = 0.0) -> str:
    """What the first rank that failed has said, or nothing."""
    with contextlib.suppress(RuntimeError, PeerFailed):
        if not awaited(store, [], wait_s, until_failed=True):
            return store.get(FAILED).decode()
    return ""


def awaited(store: Any, keys: list[str], timeout_s: float, *, until_failed: bool = False) -> list[str]:
    """Wait until all keys are there. Returns those that are not.

    Args:
        store: Where.
        keys: Which.
        timeout_s: Seconds to wait.
        until_failed: Wait for the message of a rank that failed instead.

    Raises:
        PeerFailed: a rank has failed.
    """
    end, wanted = time.monotonic() + timeout_s, [FAILED] if until_failed else keys
    try:
        while not store.check(wanted):
            if not until_failed and store.check([FAILED]):
                raise PeerFailed(f"rank {os.environ['RANK']} stopped, because {store.get(FAILED).decode()}")
            if time.monotonic() > end:
                return [key for key in wanted if not store.check([key])]
            time.sleep(0.05)
    except RuntimeError:
        raise PeerFailed(Problem(f"rank {os.environ['RANK']}", "lost the connection to rank 0"), is_told=False) from None
    return []


_met: dict[str, Any] = {}
"""The store, once it is there."""


def meeting_point(timeout_s: float) -> Any:
    """The store at which the ranks of this process's job meet, from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        ConfigError: it cannot be reached, or its port is taken.
    """
    if "store" in _met:
        return _met["store"]
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    address = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    if not all(given.values()) or not given["MASTER_PORT"].isdigit():
        missing = ", ".join(name for name, value in given.items() if not value) or "a port"
        raise ConfigError(Problem("strategy", f"the environment lacks {missing}", address, f"{', '.join(given)}, as torchrun sets them"))
    agent_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            given["MASTER_ADDR"],
            int(given["MASTER_PORT"]),
            is_master=given["RANK"] == "0" and not agent_keeps_it,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise ConfigError(Problem("MASTER_PORT", "another program uses this port", address, "a free port")) from None
        message = f"rank 0 does not answer within {timeout_s:g} s"
        raise ConfigError(Problem("MASTER_ADDR", message, address, "the address of rank 0's machine, and a port it may use")) from None
    store.set_timeout(timedelta(seconds=timeout_s))
    # The agent's store outlives the ranks: those that are started again must not read what the ones before them wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _met["store"] = dist.PrefixStore(f"samewise/{attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
    return _met["store"]


def join(*, backend: str, join_timeout_s: float, timeout_s: float) -> Peers:
    """Meet the other ranks and make the process group.

    Args:
        backend: For tensors on the run's device: gloo or nccl. What lies on the CPU always goes over gloo.
        join_timeout_s: Seconds to wait for all ranks to arrive.
        timeout_s: Seconds that a collective may take.

    Raises:
        ConfigError: some do not come, named; or the backend is not there.
    """
    if not is_rank():
        return Alone()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_point(join_timeout_s)
    store.set(f"joined/{rank}", "")
    expected = [f"joined/{number}" for number in range(size)]
    missing = awaited(store, expected, join_timeout_s)
    if missing:
        numbers = ", ".join(str(expected.index(key)) for key in missing)
        raise ConfigError(
            Problem(
                "strategy.join_timeout_s",
                f"rank {numbers} of {size} did not join within {join_timeout_s:g} s",
                expected=f"ranks 0 to {size - 1}",
                hint="start as many as WORLD_SIZE says, all with one MASTER_ADDR and MASTER_PORT",
            )
        )
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(Problem("strategy.backend", str(error).splitlines()[0], backend, "gloo, or nccl with CUDA")) from error
    return Processes(store, rank=rank, size=size, local_rank=int(os.environ.get("LOCAL_RANK", rank)), timeout_s=timeout_s)


def packed(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """uint8[bytes]: all of them one after the other, each at a multiple of 16; and where each begins."""
    offsets, end = list[int](), 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // 16) * 16
    flat = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, offsets, strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + len(raw)] = raw
    return flat, offsets


def unpacked(flat: Tensor, tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """What `packed` put together, with the dtypes and shapes of `tensors`."""
    return [
        flat[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, offsets, strict=True)
    ]
