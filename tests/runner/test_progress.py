"""What is printed while a run trains, without a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samewise.runner.callbacks import progress

TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=[progress]"]

RUN: Any = SimpleNamespace(
    is_main=True,
    step=0,
    label="a",
    folder="b",
    device="cpu",
    parameters=1,
    samples=1,
    total_steps=200,
    batch_size=1,
    steps_per_epoch=200,
    max_epochs=1,
    left_out="",
)


def take(bar: progress.ProgressBar, steps: Iterable[int], now: list[float], step_s: float) -> None:
    for step in steps:
        now[0] += step_s
        outcome: Any = SimpleNamespace(step=step, losses={"loss": 1.0})
        bar.on_step(RUN, outcome)


def test_a_run_reports_what_it_trains_its_progress_and_its_expected_end(samewise, tmp_path) -> None:
    done = samewise("train", *TINY, "optimizer.lr=0.03", "seed=1", "+callbacks.progress.line_s=0", f"run_root={tmp_path}")
    assert done.returncode == 0, done.stderr
    name, folder, size, *lines = done.stderr.splitlines()
    assert name == "resnet18_digits  debug=tiny width=4 callbacks=[progress] lr=0.03 seed=1"
    assert folder.startswith(f"  {tmp_path}/resnet18_digits/")
    assert folder.endswith(" on cpu")
    (state,) = tmp_path.glob("*/*/checkpoints/step-00000020/state.pt")
    weights = torch.load(state, weights_only=True)["model"]
    learned = sum(tensor.numel() for name, tensor in weights.items() if name.rpartition(".")[2] in ("weight", "bias"))
    assert size == f"  {learned:,} parameters, 64 samples, 20 steps of 16 samples, 4 per epoch"
    told = [re.match(r"epoch \d+/\d+  step (\d+) of 20  loss \d+\.\d{4}  accuracy [01]\.\d{4}  \S+ steps/s, ends at about \d\d:\d\d", line) for line in lines]
    assert [int(match[1]) for match in told if match] == list(range(1, 21))


@pytest.mark.parametrize(("step_s", "expected"), [(1.0, [11, 72, 133, 194]), (0.04, [])])
def test_without_a_terminal_progress_is_reported_after_ten_seconds_and_each_minute(
    monkeypatch: pytest.MonkeyPatch, capfd, step_s: float, expected: list[int]
) -> None:
    """A short run prints nothing between its evaluations."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.ProgressBar()
    bar.on_start(RUN)
    take(bar, range(1, 201), now, step_s)
    told = [int(found) for found in re.findall(r"step (\d+) of 200 .* ends at about", capfd.readouterr().err)]
    assert told == expected


def test_the_final_output_has_results_first_and_the_digest_last(samewise, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = samewise("train", *TINY, "max_steps=8")
    summary = json.loads(next(tmp_path.glob("runs/*/*/summary.json")).read_text())
    folder = next(tmp_path.glob("runs/*/*/")).relative_to(tmp_path)
    head, first, *rest = done.stdout.splitlines()
    final, best = summary["metrics"]["final"], summary["metrics"]["best"]
    assert head == "finished"
    accuracy = "valid/accuracy"
    assert first.split() == [accuracy, f"{final[accuracy]:.4f}", "(best", f"{best[accuracy]:.4f}", "at", "step", f"{best['step']:.0f})"]
    assert [line.split()[0] for line in rest[:-1]] == ["valid/loss", "valid/accuracy_top5", "steps", "folder", "next", "samewise"]
    assert rest[-4].split() == ["folder", str(folder)]
    assert [line.removeprefix("  next").strip() for line in rest[-3:-1]] == [f"samewise eval {folder.name}", f"samewise predict {folder.name} FILE"]
    assert rest[-1].startswith("  R2: ")
    assert rest[-1].endswith(f"weights sha256 {summary['weights_sha256']} (step 8)")
