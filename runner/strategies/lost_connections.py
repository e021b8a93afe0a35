"""Explains a lost connection to another rank by naming the rank."""

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from samewise.runner.errors import PeerFailed, Problem, SamewiseError

_CONNECTION = re.compile(
    r"gloo|pair closure|NCCL|RPC|Connection (closed|reset)|Broken pipe|Timed out "
    r"waiting|[Ss]ocket|TCPStore|DistStore"
)
TIMEOUT = re.compile(
    r"Timed out waiting|timeout caused pair closure|timed out|Watchdog caught collective"
)
places: dict[int, list[str]] = {}
"""Machine and process of each rank that has joined."""


def is_lost_connection(error: BaseException) -> bool:
    """Return whether torch raised the error because another process does not answer."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, SamewiseError)
        and bool(_CONNECTION.search(str(error)))
    )


def peer_lost(when: str) -> PeerFailed:
    """Explain that ranks are lost, naming those on this machine whose processes have ended.

    Processes of other machines cannot be seen.
    """
    # A process closes its connections before it ends.
    end = time.monotonic() + 1.0
    while not (lost := _lost_ranks()) and time.monotonic() < end:
        time.sleep(0.05)
    who = (
        f"{ranks_in_words(lost)}, whose process{'es are' if len(lost) > 1 else ' is'} gone,"
        if lost
        else "another rank"
    )
    return PeerFailed(
        Problem(
            f"rank {os.environ['RANK']}",
            f"lost {who} {when}",
            hint="run the same command again to resume from the last checkpoint",
        ),
        is_told=False,
    )


def _lost_ranks() -> list[int]:
    """Return the ranks of this machine whose processes have ended."""
    return [
        rank
        for rank, (place, process) in places.items()
        if place == machine_name() and _is_gone(process)
    ]


def machine_name() -> str:
    """Return this machine and its process namespace.

    A container sees only its own processes.
    """
    link = "/proc/self/ns/pid"
    namespace = os.readlink(link) if os.path.exists(link) else ""
    return f"{socket.gethostname()}/{namespace}"


def _is_gone(process: str) -> bool:
    try:
        # The program's name, in brackets, may have blanks; the state follows: Z zombie, X dead
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        # Systems other than Linux do not show it.
        return os.path.exists("/proc/self/stat")


def explain(error: BaseException) -> BaseException:
    """Explain a lost connection before a run exists that could do so; other errors are returned."""
    return peer_lost("before the training began") if is_lost_connection(error) else error


def ranks_in_words(numbers: Sequence[int]) -> str:
    """Return `rank 0`, or `ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
