"""Digests of every experiment's composed config, and of what it trains to when reduced: `python tests/kept/kept.py` writes them to kept.json.

Entries from other kinds of machine stay; if there is none for this machine, the tests of bits are skipped. Write new digests only with a
change that is meant to alter a config or a result, drop those of machines that are not available, and say why in CHANGELOG.md.
"""

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
SMALLER = {
    "airbench_cifar10": ["model.widths=[16,32,32]"],
    "fcn_coco": ["model=deeplabv3_mobilenet_v3_large", "max_steps=4"],
    "maskrcnn_coco": ["model=maskrcnn_resnet18", "batch_size=8", "max_steps=2"],
    "maskrcnn_digit_masks": ["batch_size=4", "max_steps=2"],
    "deeplabv3_coco": ["model=deeplabv3_mobilenet_v3_large", "max_steps=4"],
}
"""Further overrides: the full width, without instructions for bfloat16, and dilated ResNets take minutes."""


def shown(experiment: str) -> str:
    """The SHA-256 of what `samewise show` prints."""
    from samewise.runner.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["show", f"experiment={experiment}"]) == 0
    return hashlib.sha256(said.getvalue().encode()).hexdigest()


def command(experiment: str, root: str | Path) -> list[str]:
    """The words after `samewise` that train an experiment, reduced, below `root`."""
    return ["train", f"experiment={experiment}", "debug=tiny", "tracking=none", "evaluate.pictures=false", *SMALLER.get(experiment, []), f"run_root={root}"]


def reduced(root: Path) -> tuple[str, dict[str, str]]:
    """The fingerprint of the only run below `root`, and the digests of its results."""
    (folder,) = root.glob("*/*")
    summary = json.loads((folder / "summary.json").read_text())
    head, lines = (folder / "trace.jsonl").read_bytes().split(b"\n", 1)
    known = {key: value for key, value in json.loads(head).items() if key != "initial"}  # which the first traces did not have
    trace = hashlib.sha256(json.dumps(known, separators=(",", ":")).encode() + b"\n" + lines).hexdigest()
    return summary["fingerprint"], {"weights_sha256": summary["weights_sha256"], "trace": trace}


def trained_here(kept: dict[str, Any], root: Path) -> dict[str, dict[str, str]] | None:
    """The digests by experiment for the kind of machine that trained the only run below `root`; None: there are none."""
    return next((one["experiments"] for one in kept["trained"] if one["machine"] == machine(root)), None)


def machine(root: Path) -> dict[str, Any]:
    """What decides the bits of the only run below `root`, apart from its data and optimizers."""
    (environment,) = root.glob("*/*/environment.json")
    return {name: value for name, value in json.loads(environment.read_text())["decides"].items() if not name.startswith(("data.", "optimizers."))}


def main() -> None:
    """Train all experiments, reduced, and record their digests."""
    from samewise.runner.cli import main as samewise

    kept: dict[str, Any] = json.loads(FILE.read_text())
    kept["show"] = {experiment: shown(experiment) for experiment in EXPERIMENTS}
    here: dict[str, Any] = {"experiments": {}}
    for experiment in EXPERIMENTS:
        with tempfile.TemporaryDirectory() as root:
            assert samewise(command(experiment, root)) == 0
            here = {"machine": machine(Path(root)), "experiments": here["experiments"]}
            kept["fingerprints"][experiment], here["experiments"][experiment] = reduced(Path(root))
    kept["trained"] = [*(one for one in kept["trained"] if one["machine"] != here["machine"]), here]
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
