"""Accept a change: the same bits as the baseline, or better than chance among all tries."""

import argparse
from pathlib import Path

from samewise.runner.commands import JSON, add_arguments, project_from
from samewise.runner.commands.compare import METRIC, add_pairs
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise gate 3f2a 91bc                          two runs: all runs of their settings, by seed
  samewise gate optimizer.momentum=0.95 '' experiment=resnet18_digits --until 0.2   '': without changes
  samewise gate 3f2a 91bc --json --out gate        also a page, gate/gate.md

A is the proposal, B the baseline. A is accepted if the runs of each seed have the same bits (a refactoring), or if the interval of the
mean gain lies above zero (an improvement). RUN_ROOT/gate.jsonl counts the tries: try i may be wrong in 5 % / (i (i + 1)), so that
all of them together are in 5 %. The same question asked again, with more pairs, is the same try.

exit codes: 0 accepted; 1 not accepted; 2 the input was wrong, or the ledger was rewritten"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser, "the proposal: ", "and the ledger gate.jsonl ")
    parser.add_argument("--metric", metavar="NAME", help=METRIC)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write gate.md there, beside the tables and pictures of `samewise compare`",
    )
    add_arguments(parser, JSON)


def run(args: argparse.Namespace) -> int:
    from samewise.runner.compare import pages
    from samewise.runner.compare.gate import gate
    from samewise.runner.compare.sides import Place

    verdict = gate(
        args.first,
        args.second,
        Place(project_from(args), args.run_root, args.shared, args.trust),
        metric=args.metric,
        seeds=args.seeds,
        until=args.until,
        budget=args.budget,
    )
    if args.out:
        pages.save_verdict(verdict, args.out)
    print(to_json(pages.plain_verdict(verdict), indent=2) if args.json else verdict)
    return 0 if verdict.accepted else 1
