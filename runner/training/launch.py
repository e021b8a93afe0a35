"""Several processes for one run: started by torch's elastic agent, or connected under torchrun.

Rank 0 composes the config for all.

    launch  starts the ranks, waits for them, and reports their errors
    rank    runs in each of them, and trains: in a fork, in a new process as `python -m
            samewise.runner.training.launch FOLDER`, or as `samewise train` under torchrun

They exchange files in a temporary folder. `launch` writes `config.yaml` and `handed.json`; a rank
writes `rank-N.json` with its error.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from omegaconf import OmegaConf

from samewise.runner.config import compose
from samewise.runner.config.check.machine import require_few_in_all
from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.errors import (
    ConfigError,
    PeerFailed,
    Problem,
    SamewiseError,
    describe,
    strip_heading,
    traceback_of,
)
from samewise.runner.processes.this_process import end_rank, end_with_parent
from samewise.runner.records import sources
from samewise.runner.records.files import read_json, write_json
from samewise.runner.secrets import filter_output
from samewise.runner.strategies.lost_connections import explain
from samewise.runner.strategies.sealed import seal, unseal


def processes(composed: Composed) -> int:
    """Return the number of processes that the config requests on this machine. Imports torch.

    Raises:
        ConfigError: It does not fit the replicas or the devices.
    """
    from samewise.runner.config.instantiate import instantiate

    strategy = instantiate(composed.cfg.strategy, "strategy", allowed=composed.project.packages)
    return strategy.processes(str(composed.cfg.device), composed.cfg.replicas)


def launch(
    composed: Composed,
    nproc: int,
    *,
    as_json: bool,
    debug: bool,
    function: str | None = None,
    options: Mapping[str, Any] | None = None,
    forks: bool = True,
) -> None:
    """Start ranks and wait for them.

    Args:
        composed: The config.
        nproc: The number of ranks.
        as_json: Whether rank 0 prints the summary as JSON.
        debug: Whether to print the traceback of a rank that failed.
        function: The function that each rank calls with its config and the options, as
            `module:name`; None: the ranks train.
        options: Its options.
        forks: Whether ranks may be forks of this process, which has done nothing but prepare this
            training; otherwise they are new processes.

    Raises:
        ConfigError: There are far more ranks than this machine has cores.
        PeerFailed: A rank has failed; its message is printed.
        TrainingError: A rank died without a message.
        Interrupted: This process was asked to stop before a rank reported that it has saved.
    """
    # Imported here, as they import torch
    from samewise.runner.training.agent import prepare_forks, run_agent

    require_few_in_all(composed.cfg, nproc)
    files = prepare_forks(composed) if forks else frozenset[str]()
    # Not a TemporaryDirectory, which a fork deletes as it ends
    handed = Path(tempfile.mkdtemp(prefix="samewise-ranks-"))
    try:
        while True:
            _hand_down(composed, handed, as_json=as_json, function=function, options=options)
            error, lost = run_agent(composed, nproc, handed, files)
            if (
                error is None
                or lost is None
                or nproc == 1
                or not composed.cfg.strategy.get("shrink", False)
            ):
                return _report_outcomes(handed, nproc, error, debug=debug)
            _avoid_device(lost, nproc)
            nproc //= 2
            composed = dataclasses.replace(composed, cfg=copy.deepcopy(composed.cfg))
            OmegaConf.update(composed.cfg, "strategy.nproc", nproc)
            print(
                f"warning: {_without_hints(error)}\n    resuming from the last checkpoint "
                f"with {nproc} process{'es' * (nproc > 1)}",
                file=sys.stderr,
            )
    finally:
        shutil.rmtree(handed)


def _hand_down(
    composed: Composed,
    handed: Path,
    *,
    as_json: bool,
    function: str | None,
    options: Mapping[str, Any] | None,
) -> None:
    (handed / "config.yaml").write_text(compose.dump(composed), encoding="utf-8")
    project = composed.project
    write_json(
        handed / "handed.json",
        {
            "root": str(project.root),
            "packages": list(project.packages),
            "configs": [str(folder) for folder in project.configs],
            "overrides": list(composed.overrides),
            "fingerprint": composed.fingerprint,
            "folder": str(composed.folder.path),
            "json": as_json,
            "function": function,
            "options": options,
            "parent": os.getpid(),
        },
    )


def _avoid_device(lost: int, nproc: int) -> None:
    """Leave the next ranks the half of the CUDA devices without that of rank `lost`."""
    import torch

    if torch.cuda.device_count() >= nproc:
        names = (
            os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if os.environ.get("CUDA_VISIBLE_DEVICES")
            else list(map(str, range(nproc)))
        )
        half = nproc // 2
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            names[:half] if lost >= half else names[nproc - half : nproc]
        )


def _without_hints(error: SamewiseError) -> SamewiseError:
    return type(error)(*(dataclasses.replace(problem, hint="") for problem in error.problems))


def _report_outcomes(handed: Path, nproc: int, error: SamewiseError | None, *, debug: bool) -> None:
    from samewise.runner.training.agent import outcomes

    if ended := outcomes(handed, nproc):
        first = ended[0]
        print((first["traceback"] if debug else "") + first["said"], file=sys.stderr)
        raise PeerFailed(strip_heading(first["said"]), exit_code=first["exit_code"])
    if error is not None:
        raise error


def rank(
    composed: Composed,
    *,
    as_json: bool,
    look: Callable[[], Mapping[str, Any] | None],
    check: Callable[[], None],
    work: Callable[[Composed], None] | None = None,
) -> None:
    """Train as one of several ranks, with rank 0's config.

    Args:
        composed: The config, as this rank composed it.
        as_json: Whether rank 0 prints the summary as JSON.
        look: Returns the summary of a finished run; only rank 0 calls it.
        check: Raises the config's problems; only rank 0 calls it.
        work: The work to do instead of training.
    """
    from samewise.runner.records.summary import print_summary
    from samewise.runner.strategies.meeting import announce, linger
    from samewise.runner.training.build import build
    from samewise.runner.training.loop import fit

    main = int(os.environ["RANK"]) == 0
    # On SIGTERM a training finishes its step, saves and stops
    end_with_parent(signal.SIGTERM)
    try:
        composed, done = _agree_on_config(composed, main=main, look=look, check=check)
        summary = None
        if work is not None:
            work(composed)
        else:
            summary = (
                done
                if done is not None
                else fit(build(composed, composed.project, composed.folder))
            )
    except BaseException as raised:
        error = explain(raised)
        is_first = announce(error)
        # Rank 0 keeps the store in which the others read the error
        linger()
        if not is_first:
            raise PeerFailed(
                f"rank {os.environ['RANK']} stopped, because another rank did",
                exit_code=getattr(error, "exit_code", 1),
            ) from error
        if error is raised:
            raise
        raise error from raised
    if main and summary is not None:
        print_summary(
            summary, composed.folder, uri=composed.tracking_uri, as_json=as_json, fresh=done is None
        )


def _agree_on_config(
    composed: Composed,
    *,
    main: bool,
    look: Callable[[], Mapping[str, Any] | None],
    check: Callable[[], None],
) -> tuple[Composed, Mapping[str, Any] | None]:
    """Return rank 0's config, and the summary if its run is finished."""
    from samewise.runner.strategies.meeting import meeting_point, wait_for

    timeout_s = float(composed.cfg.strategy.get("join_timeout_s", 60.0))
    store = meeting_point(timeout_s, composed.cfg.strategy.get("init_method"))
    if main:
        check()
        done = look()
        config = {
            "config": compose.dump(composed),
            "done": done,
            "fingerprint": composed.fingerprint,
            "folder": str(composed.folder.path),
        }
        # Sealed, so that no other process can tell the ranks what to train
        store.set("config", seal(json.dumps(config).encode(), "what to train"))
        return composed, done
    ConfigError.raise_if(
        wait_for(store, ["config"], timeout_s),
        "strategy.join_timeout_s",
        f"rank 0 did not send the config within {timeout_s:g} s",
        timeout_s,
    )
    config = json.loads(unseal(store.get("config"), "what to train"))
    return _adopt_config(
        dataclasses.replace(composed, cfg=compose.parse(config["config"]).cfg), config
    ), config["done"]


