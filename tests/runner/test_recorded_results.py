"""`samewise verify` compares all results in a run's folder: each difference is named with its key, step, recorded and recomputed value."""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_tiny import DIGITS

from samewise.runner.records.digest import state_sha256

TINY = [*DIGITS, "model.width=4", "max_steps=4", "checkpoint.every_steps=2", "callbacks=[default, ema]", "callbacks.ema.every_steps=1"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, f"run_root={root}"]) == 0
    (folder,) = root.glob("*/*/")
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.parent.name / original.name, symlinks=True))


def rewrite(file: Path, change: Callable[[Any], None]) -> Any:
    """Change a JSON file; returns its previous content."""
    before = json.loads(file.read_text())
    after = json.loads(file.read_text())
    change(after)
    file.write_text(json.dumps(after))
    return before


def rewrite_metrics(run: Path, change: Callable[[dict[int, dict[str, float]]], None]) -> None:
    """Change the metrics of each step in the journal, except the evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change({line["step"]: line["metrics"] for line in reversed(lines) if "step" in line})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def verify(samewise: Callable[..., Any], run: Path, *more: str) -> dict[str, Any]:
    done = samewise("verify", run, "--json", *more)
    assert done.returncode in (0, 1), done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["same"] == (done.returncode == 0)
    return verdict


def test_other_metrics_and_summary_values_are_named(samewise, run) -> None:
    rates = {}

    def forge(metrics: dict[int, dict[str, float]]) -> None:
        rates.update({step: metrics[step]["train/lr"] for step in (2, 3)})
        metrics[2]["train/lr"], metrics[3]["train/lr"], metrics[3]["train/top5"] = 0.5, 0.25, 1.0
        metrics[4]["speed/steps"] = 1e9

    rewrite_metrics(run, forge)
    summary = rewrite(
        run / "summary.json", lambda one: (one.update(epochs=7.5, stopped_early="it was perfect"), one["metrics"]["final"].update({"valid/top1": 1.0}))
    )
    verdict = verify(samewise, run)
    said = "\n".join(verdict["messages"])
    assert f"step 2: train/lr was logged as 0.5 and is {rates[2]!r} when computed again (and differs at 1 more step)" in said
    assert "step 3: train/top5 was logged as 1.0, and training again logs no train/top5 at this step" in said
    assert f"step 4: summary.json: epochs is recorded as 7.5, and is {summary['epochs']!r} when computed again" in said
    assert "step 4: summary.json: stopped_early is recorded as 'it was perfect', and there is none when computed again" in said
    assert "step 4: summary.json: metrics.final.valid/top1 is recorded as 1.0, and there is none when computed again" in said
    assert "speed/steps" not in said  # nothing can tell how fast it was then
    assert "metrics that measure the machine belong under speed/, time/, memory/, system/: these are not compared" in said
    assert "the same bits: 4 of 4 steps compared, weights" in said
    assert (verdict["same"], verdict["parts"]["step"], verdict["parts"]["layer"]) == (False, 2, "train/lr")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("optimizers", "train", "state", 0, "momentum_buffer"), "the optimizer's momentum_buffer of conv1.weight differs"),
        (("best", "valid/loss"), "best: valid/loss (0.5 there, "),
        (("callbacks", "ema", "averaged"), "callbacks.ema: averaged: conv1.weight differs"),
    ],
)
def test_another_state_in_a_checkpoint_is_named_though_all_digests_agree(samewise, run, names, words) -> None:
    folder = run / "checkpoints/step-00000002"
    state = torch.load(folder / "state.pt", weights_only=True)
    held = functools.reduce(getitem, names[:-1], state)
    value = held.get(names[-1])
    value = value["conv1.weight"] if isinstance(value, dict) else value
    if isinstance(value, torch.Tensor):
        value.view(-1)[0] += 1
    else:
        held[names[-1]] = 0.5
    torch.save(state, folder / "state.pt")
    sha256 = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    rewrite(folder / "manifest.json", lambda one: one.update(sha256=sha256))
    content = state_sha256({name: value for name, value in state.items() if name not in ("format", "seconds")})
    rewrite(folder / "manifest.json", lambda one: one.update(content=content))
    verdict = verify(samewise, run)
    assert not verdict["same"]
    assert any(one.startswith(f"step 2: step-00000002 has another state than training again: {words}") for one in verdict["messages"]), verdict["messages"]


def test_missing_metrics_are_named(samewise, run) -> None:
    (run / "metrics.jsonl").unlink()
    verdict = verify(samewise, run, "--steps", "1")
    assert verdict["same"]
    assert f"{run / 'metrics.jsonl'}: is missing: what the run logged was not compared" in verdict["messages"]
