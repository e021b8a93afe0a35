"""Several optimizers in a step, with a small GAN: its bits, and that each phase only computes what it trains."""

import json
import random
from copy import deepcopy
from pathlib import Path

import pytest
import samewise_runner_jobs as jobs
import samewise_runner_promise as promise
import torch
from torch.nn.functional import softplus

from samewise.recipes.adversarial import GenerativeAdversarial
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.interfaces import Phase
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace_reader import read_trace
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.state import restore, state_of
from samewise.runner.verify.step_inspection import inspect_step

GAN = ["experiment=gan_digits", "debug=tiny", "tracking=none", "evaluate.pictures=false", "max_steps=12"]
SAVED = "checkpoint.every_steps=3"


def train(samewise, run_root: Path, *overrides: str) -> Path:
    done = samewise("train", *GAN, SAVED, f"run_root={run_root}", *overrides, "--json", code=0)
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


@pytest.mark.slow
def test_a_second_run_and_a_killed_and_resumed_one_have_the_same_bits(samewise, tmp_path):
    reference = train(samewise, tmp_path / "reference")
    assert promise.trace(reference).count(b"\n") == 13
    again = train(samewise, tmp_path / "again")
    elsewhere = promise.Promise([*GAN, SAVED])
    assert elsewhere.kill_within(tmp_path / "killed", random.Random(1))
    resumed = elsewhere.run(tmp_path / "killed", "loader.num_workers=3")
    for folder in (again, resumed):
        assert promise.weights(folder) == promise.weights(reference)
        assert promise.trace(folder) == promise.trace(reference)


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "TINY", [*GAN, "replicas=2"])
    alone = jobs.run(tmp_path / "alone", 1)
    jobs.assert_same(jobs.run(tmp_path / "two", 2, "strategy=elastic"), alone)


@pytest.fixture
def run(tmp_path):
    made = build(compose([*GAN], project=Project(Path.cwd())), Project(Path.cwd()), RunFolder(tmp_path))
    made.recorder.trace.open(0, 0)
    yield made
    made.recorder.trace.close()


def test_a_phase_only_gathers_gradients_of_what_it_trains(run, monkeypatch):
    gathered: list[set[str]] = []
    for phase in run.phases:
        step = phase.optimizer.step
        monkeypatch.setattr(
            phase.optimizer,
            "step",
            lambda step=step: (gathered.append({name.partition(".")[0] for name, one in run.model.named_parameters() if one.grad is not None}), step())[1],
        )
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    train_step(run, next(TrainingBatches(run)))
    assert gathered == [{"discriminator"}, {"generator"}]
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    assert all(not torch.equal(before[name], value) for name, value in run.model.named_parameters())


def test_the_trace_digests_the_gradients_of_every_phase(run):
    outcome = train_step(run, next(TrainingBatches(run)))
    run.recorder.trace.record(outcome.step, batch=outcome.batch, inputs=outcome.inputs, loss=0.0)
    names = [name for name, _ in run.model.named_parameters()]
    digests = run.recorder.trace.last["layers"]["gradients"]
    assert len({digests[8 * place : 8 * place + 8] for place in range(len(names))}) == len(names), "each had a gradient of its own"


def trace_lines(folder: Path, every: int) -> dict[int, dict[str, str]]:
    """The lines of six steps, without what depends on earlier lines."""
    made = build(compose([*GAN, f"trace.every_steps={every}"], project=Project(Path.cwd())), Project(Path.cwd()), RunFolder(folder))
    folder.mkdir()
    made.recorder.trace.open(0, 0)
    batches = TrainingBatches(made)
    for _ in range(6):
        made.recorder.record(train_step(made, next(batches)))
    made.recorder.trace.close()
    return {
        line["step"]: {stage: line[stage] for stage in ("batch", "input", "loss", "gradients", "weights")} for line in read_trace(folder / "trace.jsonl")[1]
    }


def test_a_trace_of_every_third_step_equals_a_full_one_there(tmp_path):
    every, third = trace_lines(tmp_path / "every", 1), trace_lines(tmp_path / "third", 3)
    assert list(every) == [1, 2, 3, 4, 5, 6]
    assert third == {step: every[step] for step in (3, 6)}


