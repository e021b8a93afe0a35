"""Train every point of a sweep, or resume it: values (a=1,2), ranges, intervals, repeats."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_overrides, add_trust, project_from
from samewise.runner.errors import ConfigError, Problem, number_of
from samewise.runner.launchers.base import Launcher, Standing
from samewise.runner.records import trust
from samewise.runner.records.folder import RunFolder, require_root
from samewise.runner.records.json_text import to_json
from samewise.runner.records.sweep_folder import SweepFolder, below, find, is_named
from samewise.runner.records.trust import is_trusted
from samewise.runner.sweeps.results import (
    PointResult,
    State,
    current_results,
    open_launcher,
    point_results,
)
from samewise.runner.tracking.address import remove_password
from samewise.runner.tracking.backends import backends_of, last_trouble
from samewise.runner.tracking.progress import is_behind

if TYPE_CHECKING:
    from samewise.runner.config.project import Project
    from samewise.runner.sweeps.running import PreparedSweep

EXAMPLES = """examples:
  samewise sweep experiment=resnet18_digits optimizer.lr=0.03,0.1,0.3 'seed=range(5)'
  samewise sweep experiment=resnet18_digits 'optimizer.lr=tag(log,interval(1e-3,1))' sweeper=random sweeper.trials=30
  samewise sweep experiment=resnet18_digits,resnet_cifar10 launcher.jobs=2
  samewise sweep --status                      all sweeps; with a sweep's id, its points
  samewise sweep resnet18_digits-1a2b3c4d      resume it, as running the same command again would
  samewise sweep resnet18_digits-1a2b3c4d --retry-failed
  samewise sweep resnet18_digits-1a2b3c4d --cancel

Running the same command again resumes the same sweep: finished runs are not run again, and killed ones resume."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_trust(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--status",
        action="store_true",
        help="show the progress of the sweep, or of all sweeps if none is named",
    )
    what.add_argument(
        "--cancel",
        action="store_true",
        help="let its running jobs save and stop, and start no more",
    )
    what.add_argument(
        "--list",
        action="store_true",
        help="compose, check and print its points without starting any",
    )
    parser.add_argument("--retry-failed", action="store_true", help="also run failed points again")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the jobs have ended, even if the launcher can continue without this "
        "command",
    )
    parser.add_argument(
        "--run-root", type=Path, help="where to look for sweeps by id (default: runs)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the points and their results as JSON"
    )


def run(args: argparse.Namespace) -> int:
    ConfigError.raise_if(
        args.run_root and args.overrides and not is_named(args.overrides),
        "--run-root",
        "is where to look for a sweep by its id, not where these overrides write one",
        str(args.run_root),
        hint=f"settings are written without dashes: run_root={args.run_root}",
    )
    args.run_root = args.run_root or Path("runs")
    ConfigError.raise_if(
        args.cancel and args.json,
        "--json",
        "prints points and results, and --cancel has none",
        hint="samewise sweep SWEEP --status --json",
    )
    if args.status and not args.overrides:
        return _status_of_all(args)
    if args.status or args.cancel:
        folder = _find_sweep(args)
        if args.cancel:
            # Cancelling calls the launcher that the folder names
            _require_trust(folder, args)
            return _cancel(folder, project_from(args))
        # Read first, so that a damaged file is not signed
        is_whole = bool(folder.facts)
        return _status(
            folder,
            project_from(args),
            trusted=is_whole and is_trusted(folder.made_by, trust=args.trust),
            as_json=args.json,
        )
    if not args.overrides:
        raise _no_sweep_error()
    return start(args)


def start(args: argparse.Namespace) -> int:
    """Run a sweep, for `samewise sweep` and `samewise train -m`."""
    from samewise.runner.sweeps import running

    project, wait = project_from(args), getattr(args, "wait", False)
    prepared = running.prepare_sweep(
        args.overrides,
        project,
        run_root=getattr(args, "run_root", Path("runs")),
        trust=args.trust,
        wait=wait,
    )
    if not prepared.space.dimensions and not prepared.space.seeds:
        print(
            "note: no override has several values (KEY=A,B, without brackets), so this is a sweep "
            "of one run",
            file=sys.stderr,
        )
    if getattr(args, "list", False):
        return _list(prepared, as_json=args.json)
    is_done = running.run_sweep(
        prepared, wait=wait, retry_failed=getattr(args, "retry_failed", False)
    )
    return _report(prepared.folder, project, as_json=args.json) if is_done else 0


def _require_trust(folder: SweepFolder, args: argparse.Namespace) -> None:
    # Read first, so that a damaged file is not signed
    _ = folder.facts
    trust.require(folder.made_by, trust=args.trust, uses=trust.RUNS)


def _find_sweep(args: argparse.Namespace) -> SweepFolder:
    """Return the sweep with this id, folder or overrides."""
    from samewise.runner.sweeps.running import open_sweep

    if is_named(args.overrides):
        return find(args.overrides[0], run_root=args.run_root)
    if not args.overrides:
        raise _no_sweep_error()
    _, folder, _, _ = open_sweep(args.overrides, project_from(args))
    return find(str(folder.path), run_root=args.run_root)


def _no_sweep_error() -> ConfigError:
    return ConfigError(
        Problem(
            "SWEEP",
            "no sweep was named",
            expected="a sweep's id or folder, or its overrides",
            hint="`samewise sweep --status` lists them",
        )
    )


