"""What decides a loss but is in no checkpoint is found before the first step, and nothing is said of what only looks like it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = """
import random

import numpy
import torch
from torch import nn
from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss, Phase
from samewise.runner.optim.schedules import LearningRate
from samewise.runner.optim.schedules.base import Schedule


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.shift(self.flatten(images)))


class Buffer(Base):
    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64), persistent=self.persistent)

    def shift(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Loose(Buffer):
    persistent = False


class InEvaluation(Base):
    mean = 0.0

    def shift(self, x):
        if not self.training:
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


class Counter(Base):
    calls = 0

    def shift(self, x):
        self.calls += self.training
        return x * (1 + self.calls)


class Later(Base):
    # no other loss in the first steps

    calls = 0

    def shift(self, x):
        self.calls += self.training
        return x * 2 if self.calls > 1000 else x


class InTurns(Later):
    def shift(self, x):
        super().shift(x)
        return x * 2 if self.calls % 7 == 6 else x


class Unregistered(Base):
    def __init__(self):
        super().__init__()
        self.scale, self.hidden = torch.ones(64, requires_grad=True), [nn.Linear(64, 64)]

    def shift(self, x):
        return self.hidden[0](x * self.scale)


class Unseeded(Base):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.from_numpy(numpy.random.default_rng().normal(size=64)).float())

    def shift(self, x):
        return x + self.bias


class Seeded(Unseeded):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.from_numpy(numpy.random.normal(size=64)).float() * random.random())


class Own(Base):
    drawn_from = None

    def shift(self, x):
        self.drawn_from = self.drawn_from or torch.Generator().manual_seed(0)
        return x + torch.randn(x.shape, generator=self.drawn_from)


class Harmless(Buffer):
    scale, calls, last = None, 0, None

    def shift(self, x):
        self.scale = torch.full((64,), 2.0) if self.scale is None else self.scale
        self.calls += 1
        self.last = super().shift(x) * self.scale
        return nn.functional.dropout(self.last, 0.5, self.training)


class Extra(Base):
    def shift(self, x):
        return x

    def get_extra_state(self):
        return {"mean": 0.0}


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("eye", torch.eye(4).to_sparse())


class Lazy(Base):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(10)


class Sound(Base):
    def shift(self, x):
        return x


class Changing(Classification):
    # changes its batch, or a copy of it

    copies = False

    def loss(self, model, batch, phase):
        batch = {name: value.clone() for name, value in batch.items()} if self.copies else batch
        batch["image"] //= 2
        batch["image"] += torch.randint(0, 9, batch["image"].shape, dtype=torch.uint8)
        return super().loss(model, {"image": batch.pop("image").float(), "label": batch.pop("label")}, phase)

    def measure(self, model, batch):
        return super().measure(model, {**batch, "image": batch["image"].float()})


class Copying(Changing):
    copies = True


class InTurn(Changing):
    phases = (Phase("one", ("head.weight",)), Phase("two", ("head.bias",)))

    def loss(self, model, batch, phase):
        if phase.name == "one":
            batch["image"] = batch.pop("image") // 2
        return Classification.loss(self, model, {**batch, "image": batch["image"].float()}, phase)


class Evaluating(Classification):
    def loss(self, model, batch, phase):
        try:
            return super().loss(model, batch, phase)
        finally:
            model.eval()


class Mean(Classification):
    def loss(self, model, batch, phase):
        loss = super().loss(model, batch, phase)
        return Loss(loss.total, loss.count, {"mean": loss.total.detach() / loss.count})


class Detached(Classification):
    def loss(self, model, batch, phase):
        loss = super().loss(model, batch, phase)
        return Loss(torch.tensor(loss.total.item(), requires_grad=True), loss.count)


class Delayed(Classification):
    calls = 0

    def loss(self, model, batch, phase):
        self.calls += 1
        loss = super().loss(model, batch, phase)
        return Loss(loss.total * (2 if self.calls > 100 else 1), loss.count)


class Centres(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(10), requires_grad=not frozen)

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits - self.centres, labels, reduction="none")


class Weighted(Classification):
    def __init__(self, **given):
        super().__init__(**given)
        self.parts = {"heads": [nn.Linear(2, 2)], "weight": torch.ones(2, requires_grad=True)}


