"""Rendezvous of a job's ranks: a store of torch.distributed.

A failing rank leaves its reason in it, so that the others end too.
"""

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samewise.runner.errors import ConfigError, PeerFailed, Problem, first_line

LOOPBACK = "127.0.0.1"
FAILED = "failed"
"""Key of the message of the first rank that failed."""

_LINGER_S = 3.0
_met: dict[str, Any] = {}
"""The store, once it exists."""


def meeting_point(timeout_s: float, init_method: str | None = None) -> Any:
    """Return the store at which the ranks of this process's job meet.

    The environment defines the ranks (RANK, WORLD_SIZE).

    Args:
        timeout_s: Seconds to wait for it.
        init_method: `tcp://host:port` at rank 0, or `file:///path` of a new file that all ranks
            see; null or `env://`: MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: The address cannot be reached, or its port is taken.
    """
    if "store" in _met:
        return _met["store"]
    scheme, _, address = (init_method or "env://").partition("://")
    store = (
        _file_store(Path(address), timeout_s)
        if scheme == "file"
        else _tcp_store(address, timeout_s)
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    # The agent's store outlives the ranks: restarted ranks must not read what their predecessors
    # wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _met["store"] = dist.PrefixStore(f"samewise/{attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
    return _met["store"]


def _tcp_store(address: str, timeout_s: float) -> Any:
    """Connect to the store of rank 0, or to that of torch's agent if no address is given."""
    agent_keeps_it = not address and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if address:
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = address.rpartition(":")
    variables = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    place = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    missing = ", ".join(name for name, value in variables.items() if not value) or "a port"
    ConfigError.raise_if(
        not all(variables.values()) or not variables["MASTER_PORT"].isdigit(),
        "strategy",
        f"the environment lacks {missing}",
        place,
        f"{', '.join(variables)}, as torchrun sets them",
    )
    # Otherwise torch would mistake a port in use for the agent's store.
    agent_store = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None) if address else None
    is_keeper = os.environ["RANK"] == "0" and not agent_keeps_it
    host = LOOPBACK if is_one_machine() else variables["MASTER_ADDR"]
    try:
        if is_keeper and host == LOOPBACK:
            return store_on_this_machine(int(variables["MASTER_PORT"]), timeout_s)
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            int(variables["MASTER_PORT"]),
            is_master=is_keeper,
            timeout=timedelta(seconds=timeout_s),
            # `wait_for` names the ranks that are missing, as torch does not
            wait_for_workers=False,
        )
    except (RuntimeError, OSError, OverflowError) as error:
        path = "strategy.init_method" if address else "MASTER_PORT"
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise ConfigError(
                Problem(path, "another program uses this port", place, "a free port")
            ) from None
        raise ConfigError(
            Problem(
                "strategy.init_method" if address else "MASTER_ADDR",
                f"rank 0 does not answer within {timeout_s:g} s",
                place,
                "the address of rank 0's machine, and a port it may use",
            )
        ) from None
    finally:
        if agent_store is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = agent_store


def is_one_machine() -> bool:
    """Return whether all ranks are on this machine, according to the environment."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        # Torchrun chooses its address itself.
        return (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            or os.environ.get("MASTER_ADDR") == LOOPBACK
        )
    return os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost", "::1")


def listen_locally() -> None:
    """Make gloo and `rpc` listen on this machine only, unless the environment sets an interface."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def store_on_this_machine(port: int, timeout_s: float) -> Any:
    """Open a store that accepts connections from this machine only.

    Torch's own accepts any. Port 0 means any free port.

    Raises:
        OSError: Another program uses the port.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(512)
        port = listening.getsockname()[1]
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            LOOPBACK,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # The store owns the socket from here on, so `with` may not close it
            master_listen_fd=listening.detach(),
        )


def _file_store(path: Path, timeout_s: float) -> Any:
    """Open a store in a file."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    try:
        path.touch()
        store = dist.FileStore(str(path), size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timedelta(seconds=timeout_s))
        joins = store.add(f"came/{rank}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(
            Problem(
                "strategy.init_method",
                f"the file cannot be used: {reason}",
                str(path),
                "a path that every rank can write to",
            )
        ) from None
    # A file left by an earlier job lists ranks that no longer exist.
    ConfigError.raise_if(
        joins > 1,
        "strategy.init_method",
        "the file was left by another job",
        str(path),
        "a new file for each job",
        f"rm {path}",
    )
    return store


def announce(error: BaseException) -> bool:
    """Tell the other ranks why this one ends, and return whether it is the first to do so.

    The first one's message is shown.
    """
    store = _met.get("store")
    if isinstance(error, PeerFailed) or store is None:
        return True
    announcement = f"rank {os.environ['RANK']} failed"
    with contextlib.suppress(RuntimeError):
        return (
            # Atomic, so that the first rank's message stays
            store.compare_set(FAILED, "", f"{announcement}: {str(error) or type(error).__name__}")
            .decode()
            .startswith(announcement)
        )
    return True


def linger() -> None:
    """Wait in the ending rank that keeps the store until the others have read the reason."""
    store = _met.get("store")
    with contextlib.suppress(RuntimeError):
        if (
            store is None
            or store.add("gone", 1) == 0
            or os.environ["RANK"] != "0"
            or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ):
            return
        end = time.monotonic() + _LINGER_S
        while store.add("gone", 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
            time.sleep(0.05)


def first_failure(store: Any, *, wait_s: float = 0.0) -> str:
    """Return the message of the first rank that failed, or an empty string."""
    with contextlib.suppress(RuntimeError, PeerFailed):
        if not wait_for(store, [], wait_s, until_failed=True):
            return store.get(FAILED).decode()
    return ""


def wait_for(
    store: Any, keys: list[str], timeout_s: float, *, until_failed: bool = False
) -> list[str]:
    """Wait for all keys, or with `until_failed` for a failed rank's message.

    Args:
        store: The store.
        keys: Keys to wait for.
        timeout_s: Seconds to wait.
        until_failed: Whether to wait for the message instead of the keys.

    Returns:
        The missing keys.

    Raises:
        PeerFailed: A rank has failed.
    """
    end, awaited = time.monotonic() + timeout_s, [FAILED] if until_failed else keys
    try:
        # `store.wait` would not notice that a rank has failed
        while not store.check(awaited):
            if not until_failed and store.check([FAILED]):
                raise PeerFailed(
                    f"rank {os.environ['RANK']} stopped, because {store.get(FAILED).decode()}"
                )
            if time.monotonic() > end:
                return [key for key in awaited if not store.check([key])]
            time.sleep(0.05)
    except RuntimeError:
        raise PeerFailed(
            Problem(f"rank {os.environ['RANK']}", "lost the connection to rank 0"), is_told=False
        ) from None
    return []
