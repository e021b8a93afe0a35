"""The comparison of resumed runs finds what it should: faults planted in the restored state, each named by its path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samewise_runner_resuming import Seen, at_once, composed, cut, first_difference, stopped, trained
from samewise_runner_resuming_space import TINY

from samewise.runner.config.compose import Composed
from samewise.runner.data.keyed import training_keys
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.training import batches, resuming
from samewise.runner.training.run import Run


class Counting(Callback):
    """Has state that its state_dict lacks."""

    def __init__(self) -> None:
        self.seen = {"steps": [0]}

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        self.seen["steps"][0] += 1


RICH = ["callbacks=[ema,early_stopping]", "evaluate.every_steps=1"]
RICH += ["callbacks.early_stopping.min_delta=9", "scheduler=plateau", "scheduler.patience=3", "scheduler.threshold=10.0", "optimizer=adamw", "replicas=2"]
RICH += ["precision=fp16", "precision.initial_scale=64", "precision.growth_interval=2", "memory_format=channels_last", "initialise.frozen=[3.*]", "max_steps=4"]
RICH += ["checkpoint.keep_every_steps=1"]
"""As many settings as possible whose state must be restored."""


def optimizer_states(run: Run) -> list[dict[str, Any]]:
    return [*run.phases[0].optimizer.state.values()]


def set_strides(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data.contiguous()


def share_a_moment(run: Run) -> None:
    first, second, *_ = (state for state in optimizer_states(run) if state["exp_avg"].shape == (4,))
    first["exp_avg"] = second["exp_avg"]


FAULTS = {
    "an average begun anew": (lambda run: run.callbacks["ema"]._averaged.load_state_dict(run.model.state_dict()), "callbacks['ema']._averaged._modules['0']"),
    "patience begun anew": (lambda run: vars(run.callbacks["early_stopping"]).update(_waited=0), "callbacks['early_stopping']._waited: 1 and 0"),
    "a plateau forgotten": (lambda run: vars(run.schedule).update(bad=0), ".schedule.bad: 2 and 0"),
    "the first loss scale": (lambda run: run.precision.begin(run.strategy.device), ".precision._scaler.state_dict()['scale']"),
    "a counter of steps that lost one": (lambda run: optimizer_states(run)[0]["step"].sub_(1), "['step']"),
    "a counter of another dtype": (lambda run: optimizer_states(run)[0].update(step=optimizer_states(run)[0]["step"].double()), "['step']"),
    "a moment rounded": (lambda run: optimizer_states(run)[-1].update(exp_avg_sq=optimizer_states(run)[-1]["exp_avg_sq"].bfloat16().float()), "['exp_avg_sq']"),
    "two moments in one": (share_a_moment, "['exp_avg']: "),
    "another learning rate": (lambda run: run.phases[0].optimizer.param_groups[0].update(lr=0.5), ".param_groups[0]['lr']"),
    "statistics of batch norm forgotten": (lambda run: run.model[1].reset_running_stats(), "['1']._buffers['running_mean']"),
    "frozen weights thawed": (lambda run: run.model.requires_grad_(True), "_modules['3']._parameters['weight']"),
    "weights that lie otherwise": (set_strides, "_modules['0']._parameters['weight']"),
    "a layer left in evaluation": (lambda run: run.model[5].eval(), "['5'].training: True and False"),
    "the best forgotten": (lambda run: run.progress.best.clear(), ".best['valid/loss']"),
    "another order": (lambda run: vars(run.order).update(_seed=1), "_seed: 0 and 1"),
    "another cut of it": (lambda run: vars(run).update(plan=replace(run.plan, samples=31)), ".plan.samples: 32 and 31"),
}


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> tuple[Composed, Path, Seen]:
    config, folder = composed(*TINY, *RICH), tmp_path_factory.mktemp("rich") / "whole"
    return config, folder, trained(config, folder)


def test_without_a_fault_nothing_is_lost(rich, tmp_path):
    config, folder, whole = rich
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    assert [*part.moments] == [("begins", 2), ("stepped", 3), ("evaluated", 3)]
    assert first_difference(whole, part) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(rich, tmp_path, monkeypatch, name):
    (config, folder, whole), (fault, path), restore = rich, FAULTS[name], resuming.restore
    monkeypatch.setattr(resuming, "restore", lambda run, state: (restore(run, state), fault(run)))
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    found = first_difference(whole, part)
    assert found is not None
    assert found.startswith("begins at step 2: ")
    assert path in found


def test_a_shifted_order_is_found_by_the_next_batch(rich, tmp_path, monkeypatch):
    config, folder, whole = rich
    monkeypatch.setattr(batches, "training_keys", lambda *args, first_step, **settings: training_keys(*args, first_step=first_step + 1, **settings))
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    assert first_difference(whole, part).startswith("begins at step 2: ['given'][0].batch['image']: ")


def test_state_that_a_callback_does_not_save_is_found_and_named(tmp_path):
    config = composed(*TINY)
    whole, pieces = (
        trained(config, tmp_path / name, before_step=before_step, prepare=lambda run: run.callbacks.update(counting=Counting()))
        for name, before_step in {"whole": at_once, "pieces": stopped}.items()
    )
    assert first_difference(whole, pieces) == "begins at step 1: ['run'].recorder.callbacks['counting'].seen['steps'][0]: 1 and 0"
