"""Compare settings by pairs of runs with the same seed: is A better than B?"""

from __future__ import annotations

import argparse
from pathlib import Path

from samewise.runner.commands import add_project, add_trust, project_from
from samewise.runner.records.json_text import to_json

METRIC = (
    "at the best step; final/NAME: at the last; seconds, steps: cost (default: evaluate.monitor, "
    "which also chose the best step)"
)
EXAMPLES = """examples:
  samewise compare optimizer.momentum=0.5 optimizer.momentum=0.9 experiment=resnet18_digits --seeds 5
  samewise compare 'optimizer=adamw optimizer.lr=1e-3' '' experiment=resnet18_digits --until 0.2   '': without changes
  samewise compare 3f2a 91bc                       two runs: all runs of their settings, by seed
  samewise compare 1a2b 1a2b:lr=0.1                every setting of a sweep with one of them
  samewise compare 3f2a 91bc --metric test/accuracy --metric seconds --out paper

A pair has the same seed: the same order of samples, augmentation, and initial weights of what both build first. The interval of the mean
gain holds however often you look: each look is recorded in RUN_ROOT/comparisons, and spends a part of the 5 % of false claims."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser, "", "")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{METRIC} (may be repeated)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write Markdown, LaTeX, SVG and PDF there"
    )
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")


def add_pairs(parser: argparse.ArgumentParser, proposal: str, more: str) -> None:
    """Add the arguments that name two sides, and say how many pairs to train.

    Args:
        parser: The parser.
        proposal: What A is, before how it is named.
        more: What else the run root has.
    """
    side = "overrides in quotes, a run, a bundle, a sweep, or its setting (SWEEP:lr=0.1)"
    parser.add_argument("first", metavar="A", help=proposal + side)
    parser.add_argument("second", metavar="B", help="the baseline, as A; one setting")
    parser.add_argument("shared", nargs="*", metavar="OVERRIDE", help="overrides of both sides")
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="train what is missing for N pairs (with --until: at most N)",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="WIDTH",
        help="train pairs until the difference is settled, or known to plus and minus WIDTH "
        "(in points, 0.2, for an accuracy); at most 20 without --seeds",
    )
    parser.add_argument(
        "--budget", type=int, metavar="STEPS", help="most optimizer steps to train, of all runs"
    )
    parser.add_argument(
        "--run-root",
        type=Path,
        default=Path("runs"),
        help=f"where the runs {more}are (default: runs)",
    )
    add_project(parser)
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from samewise.runner.compare import pages
    from samewise.runner.compare.comparison import compare
    from samewise.runner.compare.sides import Place
    from samewise.runner.sweeps.report.tables import print_rows

    place = Place(project_from(args), args.run_root, args.shared, args.trust)
    comparisons = compare(
        args.first,
        args.second,
        place,
        metrics=args.metric,
        seeds=args.seeds,
        until=args.until,
        budget=args.budget,
    )
    files = pages.save(comparisons, args.out) if args.out else []
    if args.json:
        print(to_json([pages.plain_values(x) for x in comparisons], indent=2))
        return 0
    for comparison in comparisons:
        print(comparison)
    table = pages.rows(comparisons)
    print_rows(table, right=list(table[0])[3:-1])
    for note in dict.fromkeys(note for x in comparisons for note in x.notes):
        print(f"note     {note}")
    if files:
        print(f"written  {', '.join(map(str, files))}")
    return 0
