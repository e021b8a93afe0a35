"""Evaluate a run's best or last checkpoint on one of its splits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samewise.runner.commands import add_checkpoint, add_trust
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.variables import prepare
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise eval 3f2a                                   the best checkpoint on the validation split
  samewise eval 3f2a --split test --checkpoint last
  samewise eval 3f2a --weights ema                     only the moving average of the weights, with pictures
  samewise eval 3f2a --checkpoint 400 dataset.root=/data/other --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values to change in the run's config")
    add_checkpoint(parser)
    parser.add_argument(
        "--weights", metavar="NAME", help="evaluate only the weights kept by this callback, such as ema (default: all; pictures of the trained weights)"
    )
    parser.add_argument("--split", default="valid", choices=("train", "valid", "test"), help="which split to evaluate on (default: valid)")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="where to write pictures (default: RUN/eval/SPLIT-STEP, with -NAME added for --weights)"
    )
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    folder = saved.find(args.run, run_root=args.run_root)
    composed = saved.trusted_config_of(folder, args.overrides, trust=args.trust)
    prepare(composed.cfg.reproducibility)
    step, metrics, pictures, of = _evaluate(args, folder, composed)
    if args.json:
        print(to_json({"run": str(folder.path), "step": step, "split": args.split, "metrics": metrics, "evaluated": of, "pictures": str(pictures)}))
        return 0
    print(f"{folder.path}, step {step}, {of or f'{args.split} split'}")
    for name, value in metrics.items():
        print(f"  {name:<24} {value:.6f}")
    if pictures.is_dir() and any(pictures.iterdir()):
        print(f"  pictures in {pictures}")
    return 0


def _evaluate(args: argparse.Namespace, folder: Any, composed: Any) -> tuple[int, dict[str, float], Path, str]:
    from samewise.runner.training.evaluation import draw, left_out, measure_split, metrics_of, models_to_evaluate, tell_doubts
    from samewise.runner.training.restored import at_checkpoint

    run, step = at_checkpoint(composed, project.find(), folder, args.checkpoint)
    if args.split not in run.splits:
        raise ConfigError(Problem(f"dataset.{args.split}", "this data set does not have that split", hint="one of: " + ", ".join(run.splits)))
    models = models_to_evaluate(run, args.weights)
    name = "-".join(filter(None, (args.split, f"{step:08d}", args.weights)))
    pictures = args.pictures or folder.path / "eval" / name
    metrics: dict[str, float] = {}
    for prefix, model in models.items():
        scores = measure_split(run, args.split, model)
        metrics |= metrics_of(scores, f"{prefix}{args.split}/")
        tell_doubts(run, scores)
        if prefix == next(iter(models)):
            draw(scores, pictures, inside=None if args.pictures else folder.path)
    return step, metrics, pictures, left_out(run, args.split)
