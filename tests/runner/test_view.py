"""A callback sees numbers and copies: whatever it does with them, it cannot change the training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_tiny import DIGITS, work_in_project
from torch import Tensor

from samewise import load
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.loop import fit
from samewise.runner.training.run import Run
from samewise.runner.training.state import weights_digest

TINY = [*DIGITS, "model.width=4", "max_steps=4"]


def build_run(folder: Path, *more: str) -> Run:
    project = Project(Path.cwd())
    return build(compose([*TINY, *more], project=project), project, RunFolder(folder))


def values_of(view: RunView) -> dict[str, Any]:
    """Everything public: values of properties, and results of methods that change nothing."""
    names = [name for name in dir(RunView) if not name.startswith("_")]
    values = {name: getattr(view, name) for name in names if not callable(getattr(view, name))}
    return values | {"learning_rates()": view.learning_rates(), "weights()": dict(view.weights()), "copy_model()": view.copy_model()}


def spoil(value: Any) -> None:
    """Change whatever can be changed in place."""
    if isinstance(value, torch.nn.Module):
        spoil(value.state_dict())
    elif isinstance(value, Tensor):
        value.fill_(7)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list):
        value[:] = [7.0] * len(value)


class Spoiler(Callback):
    def on_step(self, run: RunView, outcome: Outcome) -> None:
        for value in values_of(run).values():
            spoil(value)

    def on_evaluation(self, run: RunView, metrics: Any) -> None:
        spoil(metrics)
        self.on_step(run, Outcome(0, {}, 0.0, {"gradient_norm": 0.0}, 0, 0, 8))


def test_a_callback_that_spoils_all_it_sees_changes_no_bit(tmp_path: Path) -> None:
    alone, spoilt = build_run(tmp_path / "alone"), build_run(tmp_path / "spoilt")
    spoilt.recorder.callbacks = {"spoiler": Spoiler(), **spoilt.callbacks}
    first, second = fit(alone), fit(spoilt)
    assert weights_digest(alone) == weights_digest(spoilt)
    assert first["metrics"] == second["metrics"]
    assert alone.folder.trace.read_bytes() == spoilt.folder.trace.read_bytes()


@pytest.mark.parametrize("name", ["model", "network", "phases", "strategy", "precision", "recipe", "schedule", "progress", "recorder", "optimizer"])
def test_the_parts_of_training_are_hidden_and_the_error_names_what_is_visible(name: str, tmp_path: Path) -> None:
    view = build_run(tmp_path).recorder.view
    with pytest.raises(AttributeError, match=rf"a callback cannot access '{name}' of a run.*weights"):
        getattr(view, name)


LAB = """
import json
import torch
from pathlib import Path
from samewise.runner.interfaces import Callback, Outcome, RunView

class Hooks(Callback):
    def note(self, run, hook):
        if run.is_main:
            with Path("hooks.txt").open("a") as file:
                file.write(f"{run.step} {hook}\\n")

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda run, *values: self.note(run, name)

def draw(run: RunView) -> None:
    batch, logits = run.evaluation_batch(lambda model, batch: model(batch["image"]), weights="ema")
    _, drawn = run.evaluation_batch(lambda model, batch: torch.rand(2))
    _, measured = run.evaluation_batch()
    if run.is_main:
        torch.save((batch, logits, drawn, measured.prediction), "drawn.pt")

def spoil(run: RunView, outcome: Outcome) -> None:
    run.evaluation_batch(lambda model, batch: model.fc.weight.mul_(0.5))

def clean(path: str) -> None:
    Path(path).unlink()
"""
DRAW = "+callbacks.draw={_target_: samewise.runner.callbacks.function.FunctionCallback, at: epoch_end, function: {_target_: lab.draw, _partial_: true}}"


@pytest.fixture
def lab(samewise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    work_in_project(tmp_path, monkeypatch, "lab", LAB)
    settings = ["max_steps=null", "max_epochs=2", "batch_size=32", "callbacks=ema", "replicas=2", "strategy=elastic"]
    return lambda *more: samewise("train", *TINY, *settings, *more, "--json")


def test_every_hook_is_called_in_order_and_a_function_draws_the_same_batch_on_any_number_of_ranks(lab: Any, tmp_path: Path) -> None:
    drawn = list[Any]()
    for ranks in (1, 2):
        done = lab(f"strategy.nproc={ranks}", DRAW, "+callbacks.hooks._target_=lab.Hooks", f"run_root={ranks}")
        assert done.returncode == 0, done.stderr
        drawn.append(torch.load("drawn.pt", weights_only=False))
        evaluation, epoch = ["on_evaluation_start", "on_evaluation"], ["on_step", "on_step", "on_epoch_end"]
        hooks = ["on_build", "on_start", "on_epoch_start", *epoch, *evaluation, "on_epoch_start", *epoch, *evaluation, "on_end"]
        assert [line.split()[1] for line in Path("hooks.txt").read_text().splitlines()] == hooks
        Path("hooks.txt").unlink()
    (batch, logits, noise, prediction), other = drawn
    torch.testing.assert_close((batch, logits, noise, prediction), other, rtol=0, atol=0)
    folder = Path(json.loads(done.stdout)["folder"])
    model, _, _ = load(folder, checkpoint="last", weights="ema")
    with torch.no_grad():
        torch.testing.assert_close(model(batch["image"]), logits)
    model, _, _ = load(folder, checkpoint="last")
    with torch.no_grad():
        assert torch.equal(model(batch["image"]).argmax(1), prediction)


@pytest.mark.parametrize(
    ("at", "function", "message"),
    [
        ("step_end", "spoil", "callbacks: one changes the model's weights or buffers"),
        ("epoch", "draw", "callbacks.draw.at: is no moment"),
        ("step", "clean", "is not a function of yours whose first parameter is annotated as RunView"),
    ],
)
def test_a_function_that_may_not_be_called_so_is_refused(lab: Any, at: str, function: str, message: str) -> None:
    done = lab(DRAW.replace("epoch_end", at).replace("lab.draw", f"lab.{function}"))
    assert done.returncode == 2
    assert message in done.stderr
