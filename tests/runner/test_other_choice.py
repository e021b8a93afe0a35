"""An experiment's settings for a choice that the command line replaces: what does not fit is left out, what fits stays, and both are reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from samewise.runner.config.check import problems
from samewise.runner.config.compose import Composed, compose
from samewise.runner.config.project import Project

BASE = """# @package _global_
defaults:
  - override /loss: focal
  - override /model: resnet20_cifar
  - override /optimizer: sgd
  - override /scheduler: warmup_cosine
  - override /param_groups: no_decay_on_norms
  - override /callbacks: [default, ema]
  - _self_
model: {width: 4}
recipe: {loss: {gamma: 1.0}}
optimizer: {lr: 0.2, nesterov: true}
scheduler:
  schedules:
    warmup: {duration: 1}
    decay: {eta_min: 0.01}
callbacks: {ema: {decay: 0.9}}
param_groups: {norms: {weight_decay: 0.1}}
transforms: {size: 9}
"""
DERIVED = "# @package _global_\ndefaults:\n  - base\n  - override /optimizer: adamw\n  - _self_\noptimizer: {betas: [0.8, 0.9]}\n"
WRONG = DERIVED.replace("betas: [0.8, 0.9]", "dampening: 0.1")
TWO = """# @package _global_
defaults:
  - /optimizer@optimizer.a: adam
  - /optimizer@optimizer.b: adam
  - override /optimizer: null
  - _self_
optimizer: {a: {betas: [0.5, 0.9]}}
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "experiment").mkdir()
    for name, text in {"base": BASE, "derived": DERIVED, "wrong": WRONG, "two": TWO}.items():
        (folder / "experiment" / f"{name}.yaml").write_text(text)
    return Project(folder, configs=(folder,))


def warnings_of(composed: Composed) -> list[str]:
    return [f"{one.where.rpartition('/')[2]}: {one.path}: {one.message}" for one in composed.cautions]


def test_settings_that_another_choice_does_not_take_are_left_out_with_one_line_each(mine: Project) -> None:
    composed = compose(["experiment=resnet18_digits", "optimizer=adamw", "scheduler=cosine"], project=mine)
    assert problems(composed, mine) == []
    experiment = "experiment=resnet18_digits sets"
    assert warnings_of(composed) == [
        "resnet18_digits.yaml:27: optimizer: adamw keeps lr=0.1 and weight_decay=0.0005, which experiment=resnet18_digits sets for sgd",
        f"resnet18_digits.yaml:28: optimizer: momentum and nesterov are left out: {experiment} them for sgd, and adamw does not set them",
        f"resnet18_digits.yaml:32: scheduler: cycle_momentum and pct_start are left out: {experiment} them for one_cycle, and cosine does not set them",
    ]
    assert composed.cautions[0].hint == "keep them, or set adamw's own values: optimizer.lr=0.001 optimizer.weight_decay=0.01"
    by_hand = ["~optimizer.momentum", "~optimizer.nesterov", "~scheduler.pct_start", "~scheduler.cycle_momentum"]
    same = compose(["experiment=resnet18_digits", "optimizer=adamw", "scheduler=cosine", *by_hand], project=mine)
    assert composed.fingerprint == same.fingerprint
    assert [one.path for one in same.cautions] == ["optimizer"]


def test_settings_that_another_choice_has_no_use_for_are_not_named(mine: Project) -> None:
    (caution,) = compose(["experiment=resnet_cifar10", "dataset=shards"], project=mine).cautions
    assert "shards keeps image_size=32, mean=[0.4914,0.4822,0.4465] and std=[0.247,0.2435,0.2616], which" in caution.message


def test_an_experiment_that_builds_on_another_may_choose_another_component(mine: Project) -> None:
    composed = compose(["experiment=derived"], project=mine)
    assert composed.cfg.optimizer.betas == [0.8, 0.9]
    assert "nesterov" not in composed.cfg.optimizer
    left_out = "optimizer: nesterov is left out: experiment=base sets it for sgd, and adamw does not set it"
    assert warnings_of(composed) == [f"base.yaml:12: {left_out}"]
    assert problems(composed, mine) == []


IN_A_NEW_PROCESS = """
import os, sys
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from pathlib import Path
before = dict(os.environ)
compose(["experiment=resnet18_digits", "reproducibility=portable", "optimizer=adamw"], project=Project(Path.cwd()))
assert "torch" not in sys.modules
assert before == dict(os.environ)
"""


def test_composing_imports_no_component_and_sets_no_variable(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
