"""Runs torch's elastic agent, which starts a run's ranks, and restarts them if one dies."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import targets
from samewise.runner.errors import (
    Interrupted,
    Problem,
    SamewiseError,
    TrainingError,
    strip_heading,
)
from samewise.runner.processes.this_process import end_rank
from samewise.runner.records import own_code, sources
from samewise.runner.records.files import read_json
from samewise.runner.strategies.meeting import LOOPBACK, store_on_this_machine
from samewise.runner.strategies.sealed import SECRET, new_secret
from samewise.runner.torch_private import is_in_bad_fork, subprocess_handler

_PATIENCE_S = 10
"""Seconds to wait for ranks that hang, once another has reported an error."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""The signals that the agent passes on to the ranks, which then finish their step and save."""
_PR_SET_NAME = 15  # linux/prctl.h
_RESUME = "run the same command again to resume from the last checkpoint"


def prepare_forks(composed: Composed) -> frozenset[str]:
    """Import and read what each rank would, if ranks can be forks of this process.

    They can if it has one thread, and no code of the user's may have read its rank when imported.

    Returns:
        This process's open files; none if each rank has to be a new process.
    """
    if (
        sys.platform != "linux"
        or len(os.listdir("/proc/self/task")) > 1
        or any(
            re.search(rb"\b(LOCAL_)?RANK\b|WORLD_SIZE", file.read_bytes())
            for file in filter(None, map(sources.place, composed.code.files))
        )
    ):
        return frozenset()
    # So that no fork repeats what waits to be written, and what a killed one wrote is in its log
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("build", "loop"):
        importlib.import_module(f"samewise.runner.training.{name}")
    own_code.record(targets(composed.whole))
    # Without the descriptor by which they are listed
    return frozenset(
        x for x in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{x}")
    )


def run_agent(
    composed: Composed, nproc: int, handed: Path, files: frozenset[str]
) -> tuple[SamewiseError | None, int | None]:
    """Run torch's elastic agent until it ends.

    Args:
        composed: The config.
        nproc: The number of ranks.
        handed: The folder in which this process and the ranks exchange files.
        files: What `prepare_forks` returned.

    Returns:
        The error for ranks that ended without a message, or None; and the rank that seems to be
        lost for good, or None.
    """
    # `_report_outcomes` reports errors of ranks, once
    for name in ("agent.server", "multiprocessing"):
        for part in (f"torch.distributed.elastic.{name}.api", f"torch.distributed.elastic.{name}"):
            logging.getLogger(part).setLevel(logging.CRITICAL)
    # Torch passes on all of these but SIGUSR1, by which clusters announce the end of a job
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    # Without torch's own reports of lost connections
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    on_cuda = str(composed.cfg.device) != "cpu" and torch.cuda.device_count() > 0

    def start(args: tuple[str, ...], env: dict[str, str], **options: Any) -> Any:
        """Start a rank; `Popen` itself forks before it starts a program."""
        return subprocess.Popen(
            args,
            env=env,
            preexec_fn=lambda: become_rank(args, env, files, on_cuda=on_cuda),
            # Python ignores SIGPIPE and SIGXFSZ; other programs do not
            restore_signals=False,
            **options,
        )

    subprocess_handler.Popen = start if files else subprocess.Popen
    os.environ[SECRET] = new_secret()
    agent = _Agent(composed, nproc, handed)
    try:
        result: Any = agent.run()
    except SignalException as stopped:
        return Interrupted(Problem("", f"stopped by {stopped.sigval.name}", hint=_RESUME)), None
    if not result.is_failed():
        return None, None
    rank, failure = _first_to_die(result)
    ended = _describe_exit(agent.logs, rank, failure.exitcode)
    if note := read_json(handed / f"stopped-{rank}.json"):
        # What a rank said that took another's failure for the reason
        ended = f"{ended}: {strip_heading(note['said'])}"
    return TrainingError(
        Problem(
            f"rank {rank}",
            f"{ended}; what it wrote is in {agent.logs}",
            hint=f"{_RESUME}; strategy.max_restarts=3 does so automatically",
        )
    ), agent.lost


def become_rank(
    command: tuple[str, ...], variables: dict[str, str], files: frozenset[str], *, on_cuda: bool
) -> NoReturn:
    """Become a rank in a fork.

    Args:
        command: What starts the rank as a new process, if CUDA, which the parent used, does not
            work in forks. It ends with the module whose `main` is a rank, and its argument.
        variables: The rank's environment.
        files: Open files to keep.
        on_cuda: Whether the rank computes on a CUDA device.
    """
    try:
        for number in map(signal.Signals.__getitem__, SIGNALS.split(",")):
            signal.signal(
                number,
                signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
            )
        # Those of the agent: its store, other ranks' logs, and the pipe by which `Popen` waits
        for name in set(os.listdir("/proc/self/fd")) - files:
            os.closerange(int(name), int(name) + 1)
        os.environ.update(variables)
        if on_cuda and (is_in_bad_fork() or not torch.cuda.is_available()):
            os.execve(command[0], command, variables)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {variables['RANK']}".encode())
        # `Popen` disables the collector, which need not scan everything that was imported
        gc.freeze()
        gc.enable()
        end_rank(importlib.import_module(command[-2]).main(Path(command[-1])))
    finally:
        os._exit(1)