def _adopt_config(composed: Composed, request: Mapping[str, Any]) -> Composed:
    """Return the config with the requesting process's folder.

    Raises:
        ConfigError: This rank has other code.
    """
    composed = dataclasses.replace(composed, place=Path(request["folder"]))
    if composed.fingerprint != request["fingerprint"]:
        changed = sources.list_changes(composed.folder.sources) or [
            "it differs from that of the process that started the run"
        ]
        raise ConfigError(
            Problem(
                f"rank {os.environ['RANK']}",
                f"the code has changed since the run was started: {'; '.join(changed)}",
                hint="run the command again: with changed code it is a different run",
            )
        )
    return composed


@filter_output()
def main(handed: Path) -> int:
    """Run as a rank that `launch` has started, and report how it ended."""
    number = int(os.environ["RANK"])
    # By number: it writes below the filter that stands in for sys.stderr
    faulthandler.enable(file=2)
    try:
        handover = read_json(handed / "handed.json")
        end_with_parent(signal.SIGTERM)
        # The parent may have died before `end_with_parent` could ask for its signal
        if not handover or os.getppid() != handover["parent"]:
            raise PeerFailed("the process that started this rank ended while it was starting")
        project = Project(
            Path(handover["root"]),
            tuple(handover["packages"]),
            tuple(Path(folder) for folder in handover["configs"]),
        )
        # Without packages the folder holds no code to import
        if project.packages:
            sys.path.append(handover["root"])
        composed = dataclasses.replace(
            compose.load(handed / "config.yaml"),
            overrides=tuple(handover["overrides"]),
            project=project,
        )
        name = handover["function"]
        rank(
            _adopt_config(composed, handover),
            as_json=handover["json"],
            look=lambda: None,
            check=lambda: None,
            work=partial(resolve_name(name), options=handover["options"]) if name else None,
        )
        return 0
    except BaseException as error:
        # A second signal may not end this process before it has written its message
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code, message = describe(error)
        write_json(
            # What `outcomes` leaves out, since another rank has the reason
            handed / f"{'stopped' if isinstance(error, PeerFailed) else 'rank'}-{number}.json",
            {"exit_code": code, "said": message, "traceback": traceback_of(error)},
        )
        return code


if __name__ == "__main__":
    end_rank(main(Path(sys.argv[1])))
