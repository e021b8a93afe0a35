"""What decides a loss but is in no checkpoint is found before the first step, and nothing is said of what only looks like it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samewise_tiny import work_in_project

from samewise.runner.training.guards.same_losses import SameLosses

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
