"""Compare two runs: config, environment, code, metrics, and the first step that differs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from samewise.runner.commands import JSON, RUN_ROOT
from samewise.runner.config import project as projects
from samewise.runner.config.tree import shown
from samewise.runner.errors import ConfigError, number_of
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
traces have no step in common; 1 they differ, or there is nothing to compare; 2 the input was wrong
"""


_MAX_LINES = 60
"""Maximum number of lines of code to print."""
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}

ARGUMENTS = {
    "runs": {
        "metavar": "RUN",
        "nargs": "+",
        "help": f"{RUN}; one run: only its code, compared with the code as it is now",
    },
    **RUN_ROOT,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    ConfigError.raise_if(
        len(args.runs) > 2, "RUN", "diff compares two runs", args.runs, "one or two runs"
    )
    folders = [saved.find(name, run_root=args.run_root) for name in args.runs]
    if len(folders) == 1:
        return _compare_with_now(args, folders[0])
    from samewise.runner.verify.two_runs import compare

    differences = compare(*folders)
    if args.json:
        print(to_json(asdict(differences)))
    else:
        print(f"runs:        {folders[0].path} | {folders[1].path}")
        _print(differences)
    return 0 if differences.same else 1


def _compare_with_now(args: argparse.Namespace, folder: RunFolder) -> int:
    """Print how the current code differs from a run's."""
    # Makes the project's packages importable
    projects.find()
    changed = sources.list_changes(folder.sources)
    lines = kept_sources.line_differences(folder.sources)
    if args.json:
        print(to_json({"same": not changed, "code": changed, "lines": lines}))
    else:
        _print_code(changed, lines, max_lines=None)
    return 1 if changed else 0


def _print(differences: Differences) -> None:
    print("config:      " + ("the same" if not differences.config else "differs"))
    for path, value_a, value_b in differences.config:
        print(f"  {path}: {shown(value_a)} | {shown(value_b)}")
    print("environment: " + ("the same" if not differences.environment else "differs"))
    for line in differences.environment:
        print(f"  {line}")
    if differences.code:
        _print_code(differences.code, differences.lines, max_lines=_MAX_LINES)
    for key in ("metrics", "logged"):
        for name, pair in getattr(differences, key).items():
            print(
                f"  {name:<24} {' | '.join(_numbers(*pair))}   "
                f"{_differs(*pair, comparable=key == 'logged' or len({*differences.evaluated}) == 1)}".rstrip()
            )
    for line in differences.missing:
        print(f"  {line}")
    for line in differences.messages:
        print(f"trace:       {line}")


def _print_code(changed: Sequence[str], lines: Mapping[str, str], *, max_lines: int | None) -> None:
    """Print which code differs, and how, in colours on a terminal."""
    from rich.text import Text

    from samewise.runner.records.console import PlainConsole

    print("code:        " + ("differs" if changed else "the same"))
    for line in changed:
        print(f"  {line}")
    console = PlainConsole(highlight=False, soft_wrap=True)
    text = "\n".join(
        f"{label}: {content}" if content == kept_sources.NOT_KEPT else content
        for label, content in lines.items()
    ).splitlines()
    for line in text[:max_lines]:
        console.print(Text(line, _COLOURS.get(line[:1], "")))
    if max_lines and (remaining := len(text) - max_lines) > 0:
        print(f"  {number_of(remaining, 'more line')} of code: --json shows all")


def _differs(value_a: float | None, value_b: float | None, *, comparable: bool) -> str:
    """Return a word on whether two values differ.

    Values of different steps are not `comparable`.
    """
    return (
        ""
        if repr(value_a) == repr(value_b)
        else "in one run only"
        if value_a is None or value_b is None
        else "differs"
        if comparable
        else "after other steps"
    )


def _numbers(value_a: float | None, value_b: float | None) -> list[str]:
    """Format two numbers with six digits, or with all if they differ only in later ones."""
    short = ["-" if value is None else f"{value:.6g}" for value in (value_a, value_b)]
    return (
        short
        if repr(value_a) == repr(value_b) or len(set(short)) > 1
        else [repr(value_a), repr(value_b)]
    )
