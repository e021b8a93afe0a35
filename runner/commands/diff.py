"""Compare two runs: config, environment, metrics, and the first step and layer where they diverge."""

from __future__ import annotations

import argparse
import shlex
import sys
from html import escape
from pathlib import Path
from typing import Any

from samewise.runner.commands import add_trust
from samewise.runner.commands.sync import address
from samewise.runner.config.tree import shown
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.records import shapes
from samewise.runner.records import trust as signatures
from samewise.runner.records.files import read_json, read_mapping, require_writable, write_atomically
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.tracking.address import remove_password
from samewise.runner.tracking.sender import prepare_environment

EXAMPLES = """examples:
  samewise diff 3f2a 91bc
  samewise diff runs/resnet18_digits/3f2a9c81d0b4 other/resnet18_digits/3f2a9c81d0b4 --json
  samewise diff 3f2a 91bc --html diff.html       also write a web page
  samewise diff 3f2a 91bc --log                  also log the page to both runs in MLflow

exit codes: 0 the same bits in all common steps; 1 they differ, or no step is common; 2 the input was wrong
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help=RUN)
    parser.add_argument("second", metavar="RUN")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained web page")
    parser.add_argument("--log", action="store_true", help="also log the page to MLflow, as the artifact diff/OTHER.html of both runs")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    pair = saved.find(args.first, run_root=args.run_root), saved.find(args.second, run_root=args.run_root)
    if args.html:
        require_writable("--html", args.html, file=True)
    found = _compare(*pair)
    if args.html:
        write_atomically(args.html, _page(*pair, found))
    if args.log:
        _log(*pair, found, trust=args.trust)
    if args.json:
        print(to_json(found))
    else:
        _print(found)
    return 0 if found["parts"] is None and found["steps"] else 1


def _compare(first: Any, second: Any) -> dict[str, Any]:
    from samewise.runner.config import saved
    from samewise.runner.config.fingerprint import identity
    from samewise.runner.config.tree import differences
    from samewise.runner.records import environment, sources, trace
    from samewise.runner.records.divergence import first_divergence

    head, one = trace.read_trace_of(first)
    other, two = trace.read_trace_of(second)
    both = sorted(one.keys() & two.keys())
    algorithms = [trace.algorithm_of(folder.trace, found) for folder, found in ((first, head), (second, other))]
    stages = trace.STAGES if algorithms[0] == algorithms[1] else trace.ANYWHERE
    divergence = next(((step, *found) for step in both if (found := first_divergence(head, one[step], two[step], stages=stages))), None)
    config = [[path, a, b] for path, a, b in differences(identity(saved.config_in(first.config).whole), identity(saved.config_in(second.config).whole))]
    reason = "" if divergence is None else trace.describe_stage(*divergence[1:], head["gradients"], [path for path, *_ in config])
    if divergence and divergence[0] == both[0] and divergence[1] in ("loss", "gradients"):
        reason += "; or the weights before that step differ, which a trace does not record"
    metrics = [((read_json(folder.summary, shapes.SUMMARY) or {}).get("metrics") or {}).get("final", {}) for folder in (first, second)]
    return {
        "config": config,
        "environment": environment.differences(read_json(first.environment, shapes.ENVIRONMENT) or {}, read_json(second.environment, shapes.ENVIRONMENT) or {}),
        "code": sources.differences(first.sources, second.sources),
        "metrics": {name: [metrics[0].get(name), metrics[1].get(name)] for name in sorted({*metrics[0], *metrics[1]})},
        "steps": len(both),
        "digests": algorithms,
        "missing": [f"{folder.path}: {words}" for folder, lines in ((first, one), (second, two)) if (words := trace.missing_start(lines))],
        "parts": None if divergence is None else {"step": divergence[0], "stage": divergence[1], "layer": divergence[2], "reason": reason},
    }


def _page(first: Any, second: Any, found: dict[str, Any]) -> str:
    from samewise.runner.sweep.page import document, table

    names = [f"{folder.path.absolute().parent.name}/{folder.path.name}" for folder in (first, second)]
    parts = [f"<h1>{escape(names[0])} | {escape(names[1])}</h1>", *(f"<p>{escape(line)}</p>" for line in _verdict(found))]
    if found["config"]:
        parts += ["<h2>Config</h2>", table([{"": path, names[0]: shown(one), f"{names[1]} ": shown(two)} for path, one, two in found["config"]])]
    if found["metrics"]:
        rows = [{"": name, names[0]: _number(a), f"{names[1]} ": _number(b), "differs": "" if a == b else "yes"} for name, (a, b) in found["metrics"].items()]
        parts += ["<h2>Metrics of the last evaluation</h2>", table(rows)]
    for title, lines in (("Environment", found["environment"]), ("Code", found["code"]), ("Missing", found["missing"])):
        if lines:
            parts += [f"<h2>{title}</h2>", "<ul>", *(f"<li>{escape(str(line))}</li>" for line in lines), "</ul>"]
    return document(" | ".join(names), parts)


def _log(first: Any, second: Any, found: dict[str, Any], *, trust: bool) -> None:
    """Log the page with both runs in MLflow."""
    from samewise.runner.config import saved
    from samewise.runner.config.tree import plain

    prepare_environment()
    for folder, other in ((first, second), (second, first)):
        run_id = read_mapping(folder.tracking, shapes.TRACKING).get("run_id")
        if not run_id:
            raise ConfigError(Problem("--log", "the run is not in MLflow", str(folder.path), hint=f"samewise sync {shlex.quote(str(folder.path))}"))
        signatures.require(folder.config, trust=trust, uses="sends a page, with your tokens, to the MLflow store that its config.yaml names")
        settings = plain(saved.config_in(folder.config).cfg.tracking)
        uri = address(folder, settings, None)
        from samewise.runner.tracking.store import open_client, require_place

        try:
            client = open_client(uri)
            require_place(client, run_id, chosen=settings["artifact_location"])
            client.log_text(run_id, _page(first, second, found), f"diff/{other.path.name}.html")
        except Exception as error:  # any error of the store or the network
            raise ConfigError(Problem("--log", f"MLflow refused the page: {first_line(error)}", remove_password(uri))) from None
        print(f"logged to the MLflow run {run_id} as diff/{other.path.name}.html", file=sys.stderr)


def _verdict(found: dict[str, Any]) -> list[str]:
    """Describe what the traces show, in lines."""
    parts = found["parts"]
    if not found["steps"]:
        return ["no steps in common"]
    lines = list[str]()
    comparable = len(set(found["digests"])) == 1
    if not comparable:
        one, two = found["digests"]
        lines.append(
            f"digests by {one} and by {two} cannot be compared, so nothing is known about inputs, gradients and weights; only batches and losses are compared"
        )
    if parts is None:
        return [*lines, f"the same {'bits' if comparable else 'batches and losses'} in all {found['steps']} common steps"]
    return [*lines, f"diverges at step {parts['step']}: {parts['reason']}" + (f"; first in {parts['layer']}" if parts["layer"] else "")]


def _print(found: dict[str, Any]) -> None:
    print("config:      " + ("the same" if not found["config"] else "differs"))
    for path, one, two in found["config"]:
        print(f"  {path}: {shown(one)} | {shown(two)}")
    print("environment: " + ("the same" if not found["environment"] else "differs"))
    for line in found["environment"]:
        print(f"  {line}")
    if found["code"]:
        print(f"code:        differs in {', '.join(found['code'])}")
    for name, (one, two) in found["metrics"].items():
        print(f"  {name:<24} {_number(one)} | {_number(two)}" + ("" if one == two else "   differs"))
    for line in found["missing"]:
        print(f"  {line}")
    for line in _verdict(found):
        print(f"trace:       {line}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
