"""What `samewise check` and `train` say of recipes and models of one's own that are wrong, or may be."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samewise_tiny import work_in_project

from samewise.recipes.classification import Classification
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Loss
from samewise.runner.training.guards.same_losses import SameLosses
from samewise.runner.training.losses import require_loss

RECIPES = """
import torch
from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss, MeanLosses, Phase, Recipe, Scores

class HeadOnly(Classification):
    phases = (Phase("train", ("fc",)),)

class Method(Classification):
    def phases(self):
        return (Phase(),)

class Twice(Classification):
    phases = [Phase("train", ("fc",)), Phase("train", ("conv1",))]

class NoPhase(Classification):
    phases = Phase()

class Penalty(Classification):
    measure, scores = Recipe.measure, Recipe.scores  # the losses
    always = False

    def loss(self, model, batch, phase):
        images = batch["image"].detach().requires_grad_()
        with torch.set_grad_enabled(self.always or torch.is_grad_enabled()):
            outputs = model(images)
            (gradient,) = torch.autograd.grad(outputs.sum(), images, create_graph=True)
        return Loss(torch.nn.functional.cross_entropy(outputs, batch["label"], reduction="sum") + gradient.square().sum(), len(images))

class AlwaysPenalty(Penalty):
    always = True

class Sound(Classification):
    pass

class Moving(Classification):
    def measure(self, model, batch):
        model.fc.weight.mul_(0.5)
        return super().measure(model, batch)

class Training(Classification):
    def measure(self, model, batch):
        model.train()
        return super().measure(model, batch)

class Updating(Classification):
    def measure(self, model, batch):
        model.train()
        try:
            return super().measure(model, batch)
        finally:
            model.eval()

class Root(Scores):
    # of each batch, and then the mean of these

    def __init__(self):
        self.seen = []

    def add(self, measured):
        self.seen.append(measured)

    def compute(self):
        return {"accuracy": sum(self.seen) / len(self.seen)}

class Rooted(Classification):
    def measure(self, model, batch):
        return float(batch["image"].mean().abs().sqrt())

    def scores(self, dataset):
        return Root()

class Gathering(Root):
    seen = []

    def __init__(self):
        pass

class Collecting(Rooted):
    def scores(self, dataset):
        return Gathering()

class Shared(Classification):
    kept = None

    def scores(self, dataset):
        self.kept = self.kept or super().scores(dataset)
        return self.kept

class Nothing(Scores):
    def add(self, measured):
        pass

    def compute(self):
        return None

class Silent(Classification):
    def scores(self, dataset):
        return Nothing()

class Undefined(Nothing):
    def compute(self):
        return {"loss": float("nan"), "accuracy": 0.5}

class Unknown(Classification):
    def scores(self, dataset):
        return Undefined()

class Parts(Classification):
    def loss(self, model, batch, phase):
        model.fc
        return super().loss(model, batch, phase)

class Noisy(Classification):
    def loss(self, model, batch, phase):
        loss = super().loss(model, batch, phase)
        return Loss(loss.total * (2 + torch.randn(len(batch["label"]))).mean(), loss.count)

class Closure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)

