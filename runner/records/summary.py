"""What is said at the end of a run. Imports neither torch nor mlflow."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.records.console import PlainConsole
from samewise.runner.records.folder import RunFolder


def print_summary(summary: Mapping[str, Any], folder: RunFolder, *, uri: str | None, as_json: bool = False, fresh: bool = True) -> None:
    """The run's result on standard output.

    Args:
        summary: As in summary.json.
        folder: The run's.
        uri: The tracking URI, for the command that opens the UI; None: tracking is off.
        as_json: One JSON object instead of a table.
        fresh: Whether it was trained just now.
    """
    if as_json:
        print(json.dumps({**summary, "folder": str(folder.path)}))
        return
    console = PlainConsole(soft_wrap=True, highlight=False)
    console.print("finished" if fresh else "already finished: nothing to train", style="bold green")
    rows = _rows(summary, folder, uri)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  {name:<{width}}  {value}")


def _rows(summary: Mapping[str, Any], folder: RunFolder, uri: str | None) -> list[tuple[str, str]]:
    metrics, timings = summary["metrics"], summary["timings"]
    rows = [(name, f"{value:.4f}") for name, value in metrics["final"].items()]
    best = metrics["best"]
    if best and best.get("step") != summary["steps"]:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in best.items() if name != "step")
        rows.append(("best", f"{shown} (step {best.get('step', 0):.0f}, by {metrics['monitor']})"))
    rows.append(("steps", f"{summary['steps']} in {timings['training_s']:.1f} s ({timings['step_ms']:.1f} ms per step, including evaluation)"))
    if summary.get("stopped_early"):
        rows.append(("stopped early", summary["stopped_early"]))
    rows += [
        ("weights sha256", f"{summary['weights_sha256']} (step {summary['steps']})"),
        ("promise", LEVELS.get(summary["level"], str(summary["level"]))),
        ("folder", str(folder.path)),
    ]
    if uri:
        rows.append(("MLflow UI", _ui_command(uri, folder.path.parents[1])))
    return rows


def _ui_command(uri: str, run_root: Path) -> str:
    """The shortest command that opens the store."""
    if uri != f"sqlite:///{run_root}/mlflow.db":
        return f"samewise ui --uri {shlex.quote(uri)}"
    return "samewise ui" if run_root == Path("runs") else f"samewise ui --run-root {shlex.quote(str(run_root))}"


LEVELS = {
    "none": "none: this run may not give the same bits again",
    "R0": "R0: the same command on the same machine gives the same bits",
    "R1": "R1: the same bits when run again, killed and resumed, with any number of workers",
    "R2": "R2: the same bits also on any number of ranks that divides replicas",
    "R3": "R3: the same bits also on another x86-64-v3 CPU",
}
