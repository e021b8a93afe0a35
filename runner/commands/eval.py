"""Evaluate a run's best or last checkpoint, or those of a sweep's runs, on one of the splits."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samewise.runner.commands import CHANGES, CHECKPOINT, JSON, PACKAGES, RUN_ROOT, TRUST
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem, SamewiseError, first_few, number_of
from samewise.runner.processes.variables import prepare
from samewise.runner.records import found, sweep_folder
from samewise.runner.records.console import show_progress
from samewise.runner.records.files import write_atomically
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.records.sweep_folder import SweepFolder

EXAMPLES = """examples:
  samewise eval 3f2a                                   the best checkpoint on the validation split
  samewise eval 3f2a --split test --checkpoint last
  samewise eval 3f2a --weights ema                     only the moving average of the weights, with pictures
  samewise eval 3f2a --checkpoint 400 dataset.root=/data/other --json
  samewise eval resnet18_digits-1a2b3c4d --split test --csv test.csv    all finished runs of a sweep, one after the other
  samewise eval 3f2a --split test dataset.table_path=other.csv dataset.shares.valid=0 dataset.shares.test=1     the whole of another table

Other data may lack classes of the run, but have no others; their labels are numbered by the names of the run's classes. Only the split that is evaluated has to
be there. What a sweep's runs gave is recorded in their summaries and in MLflow, and not computed again, unless overrides change a result.
"""

ARGUMENTS = {
    "run": {"metavar": "RUN", "help": f"{RUN}; or a sweep's id or folder"},
    **CHANGES,
    **CHECKPOINT,
    "--weights": {
        "metavar": "NAME",
        "help": "evaluate only the weights kept by this callback, such as ema (default: all; "
        "pictures of the trained weights)",
    },
    "--split": {
        "default": "valid",
        "help": "which split to evaluate on: train, valid, test, or a further one of the data set "
        "(default: valid)",
    },
    "--pictures": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "where to write pictures of one run (default: RUN/eval/SPLIT-STEP, with -NAME added for "
        "--weights, and eight digits for overrides that change the result)",
    },
    **RUN_ROOT,
    **PACKAGES,
    **TRUST,
    **JSON,
    "--csv": {"type": Path, "metavar": "FILE", "help": "also write the table of a sweep's points"},
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    # A run's name comes first
    runs, sweeps = (x.matching(args.run, run_root=args.run_root) for x in (found, sweep_folder))
    is_sweep = bool(sweeps and not runs)
    if args.pictures if is_sweep else args.csv:
        option, count = ("--pictures", "one run") if is_sweep else ("--csv", "a sweep's points")
        raise ConfigError(Problem(option, f"is for {count}", args.run))
    if is_sweep:
        return _evaluate_points(sweep_folder.find(args.run, run_root=args.run_root), args)
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


def _evaluate_points(sweep: SweepFolder, args: argparse.Namespace) -> int:
    """Evaluate a sweep's finished runs; return 1 if one cannot be."""
    from samewise.runner.commands.sync import send_now
    from samewise.runner.config import saved
    from samewise.runner.sweeps.report import rows, tables
    from samewise.runner.sweeps.results import State, point_results

    results, failures, unsent = point_results(sweep), 0, list[str]()
    # Wrong overrides and folders of others are refused before anything is evaluated
    runs = {
        x.point.folder: saved.trusted_config_of(x.point.run, args.overrides, trust=args.trust)
        for x in results
        if x.state is State.finished
    }
    evaluations = dict[str, dict[str, Any]]()
    for path, composed in show_progress(runs.items(), len(runs)):
        prepare(composed.cfg.reproducibility)
        # Import torch, which must come after the variables
        from samewise.runner.training.restored import evaluate_once
        from samewise.runner.training.same_bits.determinism import fresh_torch_state

        try:
            with fresh_torch_state():
                evaluations[path], is_new = evaluate_once(
                    RunFolder(Path(path)),
                    composed,
                    project.find(packages=args.package),
                    **{name: getattr(args, name) for name in ("split", "checkpoint", "weights")},
                )
            # A store that does not answer is asked once
            unsent += send_now(RunFolder(Path(path))) if is_new and not unsent else []
        except SamewiseError as error:
            # Before anything is evaluated, the command is likelier to be wrong than a run
            if isinstance(error, ConfigError) and not evaluations:
                raise
            failures, evaluations[path] = failures + 1, {"state": str(error.problems[0])}
    points = [
        {
            **tables.point_values(x.point),
            "state": x.state.value,
            "metrics": {},
            **evaluations.get(x.point.folder, {}),
        }
        for x in results
    ]
    if args.csv:
        write_atomically(args.csv, rows.as_csv(rows.evaluation_rows(points, exact=True)))
    if args.json:
        print(to_json({"id": sweep.id, "split": args.split, "points": points}, indent=2))
    else:
        tables.print_rows(rows.evaluation_rows(points))
    if unsent:
        print(
            f"warning: not everything has reached MLflow yet: {unsent[0]}; `samewise sync` sends "
            "the rest",
            file=sys.stderr,
        )
    return int(failures > 0)
