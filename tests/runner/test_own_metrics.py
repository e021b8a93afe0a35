"""The metrics of recipes with nothing but a loss, and of those that measure."""

import importlib
import json

import hydra
import pytest
import torch
import torch.nn.functional as F
from samewise_tiny import work_in_project

from samewise import load

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
