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

from samewise.runner.errors import ConfigError, Problem, truncate
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.sweeps.results import State

if TYPE_CHECKING:
    from samewise.runner.runs.listing import ListedRun

_MOST_SETTINGS = 8
_LONGEST = 40  # maximum length of a value

EXAMPLES = """examples:
  samewise runs                                                  all of them, the newest last
  samewise runs --sort valid/accuracy --where state=finished     the best first; --sort=-valid/loss: the lowest first
  samewise runs --where name=resnet18_digits --diff              with the settings in which they differ
  samewise runs --where 'valid/accuracy>0.9' --where optimizer.lr=0.1 --json      for programs, with all metrics
  samewise runs --uri http://tracking:5000 --sort valid/accuracy  the runs in an MLflow store, wherever they were trained
  samewise runs --where code=9f3c2d1                             the runs of one version of your code
  samewise runs rm 3f2a 91bc                                     list what would be deleted; --yes deletes it
  samewise runs gc                                               the same for all that failed; with --where, for those that failed or were interrupted and match

--sort and --where accept metrics (at the best step; those of evaluate.also at their own) and settings (seed, optimizer.lr) by name, and:
  name, run, label, code, state, step, steps, monitor, value, seconds, changed, reason, folder
code is a short name for the code of your own packages. rm and gc also delete code that is no
longer part of any run.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "rm", "gc"),
        default="list",
        help="list (default); rm: delete the given runs; gc: delete those that failed",
    )
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"for rm: {RUN}")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where the runs are (default: runs)"
    )
    where.add_argument(
        "--uri",
        help="list the runs of this MLflow store instead (sqlite:///FILE, http://HOST:5000); "
        "MLflow's tokens are sent there",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs that meet this condition: state=failed, 'valid/loss<1' (may be repeated)",
    )
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="by a column or metric, the largest first; --sort=-KEY: the smallest first",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="show what differs in config and code, instead of what was overridden",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="actually delete the runs; without it, rm and gc only list them",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, with all metrics")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved
    from samewise.runner.runs import listing, selection

    stored = dict[str, dict[str, Any]]()
    if args.uri and args.action != "list":
        hint = "delete runs in the MLflow UI"
        raise ConfigError(
            Problem(
                "--uri",
                f"`samewise runs {args.action}` deletes folders only, and nothing in MLflow",
                args.uri,
                "--run-root FOLDER",
                hint,
            )
        )
    if args.action == "rm":
        if not args.names:
            words = "no run was named"
            raise ConfigError(
                Problem(
                    "RUN",
                    words,
                    expected="runs to delete",
                    hint="samewise runs rm RUN ...; `samewise runs gc` deletes those that failed",
                )
            )
        named = [saved.find(name, run_root=args.run_root) for name in args.names]
        found = [
            listing.read_run(folder)
            for folder in {folder.path.resolve(): folder for folder in named}.values()
        ]
    elif args.names:
        raise ConfigError(
            Problem(
                "RUN",
                f"`samewise runs {args.action}` takes no names",
                args.names[0],
                "--where CONDITION",
            )
        )
    elif args.uri:
        from samewise.runner.runs.stored_runs import list_stored

        found, stored = list_stored(args.uri)
    else:
        found = listing.list_runs(args.run_root)
    conditions = args.where or (["state=failed"] if args.action == "gc" else [])
    found = selection.matching(found, conditions)
    if args.sort:
        found = selection.sort_runs(found, args.sort)
    if args.action == "gc":
        found = _select_failed(found)
    if args.action != "list":
        return _delete(found, args)
    differing = (stored if args.uri else selection.varying(found)) if args.diff else {}
    if args.diff and len({one.code for one in found}) > 1:
        differing = {one.folder: {"code": one.code, **differing[one.folder]} for one in found}
    if args.json:
        print(
            to_json(
                [
                    {**one.facts(), **({"differs": differing[one.folder]} if args.diff else {})}
                    for one in found
                ]
            )
        )
    elif not found:
        print(
            f"no runs in {args.uri or args.run_root}"
            + (" that meet these conditions" if conditions else "")
        )
    else:
        _print(found, differing, args.sort.removeprefix("-") if args.sort else "")
    return 0


def _select_failed(found: Sequence[ListedRun]) -> list[ListedRun]:
    """Select the runs that failed or were interrupted.

    Runs that are finished or running are only deleted by name.
    """
    kept = [one for one in found if one.state not in (State.failed, State.interrupted)]
    if kept:
        words = ", ".join(dict.fromkeys(one.state.value for one in kept))
        print(
            f"{len(kept)} left out, as {words}: `samewise runs rm RUN ...` deletes runs by name",
            file=sys.stderr,
        )
    return [one for one in found if one not in kept]


def _delete(found: Sequence[ListedRun], args: argparse.Namespace) -> int:
    from samewise.runner.runs import deletion

    deletion.require_no_links(found)
    children, unsent = deletion.trained_from(found, args.run_root), deletion.unsent(found)
    kept = "; their records in MLflow stay" if deletion.in_mlflow(found) else ""
    if args.yes:
        deletion.delete(found, args.run_root)
    done = "deleted" if args.yes else "would be deleted"
    for child in children:
        print(
            f"warning: {child} was trained from one of these: without its checkpoint, it "
            "cannot be trained again or verified",
            file=sys.stderr,
        )
    for one in unsent:
        hint = (
            "" if args.yes else f"; run `samewise sync {shlex.quote(one.folder)}` to send the rest"
        )
        print(
            f"warning: not everything from {one.folder} has reached MLflow{hint}", file=sys.stderr
        )
    for one in found if not args.json else ():
        size = "" if args.yes else f", {deletion.size_of(one) / 1e6:.1f} MB"
        print(f"{done}: {one.folder}  ({one.state.value}, step {one.step}{size})")
    if args.json:
        print(
            to_json(
                {
                    "deleted": [one.folder for one in found] if args.yes else [],
                    "found": [one.folder for one in found],
                }
            )
        )
    elif not found:
        print("nothing to delete")
    elif not args.yes:
        print(f"nothing has been deleted yet: --yes deletes these, with their checkpoints{kept}")
    return 0


def _print(
    found: Sequence[ListedRun], differing: Mapping[str, Mapping[str, Any]], sorted_by: str
) -> None:
    from samewise.runner.runs.listing import ListedRun, age
    from samewise.runner.runs.selection import values_of
    from samewise.runner.sweeps.progress import clock
    from samewise.runner.sweeps.report.rows import number
    from samewise.runner.sweeps.report.tables import print_rows

    monitors, others = (
        {one.monitor for one in found},
        dict.fromkeys(name for one in found for name in one.also),
    )
    paths, left_out = _choose_columns(list(differing.values()))
    shown = {
        *ListedRun.__dataclass_fields__,
        *paths,
        *(monitors if len(monitors) == 1 else ()),
        *others,
    }
    order = (
        {}
        if not sorted_by or sorted_by in shown
        else {sorted_by: values_of("--sort", sorted_by, found)}
    )
    rows, has_codes = list[dict[str, str]](), len({one.code for one in found}) > 1
    for one in found:
        own = {"overridden": _shorten_label(one.label), **({"code": one.code} if has_codes else {})}
        told = (
            {key: truncate(str(differing[one.folder][key]), _LONGEST) for key in paths}
            if differing
            else own
        )
        value = (
            number(one.value)
            if len(monitors) == 1 or math.isnan(one.value)
            else f"{one.monitor} {number(one.value)}"
        )
        rows.append(
            {
                "name": one.name,
                "run": "-".join([one.run[:8], *one.run.split("-")[1:]]),
                **told,
                "state": one.state.value,
                "step": f"{one.step}/{one.steps}"
                if one.steps and one.step != one.steps
                else str(one.step),
                next(iter(monitors)) if len(monitors) == 1 else "best": value,
                **{
                    name: number(one.also[name]) if name in one.also else ""
                    for name in others
                    if {name} != monitors
                },
                **{name: _write_value(values[one.folder]) for name, values in order.items()},
                "time": "" if math.isnan(one.seconds) else clock(one.seconds),
                "changed": f"{age(one.changed)} ago",
                **(
                    {"reason": truncate(one.reason, 80)}
                    if any(each.reason for each in found)
                    else {}
                ),
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
        else truncate(str(value), _LONGEST)
    )


def _choose_columns(differing: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Choose as many settings as fit into the table, and count the rest: first those that tell
    runs apart, then those that all runs have, then those nearer to the config's root.
    """
    paths = list(differing[0]) if differing else []
    values = {path: [str(config[path]) for config in differing] for path in paths}
    ranked = sorted(
        paths, key=lambda path: ("-" in values[path], -len({*values[path]}), path.count("."))
    )
    apart = list[str]()
    for path in ranked:
        with_it = {*zip(*(values[one] for one in (*apart, path)), strict=True)}
        if len(with_it) > len({*zip(*(values[one] for one in apart), strict=True)}):
            apart.append(path)
    kept = {*[*apart, *ranked][:_MOST_SETTINGS]}
    return [path for path in paths if path in kept], len(paths) - len(kept)


def _shorten_label(label: str) -> str:
    """Shorten the long values in a label; --json shows all of it."""
    parts = re.split(r" (?=[\w.+~/@-]+=)", label)
    return " ".join(truncate(part, _LONGEST) for part in parts)
