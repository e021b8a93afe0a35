"""Two trainings of one task, by `samewise train` and by an independent plain script, and how far they are apart.

From the same initial weights, on the same batches, both compute the same numbers except for rounding: losses, weights and metrics are compared one by one.
With seeds of their own each draws its weights, batches and dropout by itself: means over seeds are compared, in units of their standard error.

Tests import this as `samewise_oracle_curves`.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

ROUNDING = {"single": {"losses": 1e-3, "weights": 0.1, "metrics": 0.05}, "double": {"losses": 1e-9, "weights": 1e-7, "metrics": 1e-8}}
"""The greatest relative errors that count as rounding; a fault has to make one ten times as large. In single precision a ReLU input that rounds to
the other side of zero makes two trainings diverge by a ten-thousandth, and by more with each step; in double precision this does not happen."""
SPREAD = 4.5
"""Standard errors by which means over five seeds may differ: with about eight degrees of freedom, one comparison in five hundred is further off by chance."""
QUIET = ("callbacks=none", "tracking=none", "evaluate.pictures=false", "trace.layers_every_steps=0", "device=cpu", "max_epochs=999")


@dataclass(frozen=True)
class Trained:
    """The result of a training: each step's loss, the metrics of the held-out split after the last step, and the weights."""

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """One task, described for both trainings.

    Args:
        overrides: The run's.
        recipe: The run's recipe's class, for faults to be planted in.
        network: The plain script's model, its parameters named as the run's.
        plain: The plain script: trains the model for a number of steps, on shuffled batches or in the data's own order.
        rounding: What differs from `ROUNDING`, by precision.
    """

    overrides: Sequence[str]
    recipe: Any
    network: Callable[[], nn.Module]
    plain: Callable[[nn.Module, int, bool], Trained]
    rounding: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def planted(*faults: str, quick: str = "", elsewhere: Sequence[str] = ()) -> pytest.MarkDecorator:
    """The parameter `fault` of a slow test; `quick` is planted by `make test` too, and `elsewhere` are long, since they are planted for other recipes too."""
    slow = [pytest.param(fault, marks=pytest.mark.slow) for fault in faults]
    long = [pytest.param(fault, marks=[pytest.mark.slow, pytest.mark.long]) for fault in elsewhere]
    return pytest.mark.parametrize("fault", [*([quick] if quick else []), *slow, *long])


