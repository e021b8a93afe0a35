"""Report what a sweep found: best points, effect of each parameter, spread over seeds, cost."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.commands import add_project, add_trust, project_from
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import trust
from samewise.runner.records.files import require_no_link
from samewise.runner.records.json_text import to_json
from samewise.runner.records.sweep_folder import SweepFolder, find
from samewise.runner.sweeps.report.curves import Cost, cost
from samewise.runner.sweeps.report.effects import Effect, effects, left_out, pareto
from samewise.runner.sweeps.results import PointResult, current_results
from samewise.runner.sweeps.settings import rank_settings
from samewise.runner.tracking.address import describe_failure
from samewise.runner.tracking.backends import backends_of
from samewise.runner.tracking.sender import prepare_environment

EXAMPLES = """examples:
  samewise report resnet18_digits-1a2b3c4d            print the table; write page, CSV and plots to the sweep's folder and to MLflow
  samewise report 1a2b --open                         also open the page in the browser
  samewise report 1a2b --json | jq .effects           for programs
  samewise report 1a2b --no-mlflow                    log nothing to MLflow

For an unfinished sweep, the report covers the results so far. In MLflow, its runs have the tag `sweep`; the report is in `EXPERIMENT reports`."""


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
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--no-mlflow", action="store_true", help="do not log the report to MLflow")
    parser.add_argument(
        "--json", action="store_true", help="print settings, effects, cost and points as JSON"
    )


def run(args: argparse.Namespace) -> int:
    from samewise.runner.sweeps.report.comparison import pages
    from samewise.runner.sweeps.report.page import as_csv, page
    from samewise.runner.sweeps.report.rows import point_rows, setting_rows

    folder = find(args.sweep, run_root=args.run_root)
    settings = folder.facts["tracking"]  # a damaged file is not signed
    trusted = trust.is_trusted(folder.made_by, trust=args.trust)
    found = current_results(folder, project_from(args), trusted=trusted)
    if not found:
        raise ConfigError(
            Problem(
                folder.id,
                "has no points yet, so there is nothing to report",
                hint=f"samewise sweep --status {folder.path}",
            )
        )
    known, spent = effects(found), cost(folder, found)
    files = {
        "index.html": page(folder, found, known, spent, pages(folder, found)),
        "settings.csv": as_csv(setting_rows(found, exact=True)),
        "points.csv": as_csv(point_rows(found, exact=True)),
    }
    written = _write(folder.path / "report", files)
    if args.json:
        print(to_json(_report_values(folder, found, known, dataclasses.asdict(spent)), indent=2))
    else:
        _print(folder, found, known, spent, written)
    if not written:
        return 0
    if not args.no_mlflow and trusted:
        _log(folder, written, settings)
    elif not args.no_mlflow:
        print(
            f"warning: {folder.path} {trust.NOT_YOURS}. The report is not logged to the "
            "MLflow store that it names; --trust allows it",
            file=sys.stderr,
        )
    if args.open:
        import webbrowser

        webbrowser.open(written[0].absolute().as_uri())
    return 0


def _write(home: Path, files: Mapping[str, str]) -> list[Path]:
    """Write the files and return their paths.

    None, after a warning, if the folder cannot be written to.
    """
    require_no_link(home, *(home / name for name in files))
    try:
        home.mkdir(exist_ok=True)
        for name, text in files.items():
            (home / name).write_text(text, encoding="utf-8")
    except OSError as error:
        print(
            f"warning: {home}: page and CSV cannot be written, so they are not logged "
            f"either: {error.strerror}",
            file=sys.stderr,
        )
        return []
    return [home / name for name in files]


def _print(
    folder: SweepFolder,
    found: Sequence[PointResult],
    known: Sequence[Effect],
    spent: Cost,
    written: Sequence[Path],
) -> None:
    from samewise.runner.sweeps.report.rows import cost_in_words
    from samewise.runner.sweeps.report.tables import print_effects, print_pages, print_settings

    print_settings(folder, found)
    print_effects(known, left_out(found))
    print(f"cost     {cost_in_words(spent)}")
    print_pages(folder, found)
    if written:
        page, *tables = written
        print(f"page     {page}\nCSV      {', '.join(map(str, tables))}")


def _report_values(
    folder: SweepFolder,
    found: Sequence[PointResult],
    known: Sequence[Effect],
    spent: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole report as plain values, with null for NaN."""
    from samewise.runner.sweeps.report.comparison import pages
    from samewise.runner.sweeps.report.tables import as_plain_values, setting_values

    at = pages(folder, found)
    return {
        "id": folder.id,
        "folder": str(folder.path),
        "settings": [setting_values(one) for one in rank_settings(found)],
        "pareto": [setting_values(one) for one in pareto(found)],
        "effects": [dataclasses.asdict(one) for one in known],
        "cost": dict(spent),
        "pages": dataclasses.asdict(at) if at else None,
        "points": [as_plain_values(one) for one in found],
    }


def _log(folder: SweepFolder, written: Sequence[Path], settings: Mapping[str, Any]) -> None:
    """Log the report in MLflow too; the sweep's folder has it even if that fails."""
    if "mlflow" not in backends_of(settings):
        return

    prepare_environment()
    from samewise.runner.tracking.store import log_report

    try:
        log_report(folder.id, written, settings)
    except Exception as error:  # any error of the store or the network
        print(
            f"the report could not be logged to MLflow: {describe_failure(str(error))}",
            file=sys.stderr,
        )
