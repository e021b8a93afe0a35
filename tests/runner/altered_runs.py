"""Runs whose record is altered, as if by somebody who knows its format."""

import hashlib
import json
import re
from pathlib import Path

import torch
from samewise_tiny import DIGITS

from samewise.runner.cli import main
from samewise.runner.records.digest import combine

TINY = [*DIGITS, "model.width=8", "max_steps=12", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]


def recorded_in(root: Path) -> Path:
    """The folder of a run of twelve steps below a root."""
    assert main(["train", *TINY, f"run_root={root}"]) == 0
    (folder,) = root.glob("*/*/")
    return folder


def flip_a_bit_and_correct_the_hash(folder: Path) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    state["model"]["fc.weight"].view(torch.int32)[0, 0] ^= 1
    torch.save(state, folder / "state.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def forge(run: Path, step: int, **values: str) -> int:
    """Alter a line of the trace and recompute the chain, like somebody who knows the format; returns the number of lines."""
    head, *texts = (run / "trace.jsonl").read_text().splitlines()
    lines, chain = [json.loads(text) for text in texts], 0
    for line in lines:
        line |= values if line["step"] == step else {}
        chain = combine([chain, *(int(line[name], 16) for name in ("batch", "input", "gradients", "weights"))])
        line["chain"] = f"{chain:016x}"
    (run / "trace.jsonl").write_text("\n".join([head, *(json.dumps(line, separators=(",", ":")) for line in lines)]) + "\n")
    return len(lines)


def log_loss(run: Path, step: int, loss: float) -> None:
    """Alter the loss of a step among the logged metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    next(line for line in lines if line.get("step") == step)["metrics"]["train/loss"] = loss
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def rewrite_head(run: Path, **values: object) -> None:
    """Alter the head of a trace as if it had been written like that; None removes a key."""
    head, *lines = (run / "trace.jsonl").read_text().splitlines()
    kept = {key: value for key, value in {**json.loads(head), **values}.items() if value is not None}
    (run / "trace.jsonl").write_text("\n".join([json.dumps(kept), *lines]) + "\n")


def thin(run: Path, every: int) -> Path:
    """Keep every so many lines of a trace, as if it had been written with `trace.every_steps`."""
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"^(trace:\n(?:  .*\n)*?  every_steps: )\d+$", rf"\g<1>{every}", config, flags=re.MULTILINE))
    head, *lines = (run / "trace.jsonl").read_text().splitlines()
    (run / "trace.jsonl").write_text("\n".join([head, *lines[every - 1 :: every]]) + "\n")
    forge(run, 0)
    rewrite_head(run)
    return run