class Counting(torch.optim.SGD):
    def __init__(self, params, *, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps, self.cache, self.slow = 0, None, [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] /= self.steps
        return super().step(closure)


class Saving(Counting):
    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps = state["steps"]


class InState(torch.optim.SGD):
    # what it keeps in attributes is a reference, or made once

    def __init__(self, params, *, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.mine, self.inner, self.made = self.param_groups[0]["params"], torch.optim.SGD(self.param_groups, lr=lr), None

    def step(self, closure=None):
        self.made = torch.ones(3) if self.made is None else self.made
        for one in self.mine:
            self.state[one]["step"] = self.state[one].get("step", 0) + 1
        return self.inner.step(closure)


class Shrinking(Schedule):
    def __init__(self) -> None:
        super().__init__(unit="step")
        self.factor = 1.0

    def at(self, step, options, group):
        self.factor *= 0.9
        return {**options, "lr": self.factor}


class Heeding(LearningRate):
    best = 1.0

    def after_evaluation(self, metrics):
        self.best = min(self.best, *metrics.values())

    def rate(self, time, lr):
        return lr * self.best


class Cached(LearningRate):
    def __init__(self) -> None:
        super().__init__(unit="step")
        self.known = {}

    def rate(self, time, lr):
        return self.known.setdefault(time, lr * 0.9**time)
"""


@pytest.fixture
def train(tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains a model; returns the command's result."""
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["own"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["recipe=classification", "dataset=digits", "transforms=images", "batch_size=64", "max_steps=3", "device=cpu", "tracking=none", "evaluate.limit=1"]

    def run(name: str, *more: str, command: str = "train") -> Any:
        (tmp_path / "configs" / "model").mkdir(parents=True)
        (tmp_path / "configs" / "model" / "own.yaml").write_text(f"# A model\n_target_: own.{name}\n")
        return samewise(command, *given, "evaluate.pictures=false", "model=own", *more, "--config-dir", "configs")

    return run


@pytest.mark.parametrize(
    ("model", "attribute"), [("Loose", "Loose.mean"), ("InEvaluation", "InEvaluation.mean"), ("Counter", "Counter.calls"), ("Own", "Own.drawn_from")]
)
def test_what_no_checkpoint_holds_is_warned_about_by_name_and_the_run_promises_nothing(
    train: Callable[..., Any], samewise: Callable[..., Any], model: str, attribute: str
) -> None:
    done = train(model)
    assert done.returncode == 0, done.stderr
    assert f"warning: model, recipe, transforms ({attribute}" in done.stderr
    assert "a resumed run would go on with other values" in done.stderr
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["level"] == "none"
    if model == "Counter":
        again = samewise("verify", summary.parent)
        assert (again.returncode, "altered" in again.stdout) == (0, False), again.stdout


@pytest.mark.parametrize(
    ("given", "attribute"),
    [(("Later",), "Later.calls"), (("InTurns",), "InTurns.calls"), (("Sound", "recipe._target_=own.Delayed"), "Delayed.calls")],
)
def test_a_counter_that_decides_a_loss_later_is_warned_about_and_the_run_promises_nothing(
    train: Callable[..., Any], given: tuple[str, ...], attribute: str
) -> None:
    done = train(*given)
    assert done.returncode == 0, done.stderr
    assert (
        f"warning: model, recipe ({attribute}): counts how often the recipe or the model is used, and decides a loss, and no checkpoint holds it" in done.stderr
    )
    assert _summary()["level"] == "none"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("Mean", "recipe (Mean.loss): its part 'mean' for 2 is "),
        ("Detached", "model: nothing trains head.weight, head.bias: no phase's loss gave a gradient in the first step"),
        ("Evaluating", "recipe (Evaluating.loss): leaves the model in evaluation mode: dropout and batch norm do nothing in what follows"),
    ],
)
def test_a_loss_that_is_a_mean_or_trains_nothing_or_changes_the_mode_is_warned_about_in_training(train: Callable[..., Any], recipe: str, said: str) -> None:
    done = train("Sound", f"recipe._target_=own.{recipe}")
    assert (done.returncode, done.stderr.count("warning: "), f"warning: {said}" in done.stderr) == (0, 1, True), done.stderr


def test_initial_weights_that_nothing_seeds_are_an_error_of_check(train: Callable[..., Any]) -> None:
    done = train("Unseeded", command="check")
    assert done.returncode == 2
    assert "error: model: has other initial weights each time it is made (bias)" in done.stderr


def test_initial_weights_of_the_global_generators_are_seeded(train: Callable[..., Any]) -> None:
    done = train("Seeded", "--strict", command="check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_of_a_model_that_torch_does_not_know_of_are_an_error_that_names_them(train: Callable[..., Any]) -> None:
    done = train("Unregistered")
    assert done.returncode == 2
    words = "Unregistered.scale, Unregistered.hidden.0.weight, Unregistered.hidden.0.bias: requires a gradient, but is not part of the model"
    assert f"error: model: {words}" in done.stderr
    assert "hint: make it an nn.Parameter, or keep modules in an nn.ModuleList" in done.stderr


@pytest.mark.parametrize("model", ["Buffer", "Harmless"])
@pytest.mark.parametrize("more", [(), ("replicas=2", "strategy=elastic", "precision=bf16", "accumulate=2")])
def test_buffers_caches_and_what_is_only_remembered_are_not_warned_about(train: Callable[..., Any], model: str, more: tuple[str, ...]) -> None:
    done = train(model, *more)
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["level"] == "R2"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Extra", "_extra_state is a dict; expected: only dense tensors"),
        ("Sparse", "eye is a sparse_coo tensor; expected: only dense tensors"),
        ("Lazy", "head (LazyLinear) gets its weights in its first forward pass, but initial weights are made before; expected: Linear with in_features"),
    ],
)
def test_a_model_whose_state_is_not_of_dense_tensors_is_refused(train: Callable[..., Any], model: str, words: str) -> None:
    done = train(model)
    assert done.returncode == 2
    assert f"error: model: {words}" in done.stderr
    assert not Path("runs").exists()


