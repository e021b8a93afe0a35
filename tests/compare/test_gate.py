"""`samewise gate`: what is accepted, and the ledger that counts the tries."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from samewise_runner_lab_of_code import EXPERIMENT, at_work_in, edit, trainer
from scipy.special import expit

from samewise.runner import paired
from samewise.runner.compare.gate import judge
from samewise.runner.compare.ledger import Ledger
from samewise.runner.errors import DamagedFile

MOMENTUM = (
    [0.9268, 0.9465, 0.9577, 0.9437, 0.9634, 0.9239, 0.8817, 0.9550, 0.9296, 0.9521, 0.9380, 0.9437],
    [0.9099, 0.9211, 0.9268, 0.8789, 0.9042, 0.9155, 0.8761, 0.9211, 0.9239, 0.9324, 0.9211, 0.8930],
)
"""Accuracy of the digits' ResNet with momentum 0.9 and 0, by seed: docs/comparing.md has the command."""


@dataclass
class Recorded:
    """A setting whose runs have known values, in place of `sides.Side`: no folders, and a training looks its value up."""

    name: str
    root: Path
    accuracies: Sequence[float]
    trained: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = SimpleNamespace(monitor="valid/accuracy", mode=SimpleNamespace(value="max"), also={})
        self.key, self.place = self.name, SimpleNamespace(run_root=self.root)
        self.config = SimpleNamespace(cfg=SimpleNamespace(evaluate=settings))

    def folders(self) -> dict[int, Any]:
        return {}

    def values(self) -> dict[int, Mapping[str, float]]:
        return {seed: {"valid/accuracy": self.accuracies[seed], "steps": 1.0} for seed in sorted(self.trained)}

    def train(self, seeds: Sequence[int]) -> None:
        self.trained |= {*seeds}


def ask(first: Recorded, second: Recorded, **options: Any) -> Any:
    return judge(first, second, **options)  # pyright: ignore[reportArgumentType]


def test_an_improvement_is_accepted_and_the_hundredth_try_must_show_more(tmp_path: Path) -> None:
    with_momentum, without = (Recorded(name, tmp_path / "first", x) for name, x in zip(("0.9", "0"), MOMENTUM, strict=True))
    verdict = ask(with_momentum, without, seeds=12)
    assert (verdict.accepted, *(verdict.ledger[x] for x in ("verdict", "try", "level"))) == (True, "better", 1, 0.025)
    assert verdict.sentence.startswith("valid/accuracy: 0.9 is 2.8 points better than 0, ")
    assert ask(without, with_momentum).ledger["verdict"] == "worse"
    ledger = Ledger(tmp_path / "late")
    for number in range(99):
        ledger.record(f"question {number}", "begun", claims=True)
    late = [Recorded(x.name, tmp_path / "late", x.accuracies) for x in (with_momentum, without)]
    verdict = ask(*late, seeds=12)
    assert (verdict.accepted, *(verdict.ledger[x] for x in ("verdict", "try", "level"))) == (False, "not distinguishable", 100, 0.05 / 10100)
    assert f"about {verdict.comparison.more} more would settle it" in verdict.sentence