def test_an_inspected_step_says_whose_option_it_is(run):
    seen, _ = inspect_step(run, state_of(run))
    rates = [str(one) for one in seen if one.kind == "option" and one.name.startswith("lr ")]
    assert rates == ["the optimizer's lr in phase 'discriminator'", "the optimizer's lr in phase 'generator'"]


OFTEN = (Phase("discriminator", ("discriminator",), times=lambda step: 2 - step % 2), Phase("generator", ("generator",), every=3))
MOMENTUM = [f"optimizer@optimizer.{name}=sgd" for name in ("discriminator", "generator")]
MOMENTUM += [f"optimizer.{name}.{value}" for name in ("discriminator", "generator") for value in ("lr=0.05", "weight_decay=0.1")]
AVERAGED = ["callbacks=ema", "callbacks.ema.decay=0.8", "+clip_norms.generator=0.01", "max_steps=8"]


def by_hand(run, steps):
    """The weights and their average after each step of a plain loop, whose generator trains in each third step and whose critic once or twice."""
    model = deepcopy(run.model)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.05, momentum=0.9, weight_decay=0.1) for name in ("discriminator", "generator")}
    batches = TrainingBatches(run)
    for step in range(steps):
        (micro,) = next(batches)
        images = run.transforms["train"](deepcopy(micro.batch))["image"]
        turns = [("discriminator", 0, turn) for turn in range(1 if step % 2 else 2)] + [("generator", 1, 0)] * (step % 3 == 0)
        for name, *key in turns:
            streams.enter(run.seed, "step", step, 0, *(key if key[1] else key[:1]))
            noise = torch.randn(len(images), run.recipe.noise)
            optimizers[name].zero_grad()
            if name == "generator":
                softplus(-model(noise)[1]).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.generator.parameters(), 0.01)
            else:
                real, fake = model(noise, images)
                (softplus(-real) + softplus(fake)).mean().backward()
            optimizers[name].step()
        parameters = dict(model.named_parameters())
        for name, value in model.state_dict().items():
            if name.startswith("generator") and name in parameters and step % 3:
                continue
            average[name] = torch.lerp(average[name], value, 0.2) if value.is_floating_point() else value.clone()
        yield model, average


def test_phases_train_as_often_as_they_say_and_one_left_out_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(GenerativeAdversarial, "phases", OFTEN)

    def built():
        made = build(compose([*GAN, "replicas=1", *MOMENTUM, *AVERAGED, "device=cpu"], project=Project(Path.cwd())), Project(Path.cwd()), RunFolder(tmp_path))
        made.recorder.trace.open(0, 0)
        return made

    run, resumed = built(), built()
    run.callbacks["ema"].on_start(run.recorder.view)
    batches = TrainingBatches(run)
    for step, (model, average) in enumerate(by_hand(built(), 8)):
        state = deepcopy(run.phases[1].optimizer.state_dict())
        outcome = train_step(run, next(batches))
        run.recorder.record(outcome)
        torch.testing.assert_close(run.model.state_dict(), model.state_dict())
        torch.testing.assert_close(run.callbacks["ema"].state_dict()["averaged"], average)
        if step % 3:
            torch.testing.assert_close(run.phases[1].optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
            assert "generator/gradient_norm" not in outcome.gradient_norms
        if step == 4:
            restore(resumed, deepcopy(state_of(run)))
    batches = TrainingBatches(resumed)
    while resumed.step < 8:
        resumed.recorder.record(train_step(resumed, next(batches)))
    torch.testing.assert_close(state_of(resumed)["model"], state_of(run)["model"], rtol=0, atol=0)
    assert state_of(resumed)["callbacks"]["ema"]["missed"] == state_of(run)["callbacks"]["ema"]["missed"]
    torch.testing.assert_close(state_of(resumed)["callbacks"]["ema"]["averaged"], state_of(run)["callbacks"]["ema"]["averaged"], rtol=0, atol=0)