def batches(length: int, size: int, steps: int, *, shuffle: bool) -> Iterator[list[int]]:
    """Whole batches of indices, epoch after epoch."""
    while steps:
        order = torch.randperm(length) if shuffle else torch.arange(length)
        for batch in order[: length // size * size].split(size)[:steps]:
            yield batch.tolist()
            steps -= 1


class Oracle:
    """Trains tasks both ways.

    Args:
        samewise: Runs a command.
        folder: For the runs.
        monkeypatch: Plants faults, and doubles the precision.
    """

    def __init__(self, samewise: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._samewise, self._folder, self._monkeypatch = samewise, folder, monkeypatch

    def errors(self, task: Task, steps: int, precision: str, *, fault: str = "") -> dict[str, float]:
        """Relative errors of a run against the plain script, from the same weights on the same batches; in "double", both compute in float64."""
        start, plain = _plainly(task.network, task.plain, steps, precision)
        torch.save(start, self._folder / "start.pt")
        overrides = [f"initialise.weights={self._folder / 'start.pt'}", "loader.shuffle=false", f"max_steps={steps}"]
        with self._monkeypatch.context() as patches:
            if precision == "double":
                _train_in_double(patches)
            if fault:
                overrides += _plant(patches, fault, task.recipe)
            run = self.run(task, *overrides)
        return _errors(run, plain, start)

    def require_alike(self, task: Task, steps: int, precision: str) -> None:
        """Fail if the errors are larger than rounding."""
        found, most = self.errors(task, steps, precision), {**ROUNDING[precision], **task.rounding.get(precision, {})}
        assert all(found[name] <= value for name, value in most.items()), found

    def require_parted(self, task: Task, steps: int, precision: str, fault: str) -> None:
        """Fail if the errors of a planted fault are not well beyond rounding."""
        found, most = self.errors(task, steps, precision, fault=fault), {**ROUNDING[precision], **task.rounding.get(precision, {})}
        assert any(found[name] > 10 * value for name, value in most.items()), found

    def standard_errors(self, task: Task, steps: int, metric: str, *, seeds: int = 5) -> dict[str, float]:
        """How far the means over seeds are apart, each side with its own weights, batches and dropout: see `standard_errors`."""
        runs = [self.run(task, f"seed={seed}", f"max_steps={steps}") for seed in range(seeds)]
        plains = [task.plain(_seeded(task.network, 1000 + seed), steps, True) for seed in range(seeds)]
        return standard_errors(runs, plains, metric)

    def require_same_distribution(self, task: Task, steps: int, metric: str) -> None:
        """Fail if the means over seeds are further apart than their spread explains."""
        found = self.standard_errors(task, steps, metric)
        assert max(found.values()) <= SPREAD, found

    def run(self, task: Task, *overrides: str) -> Trained:
        """Train by the command line; the losses are the trace's, exact."""
        self._monkeypatch.setattr("samewise.runner.training.session._leave_results", lambda run: run.checkpoints.wait())  # no pictures
        done = self._samewise("train", *task.overrides, *QUIET, *overrides, f"run_root={self._folder / 'runs'}", "--json")
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        folder = Path(summary["folder"])
        lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
        weights = torch.load(folder / "checkpoints" / "latest" / "state.pt", weights_only=True)["model"]
        metrics = {name.removeprefix("valid/"): value for name, value in summary["metrics"]["final"].items()}
        return Trained([float.fromhex(line["loss"]) for line in lines if "loss" in line], metrics, weights)


def standard_errors(runs: Sequence[Trained], plains: Sequence[Trained], metric: str, *, windows: int = 4) -> dict[str, float]:
    """How many standard errors the means over seeds are apart (Welch's t), of the losses averaged in each of some windows of steps, and of a metric."""
    found = {metric: _welch(*([one.metrics[metric] for one in side] for side in (runs, plains)))}
    steps = len(runs[0].losses)
    for window in range(windows):
        piece = slice(window * steps // windows, (window + 1) * steps // windows)
        found[f"loss {window + 1} of {windows}"] = _welch(*([statistics.fmean(one.losses[piece]) for one in side] for side in (runs, plains)))
    return found


@functools.cache
def _plainly(network: Any, plain: Any, steps: int, precision: str) -> tuple[dict[str, Tensor], Trained]:
    """The initial weights, and what the plain script makes of them: once for all faults that are compared with it."""
    model = _seeded(network, 1)
    start = _copy(model)
    if precision == "double":
        model.double()
    return start, plain(model, steps, False)


def _errors(run: Trained, plain: Trained, start: Mapping[str, Tensor]) -> dict[str, float]:
    """The worst of the `losses`, in parts of the largest, of the plain script's `metrics`, and of the changes of the tensors of `weights` since the start."""
    assert len(run.losses) == len(plain.losses)
    assert plain.metrics.keys() <= run.metrics.keys()
    assert run.weights.keys() == plain.weights.keys() == start.keys()
    return {
        "losses": max(abs(one - other) if math.isfinite(one) else math.inf for one, other in zip(run.losses, plain.losses, strict=True))
        / max(abs(loss) for loss in plain.losses),
        "metrics": max(_relative(run.metrics[name], value) for name, value in plain.metrics.items()),
        "weights": max(_changed(run.weights[name].double(), plain.weights[name].double(), before.double()) for name, before in start.items()),
    }


def _train_in_double(patches: pytest.MonkeyPatch) -> None:
    """Make runs compute in float64, from the same initial and input numbers in float32; nothing else about them changes."""
    from samewise.runner.training import build

    make_model, make_transforms = build.make_model, build.make_batch_transforms

    def widened(values: Any) -> Any:
        return tree_map_only(Tensor, lambda value: value.double() if value.is_floating_point() else value, values)

    def model(*args: Any, **named: Any) -> nn.Module:
        made = make_model(*args, **named).double()
        for module in (made, *made.children()):
            module.register_forward_pre_hook(lambda _, values: widened(values))
        return made

    def transforms(*args: Any) -> Callable[[Any], Any]:
        apply = make_transforms(*args)
        return lambda batch: widened(apply(batch))

    patches.setattr(build, "make_model", model)
    patches.setattr(build, "make_batch_transforms", transforms)


def _plant(patches: pytest.MonkeyPatch, fault: str, recipe: Any) -> list[str]:
    """Plant a fault in the runner or the recipe, or return the overrides that amount to it."""
    if "=" in fault:
        return fault.split()
    real = recipe.loss
    if fault == "the loss is divided by the batch twice":
        patches.setattr(recipe, "loss", lambda *args: (lambda loss: replace(loss, total=loss.total / loss.count))(real(*args)))
    elif fault == "labels are shifted":
        patches.setattr(recipe, "loss", lambda self, model, batch, phase: real(self, model, {**batch, "label": batch["label"].roll(1)}, phase))
    elif fault == "sources are not assigned":
        patches.setattr("samewise.recipes.separation.best_assignment", lambda pairwise: torch.eye(2).to(pairwise).expand_as(pairwise))
    elif fault == "gradients are not cleared":
        patches.setattr("samewise.runner.training.run.Run.clear_gradients", lambda run: None)
    elif fault == "the schedule is a step late":
        from samewise.runner.optim.schedules import Schedule

        before = Schedule.before_step
        patches.setattr(Schedule, "before_step", lambda schedule, step: before(schedule, max(step - 1, 0)))
    else:
        assert fault == "evaluation is in training mode", fault
        from samewise.runner.training import evaluation
        from samewise.runner.training.guards import rehearsal

        assert rehearsal.evaluating is evaluation.evaluating  # its own stays: it would find the fault itself, as the recipe's
        patches.setattr(evaluation, "evaluating", lambda model: torch.no_grad())
    return []


def _seeded(network: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return network()


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12) if math.isfinite(value) else math.inf


def _changed(value: Tensor, reference: Tensor, before: Tensor) -> float:
    """The error of a tensor's change. A change below a millionth of the tensor, as rounding makes of a zero gradient, counts as a millionth."""
    change = max(float((reference - before).norm()), 1e-6 * float(before.norm()), 1e-12)
    error = float((value - reference).norm()) / change
    return error if math.isfinite(error) else math.inf


def _welch(first: Sequence[float], second: Sequence[float]) -> float:
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in (first, second)))
    return abs(statistics.fmean(first) - statistics.fmean(second)) / max(error, 1e-12)
