"""List the runs of a run root, optionally sorted or filtered; delete some."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.errors import ConfigError, Problem, nearest, truncate
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.sweeps.results import State

if TYPE_CHECKING:
    from samewise.runner.runs.listing import ListedRun

_MAX_SETTINGS = 8
_MAY_GO = (State.failed, State.interrupted)
_MAX_LENGTH = 40
"""Maximum length of a value."""

EXAMPLES = """examples:
  samewise runs                                                  all of them, the newest last
  samewise runs --sort valid/accuracy --where state=finished     the best first; --sort=-valid/loss: the lowest first
  samewise runs --where name=resnet18_digits --diff              with the settings in which they differ
  samewise runs --where 'valid/accuracy>0.9' --where optimizer.lr=0.1 --json      for programs, with all metrics
  samewise runs --uri http://tracking:5000 --sort valid/accuracy  the runs in an MLflow store, wherever they were trained
  samewise runs --where code=9f3c2d1                             the runs of one version of your code
  samewise runs rename 3f2a baseline                             from now on `samewise eval baseline` means this run; '' instead of a name: its own
  samewise runs tag 3f2a team=vision ~draft                      add a tag and remove one; --where tags.team=vision selects by it
  samewise runs rm 3f2a 91bc                                     list what would be deleted; --yes deletes it
  samewise runs gc                                               the same for all that failed; with --where, for those that failed or were interrupted and match

--sort and --where accept metrics (at the best step; those of evaluate.also at their own) and settings (seed, optimizer.lr) by name, and:
  name, run, label, code, state, step, steps, monitor, value, seconds, changed, reason, folder, tags