def test_a_question_asked_again_goes_on_and_another_one_is_the_next_try(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sides = [Recorded(str(number), tmp_path, rng.normal(0.9, 0.01, 20)) for number in range(3)]
    numbers = [
        ask(sides[x], sides[0], **options).ledger["try"] for x, options in ((1, {"seeds": 3}), (2, {"until": 0.01, "seeds": 5}), (1, {"budget": 4}), (1, {}))
    ]
    assert numbers == [1, 2, 1, 1]
    lines, last = Ledger(tmp_path).read()
    assert [line["pairs"] for line in lines if line["verdict"] != "begun"] == [3, 5, 6, 6]
    # The digest that a verdict states is that of the whole file, by its last line
    text = (tmp_path / "gate.jsonl").read_bytes()
    assert hashlib.sha256(text.splitlines(keepends=True)[-1]).hexdigest() == last
    # A process that died as it wrote has shown no verdict
    (tmp_path / "gate.jsonl").write_bytes(text + b'{"before": ')
    assert ask(sides[2], sides[1], seeds=3).ledger["try"] == 3


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda lines: [line.replace(b'"try": 2', b'"try": 1') for line in lines], "line 4 does not follow"),
        (lambda lines: lines[:2] + lines[4:], "line 3 does not follow"),
        (lambda lines: lines[2:], "line 1 does not follow"),
        (lambda lines: lines[:4], "line 6 is not the one that was written"),
        (lambda lines: [], "line 6 is not the one that was written"),
        (lambda lines: [*lines[:5], lines[5].replace(b"worse", b"better")], "line 6 is not the one that was written"),
        (lambda lines: [b"[]\n", *lines[1:]], "line 1 is a list, not a mapping"),
        (lambda lines: [b"{\n", *lines[1:]], "line 1: it is not JSON"),
    ],
)
def test_a_rewritten_ledger_is_named(rewrite: Callable[[list[bytes]], list[bytes]], message: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(3):
        ledger.record(f"question {number}", "begun", claims=True)
        ledger.record(f"question {number}", "worse", claims=True)
    ledger.file.write_bytes(b"".join(rewrite(ledger.file.read_bytes().splitlines(keepends=True))))
    sides = [Recorded(name, tmp_path, [0.9] * 20) for name in "ab"]
    with pytest.raises(DamagedFile, match=message):
        ask(*sides, seeds=3)
    assert not sides[0].trained


def _loop(root: Path, seed: int, tries: int, **options: Any) -> tuple[int, int]:
    """Propose changes that do nothing, and keep what is accepted; return how many, and how many an uncounted level of 5 % would accept."""
    rng, accepted, uncounted = np.random.default_rng(seed), 0, 0

    def draw(number: int) -> Recorded:
        # Near the upper bound, skewed, of few samples
        shares = expit(3 + rng.normal(0, 0.3, 20))
        return Recorded(f"lr={number}", root, rng.binomial(360, shares) / 360)

    best = draw(0)
    for number in range(1, tries + 1):
        proposal = draw(number)
        verdict = ask(proposal, best, **options)
        uncounted += paired.estimate(*np.array(verdict.comparison.values).T).sign > 0
        assert verdict.ledger["try"] == number
        accepted, best = (accepted + 1, proposal) if verdict.accepted else (accepted, best)
    return accepted, uncounted


@pytest.mark.slow
def test_a_greedy_loop_of_a_hundred_tries_that_change_nothing_ends_with_at_most_one_accepted(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"seeds": 5}, {"until": 0.01, "seeds": 5}]
    results = [_loop(tmp_path / f"{number}", number, 100, **options[number]) for number in range(2)]
    accepted, uncounted = zip(*results, strict=True)
    assert max(accepted) <= 1
    assert sum(uncounted) >= 2


@pytest.mark.slow
def test_changed_code_is_accepted_with_the_same_bits_and_other_bits_must_be_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]
) -> None:
    with at_work_in(tmp_path / "project", monkeypatch) as lab:
        train, file = trainer(samewise, tmp_path / "runs"), lab / "lab_of_code/parts/layers.py"
        assert train("name=base").returncode == 0
        edit(file, "nn.Linear(WIDTH, 10)", "nn.Linear(out_features=10, in_features=WIDTH)")
        assert train("name=refactored").returncode == 0
        edit(file, "nn.ReLU()", "nn.Tanh()")
        assert train("name=changed").returncode == 0
    base, refactored, changed = (next((tmp_path / "runs" / name).iterdir()) for name in ("base", "refactored", "changed"))
    monkeypatch.chdir(tmp_path)
    result = json.loads(samewise("gate", refactored, base, "--json", code=0).stdout)
    assert (result["accepted"], result["ledger"]["verdict"], result["ledger"]["try"], result["comparison"]) == (True, "same bits", 0, None)
    done = samewise("gate", changed, base, "--out", "page", code=1).stdout
    assert done.startswith("not accepted: not distinguishable\n")
    assert f"the bits differ: samewise diff runs/changed/{changed.name} runs/base/{base.name}" in done
    page = Path("page/gate.md").read_text()
    assert page.startswith("# not accepted: not distinguishable\n")
    assert all(line in page for line in (done.splitlines()[1], Ledger(Path("runs")).read()[1]))
    Path("runs/gate.jsonl").unlink()
    assert "runs/gate.jsonl: was rewritten: line 3 is not the one that was written" in samewise("gate", refactored, base, code=2).stderr


@pytest.mark.slow
def test_the_workflow_to_copy_accepts_a_refactoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    """Its shell steps, in a clone with a commit more than its base."""
    job = yaml.safe_load((repository / "docs/examples/agents/gate.yml").read_text())["jobs"]["gate"]
    steps = {step["name"]: step["run"] for step in job["steps"] if "name" in step}
    with at_work_in(tmp_path / "project", monkeypatch) as lab:

        def commit() -> str:
            identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
            for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "change")):
                subprocess.run(["git", *words], check=True)
            return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

        base = commit()
        edit(lab / "lab_of_code/parts/layers.py", "nn.Linear(WIDTH, 10)", "nn.Linear(out_features=10, in_features=WIDTH)")
        variables = {"BASE": base, "PROPOSAL": commit(), "OVERRIDES": " ".join(EXPERIMENT), "SEEDS": "0,1", "GITHUB_WORKSPACE": str(lab)}
        for name in ("train", "gate"):
            script = f'set -e; samewise() {{ {shlex.quote(sys.executable)} -m samewise "$@"; }}\n{steps[name]}'
            subprocess.run(["bash", "-c", script], check=True, env={**os.environ, **variables})
    page = (lab / "gate/gate.md").read_text()
    assert page.startswith("# accepted: same bits\n")
    assert "have the same bits in 2 pairs" in page