class Asking(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "SAM requires closure"
"""


@pytest.fixture
def recipe(tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Checks an experiment with one of these recipes, or does something else with it."""
    work_in_project(tmp_path, monkeypatch, "mine", RECIPES)
    given = ["experiment=resnet18_digits", "model.width=4", "debug=tiny", "device=cpu"]
    return lambda name, *command: samewise(*(command or ("check", "--strict")), *given, f"recipe._target_=mine.{name}")


@pytest.mark.parametrize("name", ["Sound", "Noisy"])
def test_a_sound_recipe_of_ones_own_gives_no_warning(recipe: Callable[[str], Any], name: str) -> None:
    done = recipe(name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Updating", "warning: recipe (Updating.measure): an evaluation changes the model's buffers (bn1.num_batches_tracked, "),
        ("HeadOnly", "warning: model: nothing trains conv1.weight, "),
    ],
)
def test_a_recipe_that_may_be_wrong_is_warned_about(recipe: Callable[[str], Any], name: str, said: str) -> None:
    done = recipe(name)
    assert done.returncode == 2
    assert said in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Moving", "Moving.measure changes the model's weights (fc.weight);"),
        ("Training", "Training.measure leaves the model in training mode"),
        ("Collecting", "Collecting.scores returns objects with one 'seen' for all evaluations"),
        ("Shared", "Shared.scores returns the same object each time"),
        ("Method", "Method.phases is not a tuple of phases with different names; hint: `@property` above `def phases(self)`"),
        ("Twice", "Twice.phases is not a tuple of phases with different names; "),
        ("NoPhase", "NoPhase.phases is not a tuple of phases with different names; "),
        ("Penalty", "the first evaluation fails: RuntimeError: element 0 of tensors does not require grad"),
        ("Silent", "Nothing.compute returns NoneType"),
    ],
)
def test_a_wrong_recipe_is_an_error_that_names_what_is_wrong(recipe: Callable[[str], Any], name: str, said: str) -> None:
    done = recipe(name)
    assert done.returncode == 2
    assert f"error: recipe: {said}" in done.stderr


@pytest.mark.parametrize("optimizer", ["Closure", "Asking"])
def test_an_optimizer_that_needs_a_closure_is_told_to_be_unsupported(recipe: Callable[..., Any], optimizer: str) -> None:
    done = recipe("Sound", "check", "~optimizer", f"+optimizer={{_target_:mine.{optimizer},_partial_:true,lr:0.1}}")
    assert done.returncode == 2
    assert "error: optimizer: " in done.stderr
    assert "closure" in done.stderr


def test_under_ddp_a_recipe_that_uses_the_models_parts_is_told_to_call_the_model(recipe: Callable[..., Any]) -> None:
    done = recipe("Parts", "check", "strategy=ddp", "replicas=2")
    assert done.returncode == 2
    assert "a recipe must call the model as a whole, `model(...)`, not its parts; hint: strategy=elastic" in done.stderr
    done = recipe("Parts", "check", "strategy=elastic", "replicas=2")
    assert done.returncode == 0, done.stderr


def test_a_monitored_metric_that_is_nan_is_warned_about_once(recipe: Callable[..., Any]) -> None:
    done = recipe("Unknown", "train", "tracking=none", "evaluate.pictures=false", "evaluate.monitor=valid/loss", "evaluate.every_steps=1", "max_steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: valid/loss: is not a number: this evaluation is not better than any other") == 1


def test_a_gradient_penalty_that_enables_gradients_is_trained_and_evaluated(recipe: Callable[..., Any]) -> None:
    done = recipe("AlwaysPenalty", "train", "evaluate.monitor=valid/loss", "evaluate.mode=min")
    assert done.returncode == 0, done.stdout + done.stderr