@final
class _Here(StaticTCPRendezvous):
    """The rendezvous of the agent and its ranks, on a store for this machine only."""

    def __init__(self, timeout_s: float) -> None:
        # Torch's own store accepts any connection, and unpickles what it receives
        self._here = store_on_this_machine(0, timeout_s)
        super().__init__(LOOPBACK, self._here.port, 0, 1, uuid.uuid4().hex, int(timeout_s))

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(
            PrefixStore(self.run_id, self._here),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(LOOPBACK, self._here.port),
        )


def _first_to_die(result: Any) -> tuple[int, Any]:
    """Return the rank that failed first, and how it ended."""
    # A rank that was killed, rather than those that then missed it
    return min(result.failures.items(), key=lambda pair: (pair[1].exitcode >= 0, pair[1].timestamp))


def _describe_exit(logs: Path, rank: int, code: int) -> str:
    """Describe how a rank ended, with the line where it crashed, from `faulthandler`'s report."""
    ended = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    written = max(logs.glob(f"*/attempt_*/{rank}/stderr.log"), key=os.path.getmtime, default=None)
    report = (
        written.read_text(encoding="utf-8", errors="replace").partition("Fatal Python error: ")[2]
        if written
        else ""
    )
    # faulthandler begins with `Thread` or `Current thread`, and marks a crash in a collection
    line = re.search(
        r'hread .*\n(?:  Garbage-collecting\n)?  File "(.+)", line (\d+) in (.+)', report
    )
    return f"{ended} in {line[3]} ({line[1]}:{line[2]})" if line else ended


@final
class _Agent(LocalElasticAgent):
    """Restarts ranks if a process died, but not after an error, which would only occur again.

    A rank that dies again before there is a new checkpoint, or after the last restart, counts as
    lost: starting as many ranks again would not help.
    """

    def __init__(self, composed: Composed, nproc: int, handed: Path) -> None:
        strategy = composed.cfg.strategy
        self.lost: int | None = None
        self.logs = composed.folder.path / "ranks"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._died: tuple[int, str] | None = None
        self._checkpoints, self._handed, self._nproc = composed.folder.checkpoints, handed, nproc
        self._grace_s, self._max_restarts = int(strategy.grace_s), strategy.max_restarts
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=sys.executable,
            # With -P, since the current folder holds no code to import
            args=("-P", "-u", "-m", "samewise.runner.training.launch", str(handed)),
            rdzv_handler=_Here(float(strategy.join_timeout_s)),
            max_restarts=self._max_restarts,
            monitor_interval=0.1,
            local_addr=LOOPBACK,
        )
        # Only rank 0 writes to the terminal; the others write to files below `logs`
        logs_specs = DefaultLogsSpecs(
            log_dir=str(self.logs), redirects=dict.fromkeys(range(1, nproc), Std.ALL)
        )
        super().__init__(spec, logs_specs, start_method="spawn", exit_barrier_timeout=30)

    def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        # A rank that has reported an error would only fail in the same way again
        if result.is_failed() and outcomes(self._handed, self._nproc):
            self._remaining_restarts = 0
        elif result.is_failed():
            rank, failure = _first_to_die(result)
            newest = max((path.name for path in self._checkpoints.glob("step-*")), default="")
            if (rank, newest) == self._died or not self._remaining_restarts:
                self.lost, self._remaining_restarts = rank, 0
            else:
                again = self._max_restarts - self._remaining_restarts + 1
                what = "resuming from the last checkpoint" if newest else "starting again"
                ended = _describe_exit(self.logs, rank, failure.exitcode)
                print(
                    f"warning: rank {rank} {ended}\n    {what} (restart {again} of "
                    f"{self._max_restarts})",
                    file=sys.stderr,
                    flush=True,
                )
            self._died = rank, newest
        return result

    def _start_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context: Any = self._pcontext
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            """Wait `grace_s` for the ranks to end, whatever torch's timeout is."""
            # After an error of a rank the others end by themselves, unless they hang
            has_failed = outcomes(self._handed, self._nproc)
            close(death_sig, min(self._grace_s, _PATIENCE_S) if has_failed else self._grace_s)

        context.close = close_soon
        return started

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Shut the ranks down without ending their loader workers."""
        # The agent signals process groups: SIGTERM would end workers, which ignore SIGUSR1
        shut_down: Any = super()._shutdown
        # Torch 2.11 has no timeout
        arguments = {"timeout": timeout} if "timeout" in signature(shut_down).parameters else {}
        shut_down(signal.SIGUSR1 if death_sig == signal.SIGTERM else death_sig, **arguments)


def outcomes(handed: Path, nproc: int) -> list[Mapping[str, Any]]:
    """Return the error reports of ranks."""
    return [
        outcome for rank in range(nproc) if (outcome := read_json(handed / f"rank-{rank}.json"))
    ]
