"""Evaluate a run's best or last checkpoint on one of its splits."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from samewise.runner.commands import add_changes, add_checkpoint, add_packages, add_trust
from samewise.runner.config import project
from samewise.runner.errors import first_few, number_of
from samewise.runner.processes.variables import prepare
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise eval 3f2a                                   the best checkpoint on the validation split
  samewise eval 3f2a --split test --checkpoint last
  samewise eval 3f2a --weights ema                     only the moving average of the weights, with pictures
  samewise eval 3f2a --checkpoint 400 dataset.root=/data/other --json
  samewise eval 3f2a --split test dataset.table_path=other.csv dataset.shares.valid=0 dataset.shares.test=1     the whole of another table

Other data may lack classes of the run, but have no others; their labels are numbered by the names of the run's classes. Only the split that is evaluated has to
be there.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN)
    add_changes(parser)
    add_checkpoint(parser)
    parser.add_argument(
        "--weights",
        metavar="NAME",
        help="evaluate only the weights kept by this callback, such as ema (default: all; "
        "pictures of the trained weights)",
    )
    parser.add_argument(
        "--split",
        default="valid",
        choices=("train", "valid", "test"),
        help="which split to evaluate on (default: valid)",
    )
    pictures = (
        "where to write pictures (default: RUN/eval/SPLIT-STEP, with -NAME added for "
        "--weights, and eight digits for overrides that change the result)"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    parser.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)"
    )
    add_packages(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    folder = saved.find(args.run, run_root=args.run_root)
    composed = saved.trusted_config_of(folder, args.overrides, trust=args.trust)
    prepare(composed.cfg.reproducibility)
    # Imports torch, which must come after the variables
    from samewise.runner.training.restored import evaluate_checkpoint

    evaluation = evaluate_checkpoint(
        folder,
        composed,
        project.find(packages=args.package),
        split=args.split,
        checkpoint=args.checkpoint,
        weights=args.weights,
        pictures=args.pictures,
    )
    if args.json:
        print(to_json(asdict(evaluation)))
        return 0
    subject = (
        evaluation.evaluated or f"{args.split} split ({number_of(evaluation.samples, 'sample')})"
    )
    print(f"{folder.path}, step {evaluation.step}, {subject}")
    for path, run_value, value_here in evaluation.changed:
        print(
            "  {}: {} in the run, {} here".format(
                path, *("null" if x is None else x for x in (run_value, value_here))
            )
        )
    if evaluation.classes and any(path.startswith("dataset.") for path, _, _ in evaluation.changed):
        print(f"  classes numbered as in the run: {first_few(evaluation.classes, 10)}")
    for name, value in evaluation.metrics.items():
        print(f"  {name:<24} {value:.6f}")
    if evaluation.pictures.is_dir() and any(evaluation.pictures.iterdir()):
        print(f"  pictures in {evaluation.pictures}")
    return 0
