"""The metrics of recipes with nothing but a loss, and of those that measure."""

import importlib
import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import torch.nn.functional as F
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

TINY = ["experiment=resnet18_digits", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=[progress]"]

LAB = """
import torch
import torch.nn.functional as F
import torchmetrics
from samewise.runner.interfaces import Callback, Loss, Phase, Recipe, Scores

class Least(Recipe):
    def loss(self, model, batch, phase):
        logits, margin = model(batch["image"]), phase.name == "second"
        each = F.multi_margin_loss(logits, batch["label"], reduction="none") if margin else F.cross_entropy(logits, batch["label"], reduction="none")
        return Loss(each.sum(), len(each), parts={"squares": each.detach().square().sum()})

class Two(Least):
    phases = (Phase("first"), Phase("second"))

    def loss(self, model, batch, phase):
        found = super().loss(model, batch, phase)
        if not torch.is_grad_enabled():
            batch["image"].zero_()
        return found

class Sums(Scores):
    def __init__(self):
        self.sums = 0

    def add(self, measured):
        self.sums = self.sums + measured

    def compute(self):
        return {"loss": self.sums[0] / self.sums[2], "squares": self.sums[1] / self.sums[2]}

class Reused(Least):
    # measures into the same tensor each time

    def measure(self, model, batch):
        loss = self.loss(model, batch, Phase())
        self.out = getattr(self, "out", torch.zeros(3))
        return self.out.copy_(torch.stack([loss.total, loss.parts["squares"], torch.tensor(loss.count)]))

    def scores(self, dataset):
        return Sums()

class Half(Least):
    def measure(self, model, batch):
        return 1.0

class Confidence(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits):
        self.sum += logits.softmax(1).amax(1).sum()
        self.count += len(logits)

    def compute(self):
        return self.count + self.sum / self.count

class Metrics(Scores):
    def __init__(self, metric):
        self.metrics = torchmetrics.MetricCollection({"confidence": metric})

    def add(self, measured):
        self.metrics.update(measured)

    def compute(self):
        return self.metrics.compute()

class Confident(Least):
    def measure(self, model, batch):
        return model(batch["image"])

    def scores(self, dataset):
        return Metrics(Confidence())

class Updating(Least):
    def __init__(self):
        self.metric = Confidence()

    def measure(self, model, batch):
        self.metric.update(model(batch["image"]))

    def scores(self, dataset):
        return Metrics(self.metric)

class Exchanging(Confident):
    def measure(self, model, batch):
        torch.distributed.all_reduce(measured := super().measure(model, batch))
        return measured

class Early(Callback):
    def on_start(self, run):
        if run.is_main:
            torch.distributed.all_reduce(torch.zeros(3))

class Late(Callback):
    def on_step(self, run, outcome):
        if run.is_main:
            torch.distributed.all_reduce(torch.zeros(3))
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    names = ("Least", "Two", "Reused", "Half", "Confident", "Updating", "Exchanging")
    work_in_project(tmp_path, monkeypatch, "lab", LAB, {f"recipe/{name.lower()}": f"_target_: lab.{name}\n" for name in names})
    data = ["dataset=generated_classification", "dataset.samples=64", "evaluate.batch_size=9"]  # the last batch has one sample
    return [*TINY, *data, "max_steps=2", "run_root=runs"]


@pytest.mark.parametrize("recipe", ["least", "reused", "two"])
def test_the_metrics_are_the_losses_of_the_split_by_default_and_where_a_recipe_measures_them_itself(samewise, lab, tmp_path, recipe) -> None:
    monitor = "valid/second/loss" if recipe == "two" else "valid/loss"
    done = samewise("train", *lab, f"recipe={recipe}", f"evaluate.monitor={monitor}", "--json", code=0)
    model, transforms, config = load(next(tmp_path.glob("runs/*/*/summary.json")).parent, checkpoint="last")
    batch = transforms(*hydra.utils.instantiate(config.cfg.dataset.valid))
    with torch.no_grad():
        logits, labels = model.double()(batch["image"].double()), batch["label"]
    entropy, margin = F.cross_entropy(logits, labels, reduction="none"), F.multi_margin_loss(logits, labels, reduction="none")
    expected = {"first/": entropy, "second/": margin} if recipe == "two" else {"": entropy}
    found = json.loads(done.stdout)["metrics"]["final"]
    assert len(labels) == 64
    for phase, each in expected.items():
        assert found[f"valid/{phase}loss"] == pytest.approx(each.mean().item(), rel=1e-5)
        assert found[f"valid/{phase}squares"] == pytest.approx(each.square().mean().item(), rel=1e-5)
    assert len(found) == 2 * len(expected)


def test_a_recipe_that_measures_needs_scores(samewise, lab) -> None:
    done = samewise("check", *lab, "recipe=half", code=2)
    assert done.stderr.startswith("error: recipe: Half has a `measure`, but no `scores`")


RANKS = {
    "one rank": ["strategy=elastic", "replicas=4"],
    "two ranks": ["strategy=elastic", "replicas=4", "strategy.nproc=2"],
    "four ranks": ["strategy=elastic", "replicas=4", "strategy.nproc=4"],
    "ddp": ["strategy=ddp", "replicas=2"],
    "fsdp": ["strategy=fsdp", "replicas=2"],
}
CONFIDENT = ["recipe=confident", "evaluate.monitor=valid/confidence", "evaluate.mode=max", "strategy.timeout_s=60"]


@pytest.mark.parametrize("ranks", [pytest.param(name, marks=[pytest.mark.fsdp] * (name == "fsdp")) for name in RANKS])
def test_a_metric_that_synchronises_itself_counts_each_sample_once_on_any_number_of_ranks(samewise, lab, tmp_path, ranks) -> None:
    done = samewise("train", *lab, *RANKS[ranks], *CONFIDENT, "--json", code=0)
    model, transforms, config = load(next(tmp_path.glob("runs/*/*/summary.json")).parent, checkpoint="last")
    metric = importlib.import_module("lab").Confidence()
    batch = transforms(*hydra.utils.instantiate(config.cfg.dataset.valid))
    with torch.no_grad():
        for images in batch["image"].split(9):
            metric.update(model(images))
    assert metric.count == 64
    assert json.loads(done.stdout)["metrics"]["final"] == {"valid/confidence": metric.compute().item()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("recipe=updating", "Updating.measure updates the metric 'metrics' of its scores, on each rank with another share"),
        ("recipe=exchanging", "in measure: torch.distributed.all_reduce(measured"),
        ("+callbacks.early._target_=lab.Early", "in on_start: torch.distributed.all_reduce(torch.zeros(3)) at step 1"),
        ("+callbacks.late._target_=lab.Late", "in on_step: torch.distributed.all_reduce(torch.zeros(3)) at step 2"),
    ],
)
def test_what_only_some_ranks_would_add_or_exchange_is_named_with_its_line(samewise, lab, change, message) -> None:
    done = samewise("train", *lab, *RANKS["two ranks"], *CONFIDENT, "strategy.timeout_s=6", change)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert ("ranks 0 and 1: wait for each other" in done.stderr) == ("callbacks" in change)


VIEWED = [*DIGITS, "model.width=4", "max_steps=4"]


def build_run(folder: Path, *more: str) -> Run:
    project = Project(Path.cwd())
    return build(compose([*VIEWED, *more], project=project), project, RunFolder(folder))


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


VIEWS = """
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
def lab_of_views(samewise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    work_in_project(tmp_path, monkeypatch, "lab", VIEWS)
    settings = ["max_steps=null", "max_epochs=2", "batch_size=32", "callbacks=ema", "replicas=2", "strategy=elastic"]
    return lambda *more: samewise("train", *VIEWED, *settings, *more, "--json")


def test_every_hook_is_called_in_order_and_a_function_draws_the_same_batch_on_any_number_of_ranks(lab_of_views: Any, tmp_path: Path) -> None:
    drawn = list[Any]()
    for ranks in (1, 2):
        done = lab_of_views(f"strategy.nproc={ranks}", DRAW, "+callbacks.hooks._target_=lab.Hooks", f"run_root={ranks}")
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
def test_a_function_that_may_not_be_called_so_is_refused(lab_of_views: Any, at: str, function: str, message: str) -> None:
    done = lab_of_views(DRAW.replace("epoch_end", at).replace("lab.draw", f"lab.{function}"))
    assert done.returncode == 2
    assert message in done.stderr
