"""Prints a run's summary. Imports neither torch nor mlflow."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.records.console import PlainConsole
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.json_text import to_json


def print_summary(
    summary: Mapping[str, Any],
    folder: RunFolder,
    *,
    uri: str | None,
    as_json: bool = False,
    fresh: bool = True,
) -> None:
    """Print the run's result as a table or a JSON object.

    Args:
        summary: The content of summary.json.
        folder: The run's folder.
        uri: The store's address, for the command that opens the UI; None if tracking is off.
        as_json: Whether to print JSON.
        fresh: Whether the run was trained just now.
    """
    if as_json:
        print(to_json({**summary, "folder": str(folder.path)}))
        return
    console = PlainConsole(soft_wrap=True, highlight=False)
    console.print("finished" if fresh else "already finished: nothing to train", style="bold green")
    rows = _rows(summary, folder, uri)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  {name:<{width}}  {value}")
    level = str(summary["level"])
    console.print(
        f"  {LEVELS.get(level, level)}; weights sha256 {summary['weights_sha256']} (step "
        f"{summary['steps']})",
        style="dim",
    )


def _rows(summary: Mapping[str, Any], folder: RunFolder, uri: str | None) -> list[tuple[str, str]]:
    """List the rows: the monitored metric, other metrics, where everything is, what to do next."""
    metrics, timings = summary["metrics"], summary["timings"]
    final, best, monitor = metrics["final"], metrics["best"] or {}, metrics["monitor"]
    rows = [
        (name, f"{final[name]:.4f}") for name in sorted(final, key=lambda name: name != monitor)
    ]
    if monitor in best:
        text = f"(best {best[monitor]:.4f} at step {best['step']:.0f})"
        rows[:1] = (
            [(monitor, f"{final[monitor]:.4f} {text}")]
            if monitor in final
            else [(monitor, text), *rows[:1]]
        )
    for name, evaluation in reversed((metrics.get("also") or {}).items()):
        text = f"(best {evaluation[name]:.4f} at step {evaluation['step']:.0f})"
        rows = [row for row in rows if row[0] != name]
        rows.insert(1, (name, f"{final[name]:.4f} {text}" if name in final else text))
    if metrics.get("evaluated"):
        rows.append(("evaluated", metrics["evaluated"]))
    pace = (
        f"{timings['step_ms']:.1f} ms per step, including evaluation"
        if summary["steps"]
        else "an evaluation"
    )
    rows.append(("steps", f"{summary['steps']} in {timings['training_s']:.1f} s ({pace})"))
    if summary.get("stopped_early"):
        rows.append(("stopped early", summary["stopped_early"]))
    run_root = folder.path.parents[1]
    run = shlex.quote(str(folder.path))
    # In the default run root, commands find a run by its name
    if run_root == Path("runs"):
        namesakes = list(run_root.glob(f"*/{folder.path.name}/config.yaml"))
        run = (
            folder.path.name
            if len(namesakes) < 2
            else shlex.quote(f"{folder.path.parent.name}/{folder.path.name}")
        )
    commands = [
        f"samewise eval {run}",
        *([f"samewise predict {run} FILE"] if summary.get("predicts", True) else []),
        *([ui_command(uri, run_root)] if uri else []),
        *(
            [f"tensorboard --logdir {shlex.quote(str(run_root))}"]
            if (folder.path / "tensorboard").is_dir()
            else []
        ),
        # wandb makes a folder for each process that trains
        *(
            [f"wandb sync {shlex.quote(str(folder.path))}/wandb/offline-run-*"]
            if any(folder.path.glob("wandb/offline-run-*"))
            else []
        ),
    ]
    return [
        *rows,
        ("folder", str(folder.path)),
        *zip(("next", *[""] * len(commands)), commands, strict=False),
    ]


def ui_command(uri: str, run_root: Path) -> str:
    """Return the shortest command that opens the store."""
    if uri != f"sqlite:///{run_root}/mlflow.db":
        return f"samewise ui --uri {shlex.quote(uri)}"
    return (
        "samewise ui"
        if run_root == Path("runs")
        else f"samewise ui --run-root {shlex.quote(str(run_root))}"
    )


LEVELS = {
    "none": "none: this run may not give the same bits again",
    "R0": "R0: the same command on the same machine gives the same bits",
    "R1": "R1: the same bits when run again, killed and resumed, with any number of workers",
    "R2": "R2: the same bits also on any number of ranks that can share the replicas",
    "R3": "R3: the same bits also on another x86-64-v3 CPU",
}