def _summary() -> dict[str, Any]:
    (file,) = Path("runs").glob("*/*/summary.json")
    found = json.loads(file.read_text())
    shutil.rmtree("runs")
    shutil.rmtree("configs")
    return found


@pytest.mark.parametrize("more", [(), ("accumulate=2", "replicas=2"), ("memory_format=channels_last",)])
def test_a_batch_that_the_recipe_changes_is_as_loaded_in_the_first_step(train: Callable[..., Any], more: tuple[str, ...]) -> None:
    weights = set[str]()
    for name in ("Changing", "Copying"):
        done = train("Sound", f"recipe._target_=own.{name}", "transforms=none", *more)
        assert (done.returncode, "no checkpoint" in done.stderr) == (0, False), done.stderr
        found = _summary()
        assert found["level"] == "R2"
        weights.add(found["weights_sha256"])
    assert len(weights) == 1


def test_what_one_phase_does_to_a_batch_reaches_the_next_in_every_memory_format(train: Callable[..., Any]) -> None:
    weights = set[str]()
    for memory_format in ("contiguous", "channels_last"):
        done = train("Sound", "recipe._target_=own.InTurn", "transforms=none", f"memory_format={memory_format}")
        assert done.returncode == 0, done.stderr
        weights.add(_summary()["weights_sha256"])
    assert len(weights) == 1


@pytest.mark.parametrize(
    ("override", "named"),
    [("+recipe.loss={_target_:own.Centres}", "Classification.criterion.centres"), ("recipe._target_=own.Weighted", "Weighted.parts.heads.0.weight, ")],
)
def test_what_would_be_learned_outside_of_the_model_is_an_error_that_names_it(train: Callable[..., Any], override: str, named: str) -> None:
    done = train("Sound", override)
    assert done.returncode == 2
    assert f"error: recipe: {named}" in done.stderr
    assert "requires a gradient, but is not part of the model: no optimizer trains it" in done.stderr
    assert not Path("runs").exists()


def test_a_frozen_parameter_in_a_loss_is_allowed(train: Callable[..., Any]) -> None:
    done = train("Sound", "+recipe.loss={_target_:own.Centres,frozen:true}")
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer=counting", "optimizer (Counting.steps): changes in a step, and no checkpoint holds it"),
        ("scheduler=shrinking", "scheduler (Shrinking): sets other options when it is asked again for the same step"),
        ("scheduler=heeding", "scheduler (Heeding): keeps what evaluations gave, and no checkpoint holds it"),
        ("optimizer=saving", ""),
        ("optimizer=instate", ""),
        ("scheduler=cached", ""),
    ],
)
def test_what_an_optimizer_or_a_schedule_does_not_save_is_warned_about(train: Callable[..., Any], override: str, named: str) -> None:
    group, choice = override.split("=")
    name = {"instate": "InState"}.get(choice, choice.capitalize())
    folder = Path("configs", group)
    folder.mkdir(parents=True)
    (folder / f"{choice}.yaml").write_text(f"# A choice\n_target_: own.{name}\n" + ("_partial_: true\n" if group == "optimizer" else ""))
    done = train("Sound", override)
    assert done.returncode == 0, done.stderr
    assert (f"warning: {named}" in done.stderr) if named else "warning" not in done.stderr, done.stderr
    assert _summary()["level"] == ("none" if named else "R2")


def test_a_run_that_promised_nothing_promises_nothing_when_it_is_resumed_for_a_last_step(train: Callable[..., Any]) -> None:
    Path("configs", "optimizer").mkdir(parents=True)
    Path("configs", "optimizer", "counting.yaml").write_text("# A choice\n_target_: own.Counting\n_partial_: true\n")
    assert train("Sound", "optimizer=counting", "checkpoint.every_steps=1").returncode == 0
    (summary,) = Path("runs").glob("*/*/summary.json")
    summary.unlink()
    shutil.rmtree(sorted((summary.parent / "checkpoints").glob("step*"))[-1])
    shutil.rmtree(Path("configs", "model"))
    done = train("Sound", "optimizer=counting", "checkpoint.every_steps=1")
    assert "resumed at step 2 of 3" in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads(summary.read_text())["level"] == "none"