code is a short name for the code of your own packages. rm and gc also delete code that is no
longer part of any run. A name or a tag changes no fingerprint: `train` still finds the run. MLflow's
name and tags follow at once, or with `samewise sync` if its store does not answer.
"""

ARGUMENTS = {
    "action": {
        "nargs": "?",
        "choices": ("list", "rename", "tag", "rm", "gc"),
        "default": "list",
        "help": "list (default); rename: RUN NAME; tag: RUN KEY=VALUE ~KEY ...; rm: delete the given "
        "runs; gc: delete those that failed",
    },
    "names": {"nargs": "*", "metavar": "RUN", "help": f"for rename, tag and rm: {RUN}"},
    "--run-root": {
        "type": Path,
        "default": Path("runs"),
        "help": "where the runs are (default: runs)",
    },
    "--uri": {
        "help": "list the runs of this MLflow store instead (sqlite:///FILE, http://HOST:5000); "
        "MLflow's tokens are sent there"
    },
    "--where": {
        "action": "append",
        "default": [],
        "metavar": "CONDITION",
        "help": "only runs that meet this condition: state=failed, 'valid/loss<1' (may be repeated)",
    },
    "--sort": {
        "metavar": "KEY",
        "help": "by a column or metric, the largest first; --sort=-KEY: the smallest first",
    },
    "--diff": {
        "action": "store_true",
        "help": "show what differs in config and code, instead of what was overridden",
    },
    "--yes": {
        "action": "store_true",
        "help": "actually delete the runs; without it, rm and gc only list them",
    },
    "--json": {"action": "store_true", "help": "print a JSON list, with all metrics"},
}
EXCLUSIVE = ("--run-root", "--uri")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved
    from samewise.runner.runs import listing, selection

    ConfigError.raise_if(
        args.uri and args.action != "list",
        "--uri",
        f"`samewise runs {args.action}` is for runs in folders",
        args.uri,
        "--run-root FOLDER",
        "change runs of a store in the MLflow UI",
    )
    if args.action in ("rename", "tag"):
        return _note(args)
    conditions = args.where or (["state=failed"] if args.action == "gc" else [])
    if args.action == "rm":
        ConfigError.raise_if(
            not args.names,
            "RUN",
            "no run was named",
            expected="runs to delete",
            hint="samewise runs rm RUN ...; `samewise runs gc` deletes those that failed",
        )
        # A run may be named twice, or through a link
        folders = [saved.find(name, run_root=args.run_root) for name in args.names]
        different = {folder.path.resolve(): folder for folder in folders}.values()
        return _delete(
            selection.matching(map(listing.read_run, different), conditions, args.run_root), args
        )
    ConfigError.raise_if(
        args.names,
        "RUN",
        f"`samewise runs {args.action}` takes no names",
        next(iter(args.names), None),
        "--where CONDITION",
    )
    runs, differing = selection.select(
        args.run_root, uri=args.uri, where=conditions, sort=args.sort, diff=args.diff
    )
    if args.action == "gc":
        return _delete(_select_failed(runs), args)
    if args.diff and len({x.code for x in runs}) > 1:
        differing = {x.folder: {"code": x.code, **differing[x.folder]} for x in runs}
    if args.json:
        print(
            to_json(
                [
                    {**x.facts(), **({"differs": differing[x.folder]} if args.diff else {})}
                    for x in runs
                ]
            )
        )
    elif not runs:
        print(
            f"no runs in {args.uri or args.run_root}"
            + (" that meet these conditions" if conditions else "")
        )
    else:
        _print(runs, differing, args.sort.removeprefix("-") if args.sort else "", args.run_root)
    return 0


def _note(args: argparse.Namespace) -> int:
    """Rename or tag a run, and tell MLflow."""
    from samewise.runner.commands.sync import send_now
    from samewise.runner.config import saved
    from samewise.runner.runs import notes
    from samewise.runner.runs.listing import read_run

    is_name = args.action == "rename"
    ConfigError.raise_if(
        len(args.names) != 2 if is_name else len(args.names) < 2,
        "RUN",
        "these are not a run and its change",
        expected=f"samewise runs {args.action} RUN {'NAME' if is_name else 'KEY=VALUE ...'}",
    )
    folder = saved.find(args.names[0], run_root=args.run_root)
    if is_name:
        notes.rename(folder, args.names[1])
    else:
        tags = read_run(folder).tags
        ConfigError.raise_all(
            Problem("TAG", "the run has no such tag", removed, hint=nearest(removed, tags))
            for removed in (x[1:] for x in args.names[1:] if x.startswith("~"))
            if removed not in tags
        )
        notes.tag(folder, args.names[1:])
    entry = read_run(folder)
    line = f"{folder.path}: {entry.name}  {_write_tags(entry.tags)}".rstrip()
    print(to_json(entry.facts()) if args.json else line)
    for failure in send_now(folder):
        print(
            f"warning: MLflow does not have it yet: {failure}; run `samewise sync "
            f"{shlex.quote(str(folder.path))}` later",
            file=sys.stderr,
        )
    return 0


def _write_tags(tags: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in tags.items())


def _select_failed(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Return the runs that failed or were interrupted; others are only deleted by name."""
    failed = [entry for entry in runs if entry.state in _MAY_GO]
    if skipped := len(runs) - len(failed):
        states = ", ".join(dict.fromkeys(x.state.value for x in runs if x.state not in _MAY_GO))
        print(
            f"{skipped} left out, as {states}: `samewise runs rm RUN ...` deletes runs by name",
            file=sys.stderr,
        )
    return failed


def _delete(runs: Sequence[ListedRun], args: argparse.Namespace) -> int:
    from samewise.runner.runs import deletion

    deletion.require_no_links(runs)
    children, unsent = (
        deletion.trained_from(runs, args.run_root),
        deletion.unsent(runs, args.run_root),
    )
    if args.yes:
        deletion.delete(runs, args.run_root)
    verb = "deleted" if args.yes else "would be deleted"
    for child in children:
        print(
            f"warning: {child} was trained from one of these: without its checkpoint, it "
            "cannot be trained again or verified",
            file=sys.stderr,
        )
    for entry in unsent:
        hint = (
            ""
            if args.yes
            else f"; run `samewise sync {shlex.quote(entry.folder)}` to send the rest"
        )
        print(
            f"warning: not everything from {entry.folder} has reached MLflow{hint}", file=sys.stderr
        )
    for entry in runs if not args.json else ():
        size = "" if args.yes else f", {deletion.size_of(entry) / 1e6:.1f} MB"
        print(f"{verb}: {entry.folder}  ({entry.state.value}, step {entry.step}{size})")
    if args.json:
        print(
            to_json(
                {
                    "deleted": [entry.folder for entry in runs] if args.yes else [],
                    "found": [entry.folder for entry in runs],
                }
            )
        )
    elif not runs:
        print("nothing to delete")
    elif not args.yes:
        print(
            "nothing has been deleted yet: --yes deletes these, with their checkpoints; records "
            "in MLflow stay"
        )
    return 0


