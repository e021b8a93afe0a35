"""Runs torch's elastic agent, which starts a run's ranks, and restarts them if one dies."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, final

from samewise.runner.config.compose import Composed
from samewise.runner.errors import Interrupted, Problem, SamewiseError, TrainingError
from samewise.runner.records.files import read_json
from samewise.runner.strategies.sealed import SECRET, new_secret

LOOPBACK = "127.0.0.1"
_PATIENCE_S = 10
"""Seconds to wait for ranks that hang, once another has reported an error."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""The signals that the agent passes on to the ranks, which then finish their step and save."""


def run_agent(
    composed: Composed, nproc: int, handed: Path, module: str
) -> tuple[SamewiseError | None, int | None]:
    """Run torch's elastic agent until it ends.

    Returns:
        The error for ranks that ended without a message, or None; and the rank that seems to be
        lost for good, or None.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

    # `_report_outcomes` reports errors of ranks, once
    for name in ("agent.server", "multiprocessing"):
        for part in (f"torch.distributed.elastic.{name}.api", f"torch.distributed.elastic.{name}"):
            logging.getLogger(part).setLevel(logging.CRITICAL)
    strategy = composed.cfg.strategy
    # Torch passes on all of these but SIGUSR1, by which clusters announce the end of a job
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    # Without torch's own reports of lost connections
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[SECRET] = new_secret()
    logs = composed.folder.path / "ranks"
    logs.mkdir(parents=True, exist_ok=True)
    handler = _meeting_here(float(strategy.join_timeout_s))
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        # With -P, since the current folder holds no code to import
        args=("-P", "-u", "-m", module, str(handed)),
        rdzv_handler=handler,
        max_restarts=strategy.max_restarts,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )
    # Only rank 0 writes to the terminal; the others write to files below `logs`
    quiet = dict.fromkeys(range(1, nproc), Std.ALL)
    progress = partial(_newest, composed.folder.checkpoints)
    agent = _agent(
        spec,
        DefaultLogsSpecs(log_dir=str(logs), redirects=quiet),
        logs=logs,
        handed=handed,
        progress=progress,
        grace_s=int(strategy.grace_s),
    )
    try:
        result = agent.run()
    except SignalException as stopped:
        return Interrupted(
            Problem(
                "",
                f"stopped by {stopped.sigval.name}",
                hint="run the same command again to resume from the last checkpoint",
            )
        ), None
    finally:
        handler.shutdown()
    if not result.is_failed():
        return None, None
    rank, failure = _first_to_die(result)
    hint = (
        "run the same command again to resume from the last checkpoint; "
        "strategy.max_restarts=3 does so automatically"
    )
    return TrainingError(
        Problem(
            f"rank {rank}",
            f"{_describe_exit(logs, rank, failure.exitcode)}; what it wrote is in {logs}",
            hint=hint,
        )
    ), agent.lost


def _meeting_here(timeout_s: float) -> Any:
    """Return the rendezvous of the agent and its ranks, on a store for this machine only."""
    # Torch's own rendezvous accepts any connection, and unpickles what it receives
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    from samewise.runner.strategies.meeting import store_on_this_machine

    @final
    class Here(RendezvousHandler):
        use_agent_store = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

        def __init__(self) -> None:
            self._id, self._store = uuid.uuid4().hex, store_on_this_machine(0, timeout_s)

        def get_backend(self) -> str:
            return "here"

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(
                PrefixStore(self._id, self._store),
                0,
                1,
                RendezvousStoreInfo(LOOPBACK, self._store.port),
            )

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._id

        def shutdown(self) -> bool:
            return True

    return Here()


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


def _newest(checkpoints: Path) -> str:
    return max((path.name for path in checkpoints.glob("step-*")), default="")


def _agent(
    spec: Any,
    logs_specs: Any,
    *,
    logs: Path,
    handed: Path,
    progress: Callable[[], str],
    grace_s: int,
) -> Any:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    @final
    class Agent(LocalElasticAgent):
        """Restarts ranks if a process died, but not after an error, which would only occur again.

        A rank that dies again before there is a new checkpoint, or after the last restart, counts
        as lost: starting as many ranks again would not help.
        """

        lost: int | None = None
        _died: tuple[int, str] | None = None

        def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
            # A rank that has reported an error would only fail in the same way again
            if result.is_failed() and outcomes(handed, spec.local_world_size):
                self._remaining_restarts = 0
            elif result.is_failed():
                died = (_first_to_die(result)[0], progress())
                if died == self._died or not self._remaining_restarts:
                    self.lost, self._remaining_restarts = died[0], 0
                else:
                    again = spec.max_restarts - self._remaining_restarts + 1
                    what = "resuming from the last checkpoint" if died[1] else "starting again"
                    message = f"{what} (restart {again} of {spec.max_restarts})"
                    ended = _describe_exit(logs, died[0], _first_to_die(result)[1].exitcode)
                    print(
                        f"warning: rank {died[0]} {ended}\n    {message}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._died = died
            return result

        def _start_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
            context: Any = self._pcontext
            close = context.close

            def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
                """Wait `grace_s` for the ranks to end, whatever torch's timeout is."""
                # After an error of a rank the others end by themselves, unless they hang
                close(
                    death_sig,
                    min(grace_s, _PATIENCE_S)
                    if outcomes(handed, spec.local_world_size)
                    else grace_s,
                )

            context.close = close_soon
            return started

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            """Shut the ranks down without ending their loader workers."""
            # The agent signals process groups: SIGTERM would end workers, which ignore SIGUSR1
            shut_down: Any = super()._shutdown
            # Torch 2.11 has no timeout
            arguments = {"timeout": timeout} if "timeout" in signature(shut_down).parameters else {}
            shut_down(signal.SIGUSR1 if death_sig == signal.SIGTERM else death_sig, **arguments)

    return Agent(spec=spec, logs_specs=logs_specs, start_method="spawn", exit_barrier_timeout=30)


def outcomes(handed: Path, nproc: int) -> list[Mapping[str, Any]]:
    """Return the error reports of ranks."""
    return [
        outcome for rank in range(nproc) if (outcome := read_json(handed / f"rank-{rank}.json"))
    ]
