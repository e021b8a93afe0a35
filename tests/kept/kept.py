"""What every experiment composes to and what it trains to when reduced, as digests: `python tests/kept/kept.py` writes kept.json anew.

Do so only with a change that is meant to alter a config or a result, and say in CHANGELOG.md why.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("kept.json")
EXPERIMENTS = sorted(file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml"))


def shown(experiment: str) -> str:
    """The SHA-256 of what `samewise show` prints."""
    from samewise.runner.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["show", f"experiment={experiment}"]) == 0
    return hashlib.sha256(said.getvalue().encode()).hexdigest()


def reduced(root: Path) -> dict[str, Any]:
    """What the one run below `root` came to."""
    (folder,) = root.glob("*/*")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "fingerprint": summary["fingerprint"],
        "weights_sha256": summary["weights_sha256"],
        "trace": hashlib.sha256((folder / "trace.jsonl").read_bytes()).hexdigest(),
    }


def machine(root: Path) -> dict[str, Any]:
    """What decides the bits of the one run below `root`, beside its data and optimizers."""
    (environment,) = root.glob("*/*/environment.json")
    return {name: value for name, value in json.loads(environment.read_text())["decides"].items() if not name.startswith(("data.", "optimizers."))}


def main() -> None:
    """Train all experiments, reduced, and write down what they came to."""
    from samewise.runner.cli import main as samewise

    written: dict[str, Any] = {}
    for experiment in EXPERIMENTS:
        with tempfile.TemporaryDirectory() as root:
            assert samewise(["train", f"experiment={experiment}", "debug=tiny", "tracking=none", "evaluate.pictures=false", f"run_root={root}"]) == 0
            written |= {"machine": machine(Path(root)), experiment: {"show": shown(experiment), "reduced": reduced(Path(root))}}
    FILE.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
