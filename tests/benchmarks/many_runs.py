"""A run root with as many runs as wanted: copies of one that was trained, each with its own seed, learning rate, label and result.

python tests/benchmarks/many_runs.py FOLDER COUNT
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REDUCED = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=2", "evaluate.pictures=false", "callbacks=none", "tracking=none")


def train_template(root: Path, overrides: Sequence[str] = REDUCED) -> Path:
    """Train a reduced run and return its folder."""
    subprocess.run([sys.executable, "-m", "samewise", "train", *overrides, f"run_root={root}"], check=True, stdout=subprocess.DEVNULL)
    return next(root.glob("*/*/config.yaml")).parent


def copy_runs(template: Path, root: Path, count: int, *, first: int = 0, experiments: int = 10) -> list[Path]:
    """Add runs to a run root, spread over some experiments; files in which runs do not differ are hard links.

    Args:
        template: Folder of a finished run.
        root: The run root.
        count: Number of runs.
        first: Number of the first one, which decides its seed and its name: others are added with another.
        experiments: Number of folders that they are in.
    """
    shared = shutil.copytree(template, root / ".template", ignore=shutil.ignore_patterns("checkpoints", "artifacts"), dirs_exist_ok=True)
    config, summary = (shared / "config.yaml").read_text(), json.loads((shared / "summary.json").read_text())
    best, monitor = summary["metrics"]["best"], summary["metrics"]["monitor"]
    folders = []
    for number in range(first, first + count):
        folder = root / f"experiment_{number % experiments}" / hashlib.sha256(str(number).encode()).hexdigest()[:12]
        (folder / "checkpoints").mkdir(parents=True)
        learning_rate = (1 + number % 7) / 1000
        text = re.sub(r"^seed: \d+$", f"seed: {number}", config, flags=re.MULTILINE)
        text = re.sub(r"^(optimizer:\n(?:  .*\n)*?  lr: ).*$", rf"\g<1>{learning_rate}", text, flags=re.MULTILINE)
        (folder / "config.yaml").write_text(re.sub(r"^# label: .*$", f'# label: "lr={learning_rate} seed={number}"', text, flags=re.MULTILINE))
        result = {**summary["metrics"], "best": {**best, monitor: number % 1009 / 1009}}
        (folder / "summary.json").write_text(json.dumps({**summary, "metrics": result}, indent=2))
        for file in ("environment.json", "metrics.jsonl", "trace.jsonl", "tracking.json", ".lock", ".sending"):
            if (shared / file).exists():
                os.link(shared / file, folder / file)
        folders.append(folder)
    shutil.rmtree(shared)
    return folders


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        copy_runs(train_template(Path(place)), Path(sys.argv[1]), int(sys.argv[2]))
