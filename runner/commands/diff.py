"""Compare two runs: config, environment, metrics, and the first step and layer where they part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  samewise diff 3f2a 91bc
  samewise diff runs/resnet18_digits/3f2a9c81d0b4 other/resnet18_digits/3f2a9c81d0b4 --json

exit codes: 0 the same bits in all common steps; 1 they differ, or no step is common; 2 the input was wrong
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("first", metavar="RUN", help="a run's folder, the start of its fingerprint, or its MLflow run id")
    parser.add_argument("second", metavar="RUN")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    found = _compared(saved.find(args.first, run_root=args.run_root), saved.find(args.second, run_root=args.run_root))
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["parts"] is None and found["steps"] else 1


def _compared(first: Any, second: Any) -> dict[str, Any]:
    from samewise.runner.config import saved
    from samewise.runner.config.fingerprint import identity
    from samewise.runner.config.tree import differences
    from samewise.runner.records import environment, shapes, sources, trace
    from samewise.runner.records.files import read_json

    head, one = trace.read_trace_of(first)
    other, two = trace.read_trace_of(second)
    both = sorted(one.keys() & two.keys())
    algorithms = [trace.algorithm_of(folder.trace, found) for folder, found in ((first, head), (second, other))]
    stages = trace.STAGES if algorithms[0] == algorithms[1] else trace.ANYWHERE
    parting = next(((step, *found) for step in both if (found := trace.parting(head, one[step], two[step], stages=stages))), None)
    metrics = [((read_json(folder.summary, shapes.SUMMARY) or {}).get("metrics") or {}).get("final", {}) for folder in (first, second)]
    return {
        "config": [[path, a, b] for path, a, b in differences(identity(saved.config_of(first).cfg), identity(saved.config_of(second).cfg))],
        "environment": environment.differences(read_json(first.environment, shapes.ENVIRONMENT) or {}, read_json(second.environment, shapes.ENVIRONMENT) or {}),
        "code": sources.differences(first.sources, second.sources),
        "metrics": {name: [metrics[0].get(name), metrics[1].get(name)] for name in sorted({*metrics[0], *metrics[1]})},
        "steps": len(both),
        "digests": algorithms,
        "missing": [f"{folder.path}: {words}" for folder, lines in ((first, one), (second, two)) if (words := trace.what_is_missing(lines))],
        "parts": None if parting is None else {"step": parting[0], "stage": parting[1], "layer": parting[2], "reason": trace.STAGES[parting[1]]},
    }


def _print(found: dict[str, Any]) -> None:
    print("config:      " + ("the same" if not found["config"] else "differs"))
    for path, one, two in found["config"]:
        print(f"  {path}: {one!r} | {two!r}")
    print("environment: " + ("the same" if not found["environment"] else "differs"))
    for line in found["environment"]:
        print(f"  {line}")
    if found["code"]:
        print(f"code:        differs in {', '.join(found['code'])}")
    for name, (one, two) in found["metrics"].items():
        print(f"  {name:<24} {_number(one)} | {_number(two)}" + ("" if one == two else "   differs"))
    for line in found["missing"]:
        print(f"  {line}")
    parts = found["parts"]
    comparable = len(set(found["digests"])) == 1
    if not found["steps"]:
        print("trace:       no steps in common")
        return
    if not comparable:
        one, two = found["digests"]
        print(f"trace:       digests by {one} | {two} cannot be compared: of inputs, gradients and weights nothing is known; batches and losses are compared")
    if parts is None:
        print(f"trace:       the same {'bits' if comparable else 'batches and losses'} in all {found['steps']} common steps")
    else:
        layer = f"; first in {parts['layer']}" if parts["layer"] else ""
        print(f"trace:       diverges at step {parts['step']}: {parts['reason']}{layer}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
