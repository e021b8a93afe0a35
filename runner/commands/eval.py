"""Evaluate a run's best or last checkpoint on one of its splits."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_checkpoint, add_packages, add_trust
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem, first_few, number_of
from samewise.runner.processes.variables import prepare
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

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
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values to change in the run's config"
    )
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
    if args.split != "valid" and any(
        one.lstrip("+").startswith("evaluate.limit=") for one in args.overrides
    ):
        raise ConfigError(
            Problem(
                "evaluate.limit",
                f"limits the validation split, not {args.split}",
                composed.cfg.evaluate.limit,
                hint="leave it out",
            )
        )
    changed = _changed(saved.config_in(folder.config), composed) if args.overrides else []
    facts, classes = _evaluate(args, folder, composed, changed)
    if args.json:
        print(to_json(facts))
        return 0
    measured = facts["evaluated"] or f"{args.split} split ({number_of(facts['samples'], 'sample')})"
    print(f"{folder.path}, step {facts['step']}, {measured}")
    for path, was, now in changed:
        print(
            "  {}: {} in the run, {} here".format(
                path, *("null" if one is None else one for one in (was, now))
            )
        )
    if classes and any(path.startswith("dataset.") for path, _, _ in changed):
        print(f"  classes numbered as in the run: {first_few(classes, 10)}")
    for name, value in facts["metrics"].items():
        print(f"  {name:<24} {value:.6f}")
    pictures = Path(facts["pictures"])
    if pictures.is_dir() and any(pictures.iterdir()):
        print(f"  pictures in {pictures}")
    return 0


def _changed(recorded: Composed, composed: Composed) -> list[tuple[str, Any, Any]]:
    """What overrides change of what decides the result, the data's places included: path, value in
    the run, value here.
    """
    from samewise.runner.config.fingerprint import finds_data, is_outside
    from samewise.runner.config.tree import at, same

    keys = sorted({override.partition("=")[0].lstrip("+") for override in composed.overrides})
    found = [
        (key, at(recorded.whole, key), at(composed.whole, key))
        for key in keys
        if finds_data(key) or not is_outside(key)
    ]
    return [one for one in found if not same(one[1], one[2])]


def _evaluate(
    args: argparse.Namespace, folder: Any, composed: Composed, changed: list[tuple[str, Any, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The results as `--json` prints them, and the names of the classes."""
    from samewise.runner.interfaces import class_names
    from samewise.runner.training.evaluation import (
        draw,
        left_out,
        measure_split,
        metrics_of,
        models_to_evaluate,
        samples_taken,
        tell_doubts,
    )
    from samewise.runner.training.restored import at_checkpoint

    run, step = at_checkpoint(
        composed, project.find(packages=args.package), folder, args.checkpoint, args.split
    )
    models = models_to_evaluate(run, args.weights)
    differs = (
        hashlib.sha256(to_json([[path, now] for path, _, now in changed]).encode()).hexdigest()[:8]
        if changed
        else ""
    )
    name = "-".join(filter(None, (args.split, f"{step:08d}", args.weights, differs)))
    pictures = args.pictures or folder.path / "eval" / name
    metrics: dict[str, float] = {}
    for prefix, model in models.items():
        scores = measure_split(run, args.split, model)
        metrics |= metrics_of(scores, f"{prefix}{args.split}/")
        tell_doubts(run, scores)
        if prefix == next(iter(models)):
            draw(scores, pictures, inside=None if args.pictures else folder.path)
    part = run.splits[args.split]
    facts = {
        "run": str(folder.path),
        "step": step,
        "split": args.split,
        "samples": samples_taken(run, part),
        "metrics": metrics,
    }
    return {
        **facts,
        "evaluated": left_out(run, args.split),
        "pictures": str(pictures),
    }, class_names(part.dataset)
