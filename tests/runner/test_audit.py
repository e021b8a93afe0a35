"""`samewise verify --audit` replays parts of a run, and names what was forged, however consistently the rest was adjusted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_drops import DROPS

from samewise.runner.records.digest import combine, state_sha256, tensor_digests

PACKAGE = "lab_of_audits"
LAB = (
    DROPS
    + """
import time
from pathlib import Path

import torch
from torch import nn

from samewise.runner.interfaces import Callback

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, pixels):
        return self.last(self.norm(self.first(pixels.flatten(1))).relu())

class Shifted(Net):
    # its evaluation depends on a file, or on the clock

    def forward(self, pixels):
        shift = Path("shift").read_text()
        return super().forward(pixels if self.training else pixels + (time.perf_counter() % 1 if shift == "clock" else float(shift)))

NETS = []

class Listed(Net):
    def __init__(self):
        super().__init__()
        NETS[:] = [self]

class Pokes(Callback):
    # changes a weight after the tenth step

    def on_step(self, run, outcome):
        if outcome.step == 10:
            with torch.no_grad():
                NETS[0].last.bias[0] += 0.5
"""
)
TINY = [
    *("dataset=digits", "transforms=images", "debug=tiny", "tracking=none", "evaluate.pictures=false", "callbacks=ema", "name=audited"),
    *("~model", "+model={_target_: lab_of_audits.Net}", "optimizer=sgd", "optimizer.momentum=0.9", "evaluate.limit=2", "optimizer.lr=0.01"),
    *("~scheduler", "+scheduler={_target_: lab_of_audits.Drops, drops_at: 10000, momentum: 0.5}"),
]
SHORT = ["max_steps=20", "checkpoint.every_steps=10", "evaluate.every_steps=10"]
HUNDRED = ["max_steps=100", "checkpoint.every_steps=10", "checkpoint.keep_every_steps=10", "evaluate.every_steps=10"]


def enter(folder: Path) -> None:
    (folder / f"{PACKAGE}.py").write_text(LAB)
    (folder / "pyproject.toml").write_text(f'[tool.samewise]\npackages = ["{PACKAGE}"]\n')
    os.chdir(folder)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    from samewise.runner.cli import main

    place, before = tmp_path_factory.mktemp("lab"), Path.cwd()
    enter(place)

    def run(name: str, *more: str) -> Path:
        assert main(["train", *TINY, f"run_root={place / name}", *more]) == 0
        (folder,) = place.glob(f"{name}/*/*/")
        return folder

    yield run
    os.chdir(before)
    sys.path[:] = [path for path in sys.path if Path(path) != place]
    sys.modules.pop(PACKAGE, None)


@pytest.fixture(scope="module")
def honest(train: Callable[..., Path]) -> Path:
    return train("honest", *HUNDRED)


@pytest.fixture(scope="module")
def dishonest(train: Callable[..., Path]) -> Path:
    """Trained with another momentum from step 33 on."""
    return train("dishonest", *HUNDRED, "scheduler.drops_at=33")


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return copy_run(honest, tmp_path)


def copy_run(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / folder.parent.name / folder.name, symlinks=True))


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def forge(run: Path, *, line: tuple[int, dict[str, Any]] | None = None, states: dict[int, Callable[[dict[str, Any]], Any]] | None = None) -> None:
    """Alter a line of the trace and states of checkpoints, and make everything derived from them consistent: chain, hashes, digests and summary."""
    head, *texts = (run / "trace.jsonl").read_text().splitlines()
    lines, chain = {one["step"]: one for one in map(json.loads, texts)}, 0
    if line:
        lines[line[0]] |= line[1]
    for one in lines.values():
        chain = combine([chain, *(int(one[name], 16) for name in ("batch", "input", "gradients", "weights"))])
        one["chain"] = f"{chain:016x}"
    (run / "trace.jsonl").write_text("\n".join([head, *(json.dumps(one, separators=(",", ":")) for one in lines.values())]) + "\n")
    digests = {}
    for folder in sorted(run.glob("checkpoints/step-*")):
        step = int(folder.name.removeprefix("step-"))
        state = torch.load(folder / "state.pt", weights_only=True)
        (states or {}).get(step, lambda state: None)(state)
        state["trace"] = int(lines[step]["chain"], 16)
        torch.save(state, folder / "state.pt")
        digests[str(step)] = sha256 = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
        weights = f"{combine(tensor_digests(state['model'])):016x}"
        content = state_sha256({name: value for name, value in state.items() if name not in ("format", "seconds")})
        known = {"sha256": sha256, "weights": weights, "content": content, "metrics": state["metrics"]}
        rewrite(folder / "manifest.json", lambda manifest, known=known: manifest.update(known))
    trace = hashlib.sha256((run / "trace.jsonl").read_bytes()).hexdigest()
    rewrite(run / "summary.json", lambda summary: summary.update(trace_sha256=trace, checkpoints_sha256=digests))


def audit(samewise, run: Path, *given: str) -> dict[str, Any]:
    done = samewise("verify", run, "--audit", *(given or ("all",)), "--json", "--trust")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] == (done.returncode == 0)
    return found


def test_an_audit_of_an_honest_run_draws_its_parts_by_seed(samewise, run) -> None:
    found = audit(samewise, run, "3", "--audit-seed", "7")
    assert found["same"], found["said"]
    replayed = found["audit"]["replayed"]
    assert (len(replayed), found["audit"]["steps"], found["compared"]) == (3, 30, 30)
    assert sorted([*replayed, *found["audit"]["left"]]) == [[start + 1, start + 10] for start in range(0, 100, 10)]
    assert audit(samewise, run, "3", "--audit-seed", "7")["audit"]["replayed"] == replayed
    assert audit(samewise, run, "3", "--audit-seed", "8")["audit"]["replayed"] != replayed
    told = samewise("verify", run, "--audit", "9").stdout
    assert "audited: 9 of 10 segments, 90 of 100 steps (drawn with --audit-seed " in told
    assert "not audited: steps " in told


@pytest.mark.parametrize("stage", ["batch", "loss", "weights"])
def test_a_forged_line_of_the_trace_is_named_even_if_all_else_agrees(samewise, run, stage) -> None:
    forge(run, line=(47, {stage: "0x1.8p+0" if stage == "loss" else "0" * 16}))
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"]) == (47, stage)
    assert len(found["said"]) == 4, found["said"]
    assert f"step 47: the trace was altered ({stage})" in found["said"][0]


def test_a_forged_digest_of_a_layer_is_named(samewise, run) -> None:
    (text,) = (line for line in (run / "trace.jsonl").read_text().splitlines() if line.startswith('{"step":100,'))
    layers = json.loads(text)["layers"]
    forge(run, line=(100, {"layers": {**layers, "weights": "00000000" + layers["weights"][8:]}}))
    found = audit(samewise, run)
    words = "digests of single weights are not what training again gives, and that of all of them is; first in first.weight"
    assert found["said"][0] == f"step 100: the trace was altered (layers): {words}"
    assert (found["same"], found["parts"]["layer"]) == (False, "first.weight")


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[0] ^= 1


def test_a_forged_weight_is_named(samewise, run) -> None:
    def change(state):
        flip(state["model"]["last.weight"])

    forge(run, states={50: change})
    found = audit(samewise, run, "1", "--audit-seed", "1")
    assert any("step 50: step-00000050 was altered" in line and "first in last.weight" in line for line in found["said"]), found["said"]
    assert len(found["audit"]["replayed"]) <= 2
    with_line = f"{combine(tensor_digests(torch.load(run / 'checkpoints/step-00000050/state.pt', weights_only=True)['model'])):016x}"
    forge(run, line=(50, {"weights": with_line}))
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"]) == (50, "weights")
    assert all("step 51" not in line for line in found["said"]), found["said"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["momentum_buffer", "ema"])
def test_forged_optimizer_or_callback_state_is_named_at_its_checkpoint(samewise, run, where) -> None:
    def change(state):
        flip(state["callbacks"]["ema"]["averaged"]["norm.bias"] if where == "ema" else state["optimizers"]["train"]["state"][2]["momentum_buffer"])

    forge(run, states={30: change})
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"]) == (30, "checkpoint")
    named = "callbacks.ema: averaged: norm.bias" if where == "ema" else "the optimizer's momentum_buffer of norm.weight"
    assert found["parts"]["layer"] == named
    assert sum(line.startswith("step ") for line in found["said"]) == 1, found["said"]


def chosen_part(seed: int) -> int:
    from samewise.runner.verify.audit import Segment, choose

    parts = [Segment(start, start + 10, None) for start in range(0, 100, 10)]
    (part,) = choose(parts, 1, seed, [])
    return parts.index(part)


@pytest.mark.slow
def test_the_first_step_trained_with_another_momentum_is_named(samewise, honest, dishonest, tmp_path) -> None:
    run = copy_run(dishonest, tmp_path)
    shutil.copy(honest / "config.yaml", run / "config.yaml")  # what it claims to be trained with
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"], found["parts"]["layer"]) == (33, "weights", "first.weight")
    assert "the optimizer's momentum: 0.5 there, 0.9 here" in found["parts"]["reason"]
    assert "config.yaml is that of another experiment" in found["altered"][0]


@pytest.mark.parametrize("places", [pytest.param(("summary",), marks=pytest.mark.slow), ("summary", "journal", "states")])
def test_a_forged_metric_is_named(samewise, run, places) -> None:
    if "summary" in places:
        rewrite(run / "summary.json", lambda summary: summary["metrics"]["final"].update({"valid/accuracy": 0.999}))
    if "journal" in places:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line.get("step") == 100 and "valid/accuracy" in line["metrics"]:
                line["metrics"]["valid/accuracy"] = 0.999
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if "states" in places:
        forge(run, states={100: lambda state: state["metrics"].update({"valid/accuracy": 0.999})})
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"], found["parts"]["layer"]) == (100, "metric", "valid/accuracy")
    assert samewise("verify", run).returncode == 1


SAME = "not verified: the steps that were repeated have the same bits, but"


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        ("0.5", "their evaluation does not give what was recorded: the validation data or the evaluation's code have changed, or the record was altered"),
        ("clock", "their evaluation is random: evaluated twice here, the same weights give valid/loss "),
    ],
)
def test_nothing_is_called_altered_if_only_evaluations_differ(samewise, train, shift, words) -> None:
    Path("shift").write_text("0")
    run = train(f"shifted-{shift}", *SHORT, "model._target_=lab_of_audits.Shifted")
    Path("shift").write_text(shift)
    for said in (audit(samewise, run)["said"], samewise("verify", run).stdout.splitlines()):
        assert said[-1].startswith(f"{SAME} {words}"), said
        assert any(line.startswith("step 10: valid/loss was logged as ") for line in said)
        assert not any("was altered: " in line for line in said)


def test_weights_that_a_callback_changes_after_they_are_traced_are_not_an_alteration(samewise, train) -> None:
    run = train("poked", *SHORT, "model._target_=lab_of_audits.Listed", "+callbacks.pokes._target_=lab_of_audits.Pokes")
    words = "step 10: the weights in step-00000010 differ from those in the trace, and are those of a second training: a callback changes"
    assert words in samewise("verify", run).stdout
    found = audit(samewise, run)
    assert found["same"]
    assert found["said"][0].startswith(words)


def test_a_run_that_continues_another_is_audited_from_the_checkpoint_that_it_began_with(samewise, train, honest, tmp_path) -> None:
    start = Path(shutil.copytree(honest / "checkpoints/step-00000090", tmp_path / "step-00000090"))
    run = train("resumed", *SHORT, "max_steps=110", "max_epochs=1000", f"resume_from={start}")
    found = audit(samewise, run)
    assert found["same"], found["said"]
    assert found["audit"]["replayed"] == [[91, 100], [101, 110]]
    assert "cannot be audited: steps 1 to 90, which are those of the run that it continues" in found["said"]
    shutil.rmtree(start)
    found = audit(samewise, run)
    assert found["same"], found["said"]
    assert f"cannot be verified: the fingerprint of config.yaml; the checkpoint {start} (resume_from) is gone or does not fit" in found["said"]
    assert found["audit"]["replayed"] == [[101, 110]]
    assert "cannot be audited: steps 1 to 100, whose starting state is not kept here" in found["said"]


@pytest.mark.slow
def test_one_forged_step_of_a_thousand_is_found_by_replaying_at_most_two_parts(samewise, train, tmp_path) -> None:
    long = ["max_steps=1000", "checkpoint.every_steps=100", "checkpoint.keep_every_steps=100", "evaluate.every_steps=1000", "max_epochs=1000"]
    honest, other = train("thousand", *long), train("other", *long, "scheduler.drops_at=555")
    run = copy_run(other, tmp_path)
    shutil.copy(honest / "config.yaml", run / "config.yaml")
    seed = next(seed for seed in range(100) if chosen_part(seed) == 5)
    found = audit(samewise, run, "1", "--audit-seed", str(seed))
    assert (found["parts"]["step"], found["parts"]["layer"]) == (555, "first.weight")
    assert len(found["audit"]["replayed"]) <= 2