def _list(prepared: PreparedSweep, *, as_json: bool) -> int:
    from samewise.runner.sweeps import soundness
    from samewise.runner.sweeps.points import compose_points
    from samewise.runner.sweeps.report.tables import point_values

    ConfigError.raise_if(
        not prepared.sweeper.listed,
        "sweeper",
        "chooses points by earlier results, so they cannot be listed in advance",
        type(prepared.sweeper).__name__,
        hint="sweeper=grid",
    )
    points = compose_points(
        list(prepared.sweeper.settings()),
        prepared.space,
        prepared.folder,
        prepared.composer,
        first=0,
    )
    soundness.require_sound(points, prepared.project, elsewhere=prepared.launcher.detached)
    note = soundness.require_separate([x.point for x in points], prepared.composer)
    if note:
        print(f"note: {note}", file=sys.stderr)
    for caution in soundness.cautions(points, set()):
        print(f"warning: {caution}", file=sys.stderr)
    if as_json:
        print(
            to_json(
                {"id": prepared.folder.id, "points": [point_values(x.point) for x in points]},
                indent=2,
            )
        )
    for x in points if not as_json else []:
        print(f"{x.point.number + 1:>4}  {x.point.fingerprint[:12]}  {x.point.label}")
    print(f"{number_of(len(points), 'point')}, no problems found", file=sys.stderr)
    return 0


def _status(folder: SweepFolder, project: Project, *, trusted: bool, as_json: bool) -> int:
    from samewise.runner.sweeps.report.tables import as_plain_values, print_points

    results = current_results(folder, project, trusted=trusted)
    if as_json:
        print(to_json({"id": folder.id, "points": [as_plain_values(x) for x in results]}, indent=2))
    else:
        print_points(folder, results, holder=folder.holder())
    return 0


def _status_of_all(args: argparse.Namespace) -> int:
    require_root(args.run_root)
    lines = list[dict[str, Any]]()
    for folder in below(args.run_root):
        counts = Counter(x.state.value for x in point_results(folder))
        facts = folder.facts
        refused = (
            {"refused": facts["refused"]}
            if "refused" in facts and counts[State.waiting.value]
            else {}
        )
        lines.append(
            {
                "id": folder.id,
                "points": sum(counts.values()),
                **counts,
                **refused,
                "overrides": facts["overrides"],
            }
        )
    if args.json:
        print(to_json(lines, indent=2))
        return 0
    if not lines:
        print(f"no sweeps in {args.run_root}")
    for line in lines:
        counts = ", ".join(
            f"{count} {name}"
            for name, count in line.items()
            if name not in ("id", "points", "refused", "overrides")
        )
        counts += f" (not submitted: {line['refused']})" if "refused" in line else ""
        print(
            f"{line['id']}  {number_of(line['points'], 'point')}: {counts or 'none yet'}\n "
            f"   {' '.join(line['overrides'])}"
        )
    return 0


def _cancel(folder: SweepFolder, project: Project) -> int:
    launcher = open_launcher(folder, project)
    holder = folder.holder()
    if holder is not None:
        _stop(folder.id, holder)
        print(f"process {holder[0]} was asked to stop: its jobs finish their step and save")
    elif launcher.detached and (live_points := _live(folder, launcher)):
        launcher.cancel(live_points)
        print(
            f"{number_of(len(live_points), 'job')} asked to stop: running jobs finish their step "
            "and save"
        )
    else:
        print(f"no job of {folder.id} is running")
    return 0


def _stop(sweep_id: str, holder: tuple[int, str]) -> None:
    """Ask a process on this machine to save and stop."""
    pid, host = holder
    ConfigError.raise_if(
        host != socket.gethostname(),
        sweep_id,
        f"is being run by process {pid} on {host}",
        hint=f"run the same command on that machine, or `kill {pid}` on {host}",
    )
    os.kill(pid, signal.SIGTERM)


def _live(folder: SweepFolder, launcher: Launcher) -> list[int]:
    """Return the points with jobs that run or wait."""
    states = launcher.look([point.number for point in folder.points()])
    return [number for number, x in states.items() if x.standing is not Standing.ended]


def _report(folder: SweepFolder, project: Project, *, as_json: bool) -> int:
    """Print the sweep's result; return 1 if a point failed, or kept ending without a reason."""
    from samewise.runner.sweeps.report.tables import (
        as_plain_values,
        print_settings,
        setting_values,
    )
    from samewise.runner.sweeps.settings import pareto

    results = current_results(folder, project)
    if as_json:
        front, points = (
            [setting_values(x) for x in pareto(results)],
            [as_plain_values(x) for x in results],
        )
        print(
            to_json(
                {"id": folder.id, "folder": str(folder.path), "pareto": front, "points": points},
                indent=2,
            )
        )
    else:
        print_settings(folder, results, more=f"samewise report {shlex.quote(str(folder.path))}")
    _warn_of_unsent(folder, results)
    return int(any(x.state not in (State.finished, State.pruned) for x in results))


def _warn_of_unsent(folder: SweepFolder, results: Sequence[PointResult]) -> None:
    """Warn, in one line, of runs that are not completely in MLflow; details are in their logs."""
    facts = folder.facts
    runs = (
        [RunFolder(Path(x.point.folder)) for x in results]
        if "mlflow" in backends_of(facts["tracking"])
        else []
    )
    if unsent_runs := [run for run in runs if is_behind(run)]:
        reason = next(filter(None, (last_trouble(run.path) for run in unsent_runs)), "")
        message = (
            f"warning: not everything from {len(unsent_runs)} of {len(runs)} runs has reached "
            f"{remove_password(str(facts['tracking']['uri']))} yet{reason}"
        )
        print(
            f"{message}; run `samewise sync --run-root {facts['run_root']}` to send the rest",
            file=sys.stderr,
        )
