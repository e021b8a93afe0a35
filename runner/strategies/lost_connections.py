"""Explains a lost connection to another rank: names the rank."""

from __future__ import annotations

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
"""Of each rank that has joined: `here`, and its process."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is one that torch raises if another process does not answer."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, SamewiseError)
        and bool(_CONNECTION.search(str(error)))
    )


def peer_lost(when: str) -> PeerFailed:
    """Names the ranks of this machine whose processes are gone.

    Processes of other machines cannot be seen.
    """
    end = time.monotonic() + 1.0  # a process closes its connections before it ends
    while (
        not (
            gone := [
                rank
                for rank, (place, process) in places.items()
                if place == here() and _is_gone(process)
            ]
        )
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    who = (
        f"{ranks_in_words(gone)}, whose process{'es are' if len(gone) > 1 else ' is'} gone,"
        if gone
        else "another rank"
    )
    hint = "run the same command again to resume from the last checkpoint"
    return PeerFailed(
        Problem(f"rank {os.environ['RANK']}", f"lost {who} {when}", hint=hint), is_told=False
    )


def here() -> str:
    """This machine, and its process namespace: in a container only its own processes can be seen."""
    seen = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()}/{seen}"


def _is_gone(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return os.path.exists("/proc/self/stat")  # not known on other systems than Linux


def explain(error: BaseException) -> BaseException:
    """The error to raise: a lost connection is explained, for cases before a run exists that could
    explain it.
    """
    return peer_lost("before the training began") if is_lost_connection(error) else error


def ranks_in_words(numbers: Sequence[int]) -> str:
    """`rank 0`, or `ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
