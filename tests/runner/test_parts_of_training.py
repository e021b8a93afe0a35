"""The small parts of training, tested alone on a run that is built but not trained: what is due, progress, the recorder, gradients, saved state."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as draw
from samewise_tiny import DIGITS
from torch import nn
from torch.optim import SGD

from samewise.runner.config import schema
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Interrupted, TrainingError
from samewise.runner.interfaces import Batch, Callback, Outcome, Phase
from samewise.runner.precision import Precision
from samewise.runner.records import checkpoint
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.base import Tally
from samewise.runner.tracking.tracker import Silent
from samewise.runner.training.build import build
from samewise.runner.training.guards.finite import FiniteNumbers, nonfinite_names
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.recorder import Recorder
from samewise.runner.training.run import Numbers, Progress, Run, checkpoint_due, evaluation_due, evaluation_interval, is_done
from samewise.runner.training.state import load_weights, save

DRAWN = settings(
    deadline=None, database=None, derandomize=True, phases=[HypothesisPhase.explicit, HypothesisPhase.generate], suppress_health_check=list(HealthCheck)
)
TINY = [*DIGITS, "model.width=4"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(Path(__file__).resolve().parents[2])
    folder = RunFolder(tmp_path_factory.mktemp("parts") / "run")
    folder.path.mkdir()
    return build(compose(TINY, project=project), project, folder)


@pytest.fixture
def run(built: Run) -> Iterator[Run]:
    """At step 0, with its own recorder; weights, gradients and counters are restored afterwards."""
    before = {name: value.clone() for name, value in built.model.state_dict().items()}
    yield dataclasses.replace(built, recorder=recorder(built), progress=Progress())
    built.model.load_state_dict(before)
    built.clear_gradients()
    built.strategy.peers.stop_agreed = None


def recorder(run: Run, log_every_steps: int = 1, **callbacks: Callback) -> Recorder:
    made = Recorder(run.recorder.trace, callbacks, log_every_steps, "R1", [])
    made.view = run.recorder.view
    return made


def at(run: Run, step: int, **parts: Any) -> Run:
    return dataclasses.replace(run, progress=dataclasses.replace(run.progress, step=step), **parts)


def plan(steps_per_epoch: int) -> Plan:
    return Plan(samples=steps_per_epoch, batch_size=1, micro_batches=1, drop_last=True)


INTERVALS = draw.none() | draw.integers(0, 5)


def test_evaluations_are_due_at_their_interval_and_at_the_end(built: Run) -> None:
    @DRAWN
    @given(INTERVALS, INTERVALS, draw.integers(1, 4), draw.integers(1, 20))
    @example(None, None, 3, 10)
    @example(1, None, 1, 3)
    def are_due(steps: int | None, epochs: int | None, steps_per_epoch: int, total: int) -> None:
        run = dataclasses.replace(built, progress=Progress(), recorder=recorder(built), plan=plan(steps_per_epoch), total_steps=total)
        run = dataclasses.replace(run, evaluate=schema.Evaluate(every_steps=steps, every_epochs=epochs))
        every = steps if steps else epochs * steps_per_epoch if epochs else 0
        assert evaluation_interval(run) == every
        expected = [step for step in range(1, total + 1) if step == total or (every > 0 and step % every == 0)]
        assert [step for step in range(total + 1) if evaluation_due(at(run, step))] == expected
        for step in expected:
            assert not evaluation_due(dataclasses.replace(run, progress=Progress(step=step, evaluated=step))), "it has been made"
            assert evaluation_due(dataclasses.replace(run, progress=Progress(step=step, evaluated=step - 1)))

    are_due()


def test_checkpoints_are_due_at_intervals_at_the_best_and_at_the_end(built: Run) -> None:
    @DRAWN
    @given(INTERVALS, INTERVALS, draw.integers(1, 4), draw.integers(1, 20), draw.integers(0, 2), draw.none() | draw.integers(1, 20))
    @example(None, None, 3, 10, 1, 4)
    @example(None, None, 3, 10, 0, 4)
    def are_due(steps: int | None, epochs: int | None, steps_per_epoch: int, total: int, keep_best: int, best: int | None) -> None:
        run = dataclasses.replace(
            built,
            progress=Progress(best={} if best is None else {"step": best}),
            recorder=recorder(built),
            plan=plan(steps_per_epoch),
            total_steps=total,
            checkpoint=schema.Checkpoint(every_steps=steps, every_epochs=epochs, keep_best=keep_best),
        )
        expected = [
            step
            for step in range(1, total + 1)
            if step == total or (steps and step % steps == 0) or (epochs and step % (epochs * steps_per_epoch) == 0) or (keep_best and step == best)
        ]
        assert [step for step in range(total + 1) if checkpoint_due(at(run, step))] == expected
        for step in expected:
            saved = dataclasses.replace(run.recorder, saved=step)
            assert not checkpoint_due(at(run, step, recorder=saved)), "it has been written"

    are_due()


def test_a_stop_request_saves_first_and_interrupts_unless_training_is_done(run: Run) -> None:
    run = dataclasses.replace(run, total_steps=9, checkpoint=schema.Checkpoint(every_epochs=None))
    assert not checkpoint_due(at(run, 4))
    assert is_done(at(run, 4)) is False
    run.strategy.peers.stop_agreed = "SIGTERM"
    assert checkpoint_due(at(run, 4))
    assert not checkpoint_due(at(run, 0)), "there is nothing to save"
    with pytest.raises(Interrupted, match="step 4: stopped by SIGTERM, and saved"):
        is_done(at(run, 4))
    assert is_done(at(run, 9)) is True


def test_the_clock_includes_earlier_sessions_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([102.5, 103.0, 107.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress(_started=100.0)
    assert (progress.step, progress.metrics, progress.best, progress.seconds) == (0, {}, {}, 2.5)
    progress.load_state({"step": 5, "evaluated": 4, "metrics": {"a": 1.0}, "best": {"step": 4}, "seconds": 60.0})
    assert progress.state() == {"step": 5, "evaluated": 4, "metrics": {"a": 1.0}, "best": {"step": 4}, "seconds": 63.0}
    progress.stop_clock()
    assert progress.seconds == progress.seconds == 67.0


class Noting(Silent):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(metrics), step))


def test_metrics_of_a_step_are_logged_together_and_others_at_once(run: Run) -> None:
    class Doubling(Callback):
        def on_step(self, run: Any, outcome: Outcome) -> None:
            made.log({"twice": 2.0 * outcome.step}, outcome.step)

    made = recorder(run, log_every_steps=3, doubling=Doubling())
    made.tracker = noting = Noting()
    made.log({"before": 1.0}, 0)
    assert noting.logged == [({"before": 1.0}, 0)]
    for step in range(1, 5):
        made.record(Outcome(step, {"loss": 0.5, "part": 0.25}, 8.0, {"gradient_norm": 1.0}, 0, 0, 8))
    assert noting.logged[1:] == [
        ({"twice": 2.0}, 1),
        ({"twice": 4.0}, 2),
        ({"train/loss": 0.5, "train/part": 0.25, "train/gradient_norm": 1.0, "twice": 6.0}, 3),
        ({"twice": 8.0}, 4),
    ]
    made.log({"valid/loss": 1.0}, 4)
    assert noting.logged[-1] == ({"valid/loss": 1.0}, 4)
    made.callbacks.clear()
    made.record(Outcome(5, {"loss": 0.5}, 8.0, {"gradient_norm": 1.0}, 0, 0, 8))
    assert len(noting.logged) == 6, "nothing is sent where nothing was logged"


def clipped_at(run: Run, norm: float | None) -> Run:
    return dataclasses.replace(run, phases=[dataclasses.replace(phase, clip_norm=norm) for phase in run.phases])


def test_a_run_knows_its_epoch_and_rates_and_can_clear_its_gradients(run: Run) -> None:
    run = dataclasses.replace(run, plan=plan(4), progress=Progress(step=6))
    assert run.epoch == 1.5
    assert run.config is run.composed.cfg
    assert run.callbacks is run.recorder.callbacks
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in zip(run.parameters, (0.3, 0.1, 0.3), strict=False)]
    phases = [TrainingPhase(number, Phase(), SGD(groups[number:], lr=1.0)) for number in range(2)]
    assert dataclasses.replace(run, phases=phases).learning_rates() == [0.3, 0.1]
    for group in phases[0].optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], 0.0  # as at the start of a warm-up
    assert phases[0].learning_rates() == [0.0, 0.0], "as many as before"
    for parameter in run.parameters:
        parameter.grad = torch.zeros_like(parameter)
    run.clear_gradients()
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("evaluated", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_has_the_metrics_of_its_step_and_no_shards_on_one_process(run: Run, evaluated: int, sharded: bool) -> None:
    settings = schema.Checkpoint(background=False, sharded=sharded)
    run = dataclasses.replace(run, progress=Progress(step=3, evaluated=evaluated, metrics={"valid/loss": 0.5}), checkpoint=settings)
    save(run)
    run.checkpoints.wait()
    assert run.recorder.saved == 3
    folder = run.folder.path / "checkpoints" / "step-00000003"
    assert json.loads((folder / "manifest.json").read_text())["metrics"] == ({"valid/loss": 0.5} if evaluated == 3 else {})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "state.pt"]
    assert checkpoint.load(folder)["step"] == 3


@pytest.mark.parametrize(("wrong", "more"), [(1, ""), (2, ", and 1 more differences"), (3, ", and 2 more differences")])
def test_a_model_that_does_not_fit_a_checkpoint_is_reported_by_its_first_difference(wrong: int, more: str) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    weights = {name: torch.zeros(3 if place < wrong else 2, 2) for place, name in enumerate(model.state_dict())}
    with pytest.raises(ConfigError) as caught:
        load_weights(model, weights)
    (problem,) = caught.value.problems
    first = "size mismatch for 0.weight: copying a param with shape torch.Size([3, 2]) from checkpoint, the shape in current model is torch.Size([2, 2])"
    assert (problem.path, problem.message) == ("model", f"is not the one that the checkpoint was taken from: {first}{more}")


@pytest.mark.parametrize(("spoilt", "others"), [(1, ""), (2, ", nor are 1 others"), (3, ", nor are 2 others")])
def test_a_nonfinite_model_is_reported_by_its_first_tensor_and_a_count(run: Run, spoilt: int, others: str) -> None:
    names = [name for name, value in run.model.state_dict().items() if value.is_floating_point()][2 : 2 + spoilt]
    guard = FiniteNumbers(run)
    for name in names:
        run.model.state_dict()[name].view(-1)[0] = math.nan
    with pytest.raises(TrainingError) as caught:
        guard.before_checkpoint(at(run, 5))
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("step 5", f"{names[0]} is not finite{others}: no checkpoint is written")
    FiniteNumbers(run).before_checkpoint(at(run, 5))


class Scaled(Precision):
    def may_overflow(self) -> bool:
        return True


def test_a_nonfinite_step_is_reported_by_its_first_cause(run: Run) -> None:
    def message(losses: dict[str, float], norm: float, **parts: Any) -> str:
        try:
            FiniteNumbers(run).on_numbers(at(run, 5, **parts), Numbers(losses, norm, [x.grad for x in run.model.parameters()], ()))
        except TrainingError as error:
            (problem,) = error.problems
            assert problem.path == "step 6"
            return problem.message.partition(" not finite")[0]
        return ""

    assert message({"loss": 1.0}, 1.0) == ""
    assert message({"loss": 1.0, "part": math.nan, "other": math.inf}, math.nan) == "the part is"
    assert message({"loss": 1.0}, math.inf, phases=clipped_at(run, None).phases) == "", "a square that overflows is no gradient that does"
    assert message({"loss": 1.0}, math.inf, phases=clipped_at(run, 1.0).phases).startswith("the gradient is too large to be clipped")
    names = [name for name, _ in run.model.named_parameters()]
    for number, parameter in enumerate(run.model.parameters()):
        parameter.grad = torch.full_like(parameter, math.nan if number in (3, 5) else 1.0)
    assert message({"loss": 1.0}, math.nan) == f"the gradient of {names[3]} is"
    assert message({"loss": 1.0}, 1.0) == "", "the norm is looked at first"
    assert message({"loss": 1.0}, math.nan, precision=Scaled()) == "", "the scale will be lowered"
    assert message({"loss": math.nan}, math.nan, precision=Scaled()) == "the loss is"


def test_a_nonfinite_step_names_batch_transforms_that_make_numbers_not_finite(run: Run) -> None:
    def divide(batch: Batch) -> Batch:
        return {**batch, "image": run.transforms["train"](batch)["image"] / 0}

    with pytest.raises(TrainingError, match=r"the loss is not finite, nor is image after transforms\.train\.batch"):
        FiniteNumbers(run).on_numbers(at(run, 5, transforms={**run.transforms, "train": divide}), Numbers({"loss": math.nan}, math.nan, None, ()))


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e3])
@pytest.mark.parametrize(("count", "nominal", "size"), [(8.0, 8.0, 1.0), (6.0, 8.0, 1.0), (16.0, 8.0, 1e-4), (3.0, 1.0, 1e-5)])
def test_gradients_are_averaged_and_clipped_as_in_torch(count: float, nominal: float, size: float, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    sums = [size * torch.randn(5, 3), size * torch.randn(4), None]
    expected = [None if one is None else one.double() * nominal / count for one in sums]
    norm = math.sqrt(sum(one.square().sum().item() for one in expected if one is not None))
    for parameter, one in zip(parameters, sums, strict=True):
        parameter.grad = one
    phase = TrainingPhase(0, Phase(), SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1), clip_norm=clip_norm)
    assert phase.condition_gradients(Tally(count, nominal), Precision()).item() == pytest.approx(norm, rel=1e-6)
    shrunk = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
    for parameter, one in zip(parameters, expected, strict=True):
        if one is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.double(), one * shrunk, rtol=1e-6, atol=0)


def test_clipping_leaves_what_is_not_finite_where_it_is() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    one.grad, other.grad = torch.ones(2), torch.tensor([1.0, torch.nan, 2.0])
    assert TrainingPhase(0, Phase(), SGD([one, other], lr=0.1), clip_norm=1.0).condition_gradients(Tally(1.0), Precision()).isnan()
    assert nonfinite_names([("one", one.grad), ("other", other.grad)]) == ["other"]


def test_a_step_that_counts_nothing_is_an_error_with_its_phase() -> None:
    for phase, said in {Phase(): "the loss counts nothing", Phase("critic"): "the loss of phase 'critic' counts nothing"}.items():
        with pytest.raises(ConfigError, match=said):
            TrainingPhase(0, phase, SGD([nn.Parameter(torch.zeros(1))], lr=0.1)).condition_gradients(Tally(0.0, 8.0), Precision())


def test_only_the_parameters_of_a_phase_need_gradients_within_it() -> None:
    mine, others = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    phase = TrainingPhase(0, Phase(), SGD([mine], lr=0.1), untrained=[others])
    with contextlib.suppress(ZeroDivisionError), phase.training(0):
        assert (mine.requires_grad, others.requires_grad) == (True, False)
        raise ZeroDivisionError
    assert (mine.requires_grad, others.requires_grad) == (True, True)


NOT_FINITE: dict[str, Any] = {
    "double": torch.tensor([1.0, math.nan], dtype=torch.float64),
    "half": torch.tensor([math.inf], dtype=torch.float16),
    "brain": torch.tensor([-math.inf], dtype=torch.bfloat16),
    "eight": torch.tensor([math.inf]).to(torch.float8_e5m2),
    "other eight": torch.tensor([math.nan]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([complex(0, math.inf)]),
}

FINITE: dict[str, Any] = {
    "number": 3,
    "nothing": None,
    "text": "inf",
    "whole": torch.tensor([2**40]),
    "truth": torch.tensor([True]),
    "empty": torch.zeros(0),
    "large": torch.tensor([3e38, 3e38]),
    "small eight": torch.tensor([0.5]).to(torch.float8_e4m3fn),
    "complex one": torch.tensor([1j]),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_nonfinite_tensors_of_every_dtype_are_named(name: str) -> None:
    assert nonfinite_names([*FINITE.items(), (name, NOT_FINITE[name])]) == [name]


def test_all_nonfinite_tensors_are_named_in_order_and_finite_ones_are_not() -> None:
    assert nonfinite_names([*NOT_FINITE.items(), *FINITE.items()]) == list(NOT_FINITE)
    assert nonfinite_names(FINITE.items()) == []