TOTAL = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (TOTAL, "Classification.loss returns Tensor"),
        (Loss(2.0, 1), "whose total is float"),
        (Loss(TOTAL, torch.tensor(16)), "whose count is Tensor; expected: a number; hint: count=mask.sum().item()"),
        (Loss(TOTAL, -16), "whose count is -16; expected: 0 or more"),
        (Loss(TOTAL, math.nan), "whose count is nan"),
        (
            Loss(TOTAL.detach(), 1),
            "whose total is a tensor without a gradient; expected: what the model's outputs give; hint: compute it without .detach() or .item()",
        ),
        (Loss(torch.zeros(()), 0), "whose total is a tensor without a gradient; expected: what the model's outputs give; hint: 0.0 * output.sum()"),
        (Loss(TOTAL.expand(3), 3), "whose total is a tensor of shape [3]; expected: a tensor without dimensions; hint: a sum: .sum()"),
        (Loss(TOTAL, 1, parts={"loss": TOTAL.detach()}), "returns a part called 'loss', which samewise logs itself; expected: parts with other names"),
        (Loss(TOTAL, 1, parts={"acc": 3.0}), "whose acc is float; expected: a tensor without dimensions; hint: torch.as_tensor(value)"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(loss: Any, said: str) -> None:
    require_loss(Classification(), Loss(TOTAL, 1, parts={"ce": TOTAL.detach()}))
    with pytest.raises(ConfigError) as raised:
        require_loss(Classification(), loss)
    (problem,) = raised.value.problems
    text = f"{problem.message}; expected: {problem.expected}; hint: {problem.hint}"
    assert said in text


MISTAKEN = Path(__file__).with_name("mistaken.py")


@pytest.fixture
def train(tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains a model; returns the command's result."""
    work_in_project(tmp_path, monkeypatch, "own", MISTAKEN.read_text())
    given = ["recipe=classification", "dataset=digits", "transforms=images", "batch_size=64", "max_steps=3", "device=cpu", "tracking=none", "evaluate.limit=1"]

    def run(name: str, *more: str, command: str = "train") -> Any:
        (tmp_path / "configs" / "model").mkdir(parents=True)
        (tmp_path / "configs" / "model" / "own.yaml").write_text(f"# A model\n_target_: own.{name}\n")
        return samewise(command, *given, "evaluate.pictures=false", "model=own", *more, "--config-dir", "configs")

    return run


@pytest.mark.parametrize("model", ["Loose", "InEvaluation", "Counter", "Own"])
def test_what_no_checkpoint_holds_is_warned_about_and_the_run_promises_nothing(train: Callable[..., Any], samewise: Callable[..., Any], model: str) -> None:
    done = train(model)
    assert done.returncode == 0, done.stderr
    assert "warning: model, recipe, transforms: the same batch" in done.stderr
    assert "a resumed run would continue with other values" in done.stderr
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["level"] == "none"
    if model == "Counter":
        again = samewise("verify", summary.parent)
        assert (again.returncode, "altered" in again.stdout) == (0, False), again.stdout


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("Detached", "model: nothing trains head.weight, head.bias: no phase's loss gave a gradient in the first step"),
        ("Evaluating", "recipe (Evaluating.loss): leaves the model in evaluation mode: dropout and batch norm do nothing in what follows"),
    ],
)
def test_a_loss_that_trains_nothing_or_changes_the_mode_is_warned_about_in_training(train: Callable[..., Any], recipe: str, said: str) -> None:
    done = train("Sound", f"recipe._target_=own.{recipe}")
    assert (done.returncode, done.stderr.count("warning: "), f"warning: {said}" in done.stderr) == (0, 1, True), done.stderr


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
        ("Lazy", "head (LazyLinear) gets its weights in its first forward pass, but samewise initialises weights before; expected: Linear with in_features"),
    ],
)
def test_a_model_whose_state_is_not_of_dense_tensors_is_refused(train: Callable[..., Any], model: str, words: str) -> None:
    done = train(model)
    assert done.returncode == 2
    assert f"error: model: {words}" in done.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize("more", [(), ("replicas=2",), ("replicas=2", "strategy=elastic"), ("accumulate=2",)])
def test_a_parameter_with_sparse_gradients_is_refused_by_name(train: Callable[..., Any], more: tuple[str, ...]) -> None:
    done = train("SparseTable", *more)
    assert done.returncode == 2
    assert "error: model: its parameter table has sparse gradients, which are not supported; hint: compute with sparse=False" in done.stderr


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


def test_a_step_after_the_first_reads_nothing_of_the_run() -> None:
    guard = SameLosses(None)
    assert [
        *guard.before_step(SimpleNamespace(config=SimpleNamespace(reproducibility=SimpleNamespace(level="fast")), strategy=SimpleNamespace(compiles=True)), ())
    ] == []
    assert [*guard.before_step(None, ())] == []
