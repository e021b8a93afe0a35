"""Report what a sweep found: best points, and the spread over seeds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samewise.runner.commands import add_project, add_trust, project_from
from samewise.runner.errors import ConfigError
from samewise.runner.records import trust
from samewise.runner.records.files import require_no_link
from samewise.runner.records.json_text import to_json
from samewise.runner.records.sweep_folder import SweepFolder, find
from samewise.runner.sweeps.results import PointResult, current_results
from samewise.runner.sweeps.settings import pareto, rank_settings, rivals

EXAMPLES = """examples:
  samewise report resnet18_digits-1a2b3c4d            print the tables; write CSV to the sweep's folder
  samewise report 1a2b --json | jq .settings          for programs

For an unfinished sweep, the report covers the results so far. In MLflow, its runs have the tag `sweep`."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sweep",
        metavar="SWEEP",
        help="a sweep's id or the start of it, or its folder; `samewise sweep --status` lists them",
    )
    parser.add_argument(
        "--run-root",
        type=Path,
        default=Path("runs"),
        help="where to look for sweeps by id (default: runs)",
    )
    add_project(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print settings and points as JSON")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.sweeps.report.rows import (
        as_csv,
        point_rows,
        setting_rows,
    )
    from samewise.runner.sweeps.report.tables import print_settings

    folder = find(args.sweep, run_root=args.run_root)
    # Read first, so that a damaged file is not signed
    _ = folder.facts
    results = current_results(
        folder, project_from(args), trusted=trust.is_trusted(folder.made_by, trust=args.trust)
    )
    ConfigError.raise_if(
        not results,
        folder.id,
        "has no points yet, so there is nothing to report",
        hint=f"samewise sweep --status {folder.path}",
    )
    report_folder = folder.path / "report"
    files = {
        report_folder / "settings.csv": as_csv(setting_rows(results, exact=True)),
        report_folder / "points.csv": as_csv(point_rows(results)),
    }
    require_no_link(report_folder, *files)
    try:
        report_folder.mkdir(exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        # A sweep that can only be read is reported all the same
        print(f"warning: {report_folder}: CSV cannot be written: {error.strerror}", file=sys.stderr)
    if args.json:
        print(
            to_json(
                _report_values(folder, results),
                indent=2,
            )
        )
        return 0
    print_settings(folder, results)
    print(f"CSV      {', '.join(map(str, files))}")
    return 0


def _report_values(
    folder: SweepFolder,
    results: Sequence[PointResult],
) -> dict[str, Any]:
    """Return the whole report as plain values, with None for NaN."""
    from samewise.runner.sweeps.report.tables import as_plain_values, setting_values

    ranked = rank_settings(results)
    return {
        "id": folder.id,
        "folder": str(folder.path),
        "settings": [setting_values(x) for x in ranked],
        "undecided": [dict(x[0].point.values) for x, _ in rivals(ranked)],
        "pareto": [setting_values(x) for x in pareto(results)],
        "points": [as_plain_values(x) for x in results],
    }
