"""Compare two runs: config, environment, code, metrics, and the first step that differs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.config import project as projects
from samewise.runner.config.tree import shown
from samewise.runner.errors import number_of
from samewise.runner.records import kept_sources, sources
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.results import Differences

if TYPE_CHECKING:
    from samewise.runner.records.folder import RunFolder

EXAMPLES = """examples:
  samewise diff 3f2a 91bc
  samewise diff runs/resnet18_digits/3f2a9c81d0b4 other/resnet18_digits/3f2a9c81d0b4 --json
  samewise diff 3f2a                             the lines of your code that have changed since that run

exit codes with one RUN: 0 its code has not changed since; 1 it has
exit codes with two: 0 the same bits in all common steps, and the same metrics as far as both runs have them, or the same final weights and metrics if the
traces have no step in common; 1 they differ, a trace was altered, or there is nothing to compare; 2 the input was wrong
"""


_MOST_LINES = 60
"""Lines of code that are printed."""
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help=RUN)
    parser.add_argument(
        "second",
        metavar="RUN",
        nargs="?",
        help="another run; without it: only the code, as it is now",
    )
    parser.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    if args.second is None:
        return _compare_with_now(args, saved.find(args.first, run_root=args.run_root))
    from samewise.runner.verify.two_runs import compare

    found = compare(
        saved.find(args.first, run_root=args.run_root),
        saved.find(args.second, run_root=args.run_root),
    )
    if args.json:
        print(to_json(asdict(found)))
    else:
        _print(found)
    return 0 if found.same else 1


def _compare_with_now(args: argparse.Namespace, folder: RunFolder) -> int:
    """Print how the code differs from that of a run."""
    projects.find()  # makes its packages importable
    changed = sources.list_changes(folder.sources)
    lines = kept_sources.line_differences(folder.sources)
    if args.json:
        print(to_json({"same": not changed, "code": changed, "lines": lines}))
    else:
        _print_code(changed, lines, most=None)
    return 1 if changed else 0


def _print(found: Differences) -> None:
    print("config:      " + ("the same" if not found.config else "differs"))
    for path, one, two in found.config:
        print(f"  {path}: {shown(one)} | {shown(two)}")
    print("environment: " + ("the same" if not found.environment else "differs"))
    for line in found.environment:
        print(f"  {line}")
    if found.code:
        _print_code(found.code, found.lines, most=_MOST_LINES)
    for key in ("metrics", "logged"):
        for name, pair in getattr(found, key).items():
            print(
                f"  {name:<24} {' | '.join(_numbers(*pair))}   "
                f"{_differs(*pair, compared=key == 'logged' or len({*found.evaluated}) == 1)}".rstrip()
            )
    for line in (*found.missing, *found.altered):
        print(f"  {line}")
    for line in found.said:
        print(f"trace:       {line}")


def _print_code(changed: Sequence[str], lines: Mapping[str, str], *, most: int | None) -> None:
    """Print which code differs, and how, in at most so many lines; in colours on a terminal."""
    from rich.text import Text

    from samewise.runner.records.console import PlainConsole

    print("code:        " + ("differs" if changed else "the same"))
    for line in changed:
        print(f"  {line}")
    console, text = PlainConsole(highlight=False, soft_wrap=True), _lines_of_code(lines)
    for line in text[:most]:
        console.print(Text(line, _COLOURS.get(line[:1], "")))
    if most and (left := len(text) - most) > 0:
        print(f"  {number_of(left, 'more line')} of code: --json shows all")


def _lines_of_code(lines: Mapping[str, str]) -> list[str]:
    said = [
        f"{label}: {text}" if text == kept_sources.NOT_KEPT else text
        for label, text in lines.items()
    ]
    return "\n".join(said).splitlines()


def _differs(one: float | None, two: float | None, *, compared: bool) -> str:
    """Whether two values differ, in a word.

    What is not `compared`, since one is missing or they are of different steps, does not.
    """
    return (
        ""
        if repr(one) == repr(two)
        else "in one run only"
        if one is None or two is None
        else "differs"
        if compared
        else "after other steps"
    )


def _numbers(one: float | None, two: float | None) -> list[str]:
    """Two numbers to six digits, or to all if they differ only in later ones."""
    short = ["-" if value is None else f"{value:.6g}" for value in (one, two)]
    return short if repr(one) == repr(two) or len(set(short)) > 1 else [repr(one), repr(two)]