def _print(
    runs: Sequence[ListedRun],
    differing: Mapping[str, Mapping[str, Any]],
    sorted_by: str,
    run_root: Path,
) -> None:
    from samewise.runner.runs.listing import ListedRun, age
    from samewise.runner.runs.selection import values_of
    from samewise.runner.sweeps.progress import clock
    from samewise.runner.sweeps.report.rows import number
    from samewise.runner.sweeps.report.tables import print_rows

    monitors, other_metrics = (
        {entry.monitor for entry in runs},
        dict.fromkeys(name for entry in runs for name in entry.also),
    )
    paths, left_out = _choose_columns(list(differing.values()))
    shown_columns = {
        *ListedRun.__dataclass_fields__,
        *paths,
        *(monitors if len(monitors) == 1 else ()),
        *other_metrics,
    }
    sort_values = (
        {}
        if not sorted_by or sorted_by in shown_columns
        else {sorted_by: values_of("--sort", sorted_by, runs, run_root)}
    )
    has_tags, has_reasons = any(x.tags for x in runs), any(x.reason for x in runs)
    rows, has_codes = list[dict[str, str]](), len({entry.code for entry in runs}) > 1
    for entry in runs:
        label_columns = {
            # --json shows all of a long value
            "overridden": " ".join(
                truncate(part, _MAX_LENGTH) for part in re.split(r" (?=[\w.+~/@-]+=)", entry.label)
            ),
            **({"code": entry.code} if has_codes else {}),
        }
        settings = (
            {key: truncate(str(differing[entry.folder][key]), _MAX_LENGTH) for key in paths}
            if differing
            else label_columns
        )
        value = (
            number(entry.value)
            if len(monitors) == 1 or math.isnan(entry.value)
            else f"{entry.monitor} {number(entry.value)}"
        )
        rows.append(
            {
                "name": entry.name,
                "run": "-".join([entry.run[:8], *entry.run.split("-")[1:]]),
                **settings,
                **({"tags": _write_tags(entry.tags)} if has_tags else {}),
                "state": entry.state.value,
                "step": f"{entry.step}/{entry.steps}"
                if entry.steps and entry.step != entry.steps
                else str(entry.step),
                next(iter(monitors)) if len(monitors) == 1 else "best": value,
                **{
                    name: number(entry.also[name]) if name in entry.also else ""
                    for name in other_metrics
                    if {name} != monitors
                },
                **{
                    name: _write_value(values[entry.folder]) for name, values in sort_values.items()
                },
                "time": "" if math.isnan(entry.seconds) else clock(entry.seconds),
                "changed": f"{age(entry.changed)} ago",
                **({"reason": truncate(entry.reason, 80)} if has_reasons else {}),
            }
        )
    print_rows(rows, right=("step", "time", "changed"))
    if left_out:
        print(
            f"further settings that differ, left out here: {left_out}; --json has all of "
            "them, `samewise diff RUN RUN` those of two runs",
            file=sys.stderr,
        )


def _write_value(value: Any) -> str:
    from samewise.runner.sweeps.report.rows import number

    return (
        ""
        if value is None
        else number(value)
        if isinstance(value, float)
        else truncate(str(value), _MAX_LENGTH)
    )


def _choose_columns(differing: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Choose as many settings as fit into the table, and count the rest."""
    paths = list(differing[0]) if differing else []
    values = {path: [str(config[path]) for config in differing] for path in paths}
    # Settings that all runs have come first, then those with more values, then those nearer to the
    # config's root
    ranked = sorted(
        paths, key=lambda path: ("-" in values[path], -len({*values[path]}), path.count("."))
    )
    chosen = ranked[:_MAX_SETTINGS]
    return [path for path in paths if path in chosen], len(paths) - len(chosen)
